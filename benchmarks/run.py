"""Compare Trawl with its peers and with hand-written loops.

    python benchmarks/run.py                        # all cases: some minutes
    python benchmarks/run.py --quick                # a glance; writes no files
    python benchmarks/run.py --cases pendulum batch8
    python benchmarks/run.py --memory               # does memory stay flat?

Everything runs in one process on one thread. Absolute speeds depend on the machine and on what
else it does; the ratios are what counts. Needs, besides Trawl: envpool, matplotlib, psutil, rich,
stable-baselines3, tianshou, torchrl and tyro; a peer that is missing is left out with a note.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
CaseName = Literal[
    "pendulum",
    "batch8",
    "envpool",
    "envpool_short",
    "images",
    "stochastic",
    "torchrl_env",
    "import",
]


@dataclass(frozen=True)
class Options:
    """Compare Trawl with its peers and with hand-written loops."""

    cases: tuple[CaseName, ...] = get_args(CaseName)
    """What to measure."""
    rounds: int = 7
    """How many times each contender gets its turn."""
    seconds: float = 0.7
    """How long a turn is."""
    clock: Literal["wall", "cpu"] = "wall"
    """Wall time, or this process's processor time (steadier on a busy machine)."""
    json: Path = ROOT / "benchmarks" / "results" / "single.json"
    """Where the numbers go."""
    chart: Path = ROOT / "docs" / "assets" / "speed.png"
    """Where the picture goes."""
    quick: bool = False
    """3 rounds of 0.2 s, and no files."""
    memory: bool = False
    """Instead, watch resident memory while many frames are collected."""
    memory_frames: int = 5_000_000
    """How many frames that is."""


def main(options: Options) -> None:
    """Measure, and report."""
    # Read when torch, numpy and others are imported: hence the imports below this line.
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from rich.console import Console

    torch.set_num_threads(1)
    console = Console()
    if options.memory:
        from memory import measure_memory
        from report import print_memory

        print_memory(console, measure_memory(options.memory_frames))
        return
    if options.quick:
        options = dataclasses.replace(options, rounds=3, seconds=0.2)
    compare(options, console)


def compare(options: Options, console: Console) -> None:
    """Run the cases, print the table, write the files."""
    from cases import CASES
    from harness import measure
    from report import as_json, print_startup, table, write_chart, write_json
    from startup import measure_startup

    results, startups = [], []
    for name in options.cases:
        with console.status(name):
            if name == "import":
                startups = measure_startup(options.rounds)
            else:
                case = CASES[name]()
                results.append(measure(case, options.rounds, options.seconds, options.clock))
    if results:
        console.print(table(results))
    if startups:
        print_startup(console, startups)
    if options.quick:
        return
    settings = {"rounds": options.rounds, "seconds": options.seconds, "clock": options.clock}
    write_json(options.json, as_json(results, startups, settings))
    write_chart(options.chart, results)
    console.print(f"\nWritten: {options.json}, {options.chart}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
