"""Kills of ``trawl collect``, each followed by ``--resume``: the dataset must come out the same.

Run as ``python benchmarks/kills.py``. For each format and layout, a collection is killed 20 times,
at random operations with the dataset's files. Its frames are compared, bit for bit, with those of
an unbroken collection.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "cli"))

from resume_parts import broken, equal, whole

LAYOUTS = {
    "one process": ["--envs", "3"],
    "1 worker": ["--workers", "1"],
    "3 workers": ["--workers", "3"],
}


@dataclass
class Options:
    """Options of the script."""

    kills: int = 20
    """Number of kills of each collection."""
    formats: tuple[str, ...] = ("memmap", "parquet", "minari")
    """Formats of the datasets."""
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    """Layouts of the collections."""
    frames: int = 3000
    """Frames of each collection."""
    seed: int = 0
    """Seed of the moments of the kills."""


def main(options: Options) -> None:
    """Kills collections, and prints whether they came out the same."""
    failed = False
    for kind in options.formats:
        for layout in options.layouts:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder)
                arguments = ["Pendulum-v1", "--policy", "cli_envs:gaussian", "--seed", "1",
                             "--frames", str(options.frames), "--frames-per-batch", "60",
                             "--max-frames-per-traj", "45", "--format", kind,
                             *LAYOUTS[layout]]  # fmt: skip
                expected, count = whole(arguments, place)
                found = broken(arguments, place, count, options.kills, options.seed)
                same = equal(found, expected)
                failed |= not same
                print(f"{kind}, {layout}: {'the same' if same else 'OTHER FRAMES'}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main(tyro.cli(Options))
