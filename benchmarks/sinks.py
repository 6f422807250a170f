"""What a sink costs for each batch, and how much of it is the wait for the disk.

    python benchmarks/sinks.py                  # a minute or two
    python benchmarks/sinks.py --quick          # a glance; writes no file
    python benchmarks/sinks.py --directory /mnt/fast

Each format takes batches of a few sizes, in turns with the wait for the disk and without it (fsync
does nothing then, which no user can ask for: a power cut would take frames that were committed).
Times are those of the call of write; medians, with quartiles. The disk decides them: say where.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
FORMATS = ("memmap", "minari", "parquet")


@dataclass(frozen=True)
class Options:
    """What a sink costs for each batch."""

    sizes: tuple[int, ...] = (100, 1000, 10_000)
    """Frames of a batch."""
    batches: int = 30
    """Batches of each size, format and way."""
    directory: Path | None = None
    """On the disk that is measured; the folder for temporary files without it."""
    json: Path = BENCHMARKS / "results" / "sinks.json"
    """Where the numbers go."""
    quick: bool = False
    """5 batches, and no file."""


@contextmanager
def _without_waiting() -> Iterator[None]:
    before = os.fsync
    os.fsync = lambda file: None
    try:
        yield
    finally:
        os.fsync = before


def _write(make: Callable[[Path], Any], place: Path, batch: Any, count: int) -> list[float]:
    """Milliseconds of each call of write, but the first, which lays out the files."""
    took = []
    sink = make(place)
    for _ in range(count + 1):
        began = time.perf_counter()
        sink.write(batch)
        took.append(1e3 * (time.perf_counter() - began))
    sink.close()
    shutil.rmtree(place)
    return took[1:]


def _measure(kind: str, size: int, options: Options) -> dict[str, list[float]]:
    """Milliseconds, with the wait for the disk and without it."""
    from trawl import Collector
    from trawl.data import MemmapSink, MinariSink, ParquetSink

    with Collector("Pendulum-v1", frames_per_batch=size, total_frames=size) as collector:
        batch = collector.next()
    sinks: dict[str, Callable[[Path], Any]] = {
        "memmap": MemmapSink,
        "minari": MinariSink,
        # A file for each batch, so that each is a commit, as it is with the others.
        "parquet": lambda place: ParquetSink(place, commit_bytes=0),
    }
    # Whole episodes, so that each batch is a commit.
    batch["next", "done"][-1] = batch["next", "truncated"][-1] = True
    rounds, found = 5, {"durable": [], "not durable": []}
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        for _ in range(rounds):
            count = max(1, (5 if options.quick else options.batches) // rounds)
            found["durable"] += _write(sinks[kind], Path(folder, "d"), batch, count)
            with _without_waiting():
                found["not durable"] += _write(sinks[kind], Path(folder, "d"), batch, count)
    return found


def main(options: Options) -> None:
    """Measure, and report."""
    # Read when torch, numpy and others are imported: hence the imports below this line.
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(BENCHMARKS))
    from rich.console import Console
    from rich.table import Table

    from report import circumstances, write_json

    console = Console()
    table = Table(title="A sink's time for a batch, ms")
    for heading in ("format", "frames", "durable", "without fsync"):
        table.add_column(heading, justify="right")
    rows = []
    for kind in FORMATS:
        for size in options.sizes:
            with console.status(f"{kind}, {size:,} frames"):
                found = _measure(kind, size, options)
            quarters = {way: statistics.quantiles(took, n=4) for way, took in found.items()}
            rows.append({"format": kind, "frames": size, "milliseconds": quarters})
            cells = [f"{q[1]:.1f} ({q[0]:.1f} to {q[2]:.1f})" for q in quarters.values()]
            table.add_row(kind, f"{size:,}", *cells)
    console.print(table)
    if not options.quick:
        content = {**circumstances({"batches": options.batches}), "sinks": rows}
        write_json(options.json, content)
        console.print(f"Written: {options.json}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
