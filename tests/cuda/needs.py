"""Say what a run on a GPU needs, and fail if something isn't there. Nothing is installed."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version

NEEDED = ("torch", "tensordict", "torchrl", "gymnasium", "cloudpickle", "orjson", "psutil", "rich")
NEEDED += ("pytest", "pytest-timeout", "hypothesis")
USED_IF_THERE = ("pytest-xdist", "pettingzoo", "jax", "envpool", "dm_env")


def all_is_there(device: str) -> bool:
    """Prints the device and the packages, and returns True if nothing is missing."""
    print(f"Python {sys.version.split()[0]}")
    missing = [name for name in NEEDED if _says(name, "MISSING") is None]
    for name in USED_IF_THERE:
        _says(name, "not there: some tests are skipped")
    if "torch" not in missing:
        import torch

        if not device.startswith("cuda"):
            print(f"  device {device}: in miniature")
        elif torch.cuda.is_available():
            name = torch.cuda.get_device_name(device)
            print(f"  device {device}: {name}, CUDA {torch.version.cuda}")
        else:
            missing.append("a CUDA device that torch finds (DEVICE=cpu runs all in miniature)")
    if missing:
        print(f"Missing: {', '.join(missing)}.", file=sys.stderr)
    return not missing


def _says(name: str, otherwise: str) -> str | None:
    """Prints and returns the version of a package, or None."""
    try:
        found = version(name)
    except PackageNotFoundError:
        found = None
    print(f"  {name} {found or otherwise}")
    return found


if __name__ == "__main__":
    raise SystemExit(0 if all_is_there(os.environ.get("DEVICE", "cuda:0")) else 2)
