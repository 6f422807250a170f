"""Run everything that needs a GPU, without network and without installing anything.

    python tests/cuda/run.py                 # or `make test-cuda`: about five minutes on one card
    DEVICE=cpu python tests/cuda/run.py      # the same in miniature, where there is no GPU

The first lines say what is needed; if something isn't there, nothing runs. After the tests, a short
program collects under PyTorch's own sanitizer, which looks for streams that read what another is
still writing, and under NVIDIA's compute-sanitizer, which looks for wrong reads and writes of
memory (from the CUDA toolkit, or the package nvidia-cuda-sanitizer-api-cu12).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from needs import all_is_there

ROOT = Path(__file__).resolve().parents[2]
# Each process has a CUDA context of its own, of half a gigabyte.
MOST_PROCESSES = 14


def main() -> int:
    """Checks what is needed, and runs the tests and the sanitizers."""
    device = os.environ.setdefault("DEVICE", "cuda:0")
    if not all_is_there(device):
        return 2
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.environ["OMP_NUM_THREADS"] = "1"
    if device != "cpu" and (find_spec("jax_cuda12_plugin") or find_spec("jax_cuda13_plugin")):
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
        # Otherwise, JAX takes most of the card's memory at once.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "tests/cuda", *sys.argv[1:]]
    if find_spec("xdist"):
        processes = max(1, min((os.cpu_count() or 1) - 2, MOST_PROCESSES))
        command += ["-n", str(processes)]
    failed = subprocess.run(command, cwd=ROOT).returncode
    return failed or _sanitize(device)


def _sanitize(device: str) -> int:
    """Collects for a short time under each sanitizer that is there."""
    command = [sys.executable, str(ROOT / "tests" / "cuda" / "short_run.py")]
    if not device.startswith("cuda"):
        print("Sanitizers need a GPU: the program runs without them.")
        return subprocess.run(command, cwd=ROOT).returncode
    print("Collecting under PyTorch's sanitizer of streams")
    env = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    failed = subprocess.run(command, cwd=ROOT, env=env).returncode
    if failed:
        return failed
    tool = _compute_sanitizer()
    if tool is None:
        print("compute-sanitizer isn't there: memory is not checked.")
        return 0
    print("Collecting under compute-sanitizer")
    checks = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all"]
    return subprocess.run([*checks, *command], cwd=ROOT).returncode


def _compute_sanitizer() -> str | None:
    places = [Path(place, "nvidia/cuda_sanitizer_api/bin/compute-sanitizer") for place in sys.path]
    for place in places:
        if place.is_file():
            place.chmod(place.stat().st_mode | 0o111)
            return str(place)
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )


if __name__ == "__main__":
    raise SystemExit(main())
