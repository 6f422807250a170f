"""What a driver's processor does for each batch of its workers, by their number and by its bytes.

    python benchmarks/clusters/driver_cost.py           # two to four minutes
    python benchmarks/clusters/driver_cost.py --quick   # a glance; writes no file

Workers of each place (processes, Ray actors, ranks, RPC nodes) deliver batches of a few sizes. The
processor time of all threads of the driver's process, less what it needs while nothing happens, is
explained by so much for each part of a batch that a worker makes, and so much for each MB of it
(1e6 bytes). The batches are not looked at: what learning costs is not part of it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Options:
    """What a driver's processor does for each batch of its workers."""

    places: tuple[str, ...] = ("process", "ray", "group", "rpc", "tree")
    """Where workers live."""
    seconds: float = 1.0
    """How long each point is measured."""
    json: Path = BENCHMARKS / "results" / "driver_cost.json"
    """Where the numbers go."""
    quick: bool = False
    """0.2 s, and no file."""


def main(options: Options) -> None:
    """Measure, and report."""
    # Read when torch, numpy and others are imported: hence the imports below this line.
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(BENCHMARKS))
    from rich.console import Console
    from rich.table import Table

    from clusters.costs import ROWS, measure, points_of
    from report import circumstances, write_json

    console = Console()
    table = Table(title="A driver's processor time")
    for heading in ("place", "pace", "µs per part", "µs per MB", "off by (median)", "at most"):
        table.add_column(heading)
    seconds = 0.2 if options.quick else options.seconds
    places = {}
    for where in options.places:
        with console.status(where):
            places[where] = measure(where, points_of(where), seconds)
        for kind, found in places[where]["fits"].items():
            cells = [f"{1e6 * found[key]:,.0f}" for key in ("part", "megabyte")]
            table.add_row(where, kind, *cells, *(f"{100 * e:.0f} %" for e in found["error"]))
    console.print(table)
    if not options.quick:
        content = {**circumstances({"seconds": seconds, "rows": ROWS}), "places": places}
        write_json(options.json, content)
        console.print(f"Written: {options.json}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
