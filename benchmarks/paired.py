"""Compare two versions of Trawl: whole runs of all groups, in turn, and the ratio of each case.

    git worktree add ../before v0.9
    python benchmarks/paired.py ../before .                   # all groups: about two hours
    python benchmarks/paired.py ../before . --group single    # a quarter of an hour
    python benchmarks/paired.py ../before . --cases pendulum batch8 --pairs 9

Both versions run the benchmarks of this checkout, without the other libraries: Trawl, and the
hand-written loops where a case has them. A run is a process of its own that measures each case for
a few short turns. The ratio of a pair says how many times as good the second version is, and the
median over the pairs counts. The hand-written loop is the same code in both versions, so its ratio
shows what the machine did.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from harness import HAND, TRAWL, Clock
from run import GROUPS, GroupName

# How a measure of a contender went: its median over the rounds, and whether less is better.
Figure = tuple[float, bool]
# By case, measure and contender.
Run = dict[str, dict[str, dict[str, Figure]]]

COSTS = ("logs", "figures", "traces", "environments", "infos", "stacks", "normalizing")


@dataclass(frozen=True)
class Options:
    """Compare two versions of Trawl."""

    before: tyro.conf.Positional[Path]
    """A checkout of the version that counts as 1."""
    after: tyro.conf.Positional[Path]
    """A checkout of the version that is compared with it."""
    group: GroupName = "all"
    """The cases to measure."""
    cases: tuple[str, ...] = ()
    """Cases of the group; all if none is named."""
    pairs: int = 5
    """Number of runs of each version."""
    rounds: int = 3
    """Number of turns of each contender in a run."""
    seconds: float = 0.3
    """Length of a turn."""
    clock: Clock = "wall"
    """Of cases of one process; processor time is steadier on a busy machine."""
    loops: bool = True
    """Measure the hand-written loops, too."""
    json: Path | None = None
    """File for the ratios, besides the table."""
    once: Path | None = None
    """Instead, measure the installed version once, and write its figures to this file."""


def main(options: Options) -> None:
    """Compare, print the table, and write the ratios."""
    if options.once is not None:
        import torch

        torch.set_num_threads(1)
        options.once.write_text(json.dumps(dict(figures(options))))
        return
    from rich.console import Console

    _check(options)
    console = Console()
    runs: tuple[list[Run], list[Run]] = ([], [])
    for pair in range(options.pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            tree = (options.before, options.after)[side]
            with console.status(f"pair {pair + 1} of {options.pairs}: {tree}"):
                runs[side].append(_run(tree.resolve(), options))
    rows = compared(*runs)
    console.print(_table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def _check(options: Options) -> None:
    """Ends the program if there is nothing to measure."""
    for tree in (options.before, options.after):
        if not (tree / "src" / "trawl").is_dir():
            sys.exit(f"{tree} is not a checkout of Trawl: it has no src/trawl")
    if unknown := sorted(set(options.cases) - set(GROUPS["all"])):
        sys.exit(f"there are no cases {', '.join(unknown)}; there are {', '.join(GROUPS['all'])}")


def _run(tree: Path, options: Options) -> Run:
    """The figures of one run of the version in `tree`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, __file__, str(options.before), str(options.after)]
        command += ["--once", out.name, "--group", options.group]
        command += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
        command += ["--clock", options.clock, "--loops" if options.loops else "--no-loops"]
        command += ["--cases", *options.cases] if options.cases else []
        path = os.pathsep.join([str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        subprocess.run(
            command, check=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        )
        found: Run = json.loads(Path(out.name).read_text())
        return found


def figures(options: Options) -> Iterator[tuple[str, dict[str, dict[str, Figure]]]]:
    """Measures the cases, without the other libraries."""
    names = options.cases or GROUPS[options.group]
    for name in names:
        print(name, file=sys.stderr, flush=True)
        try:
            yield from _figures(name, options)
        except Exception as error:  # a case that fails leaves the others their figures
            print(f"{name}: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)


def _figures(name: str, options: Options) -> Iterator[tuple[str, dict[str, dict[str, Figure]]]]:
    from harness import measure as measure_case
    from multi.cases import RACES
    from multi.growth import COUNTS, sizes, sizes_async, workers
    from multi.race import measure as measure_race

    modules = {"single": "cases", **{group: group for group in COSTS}}
    group = next(group for group, names in GROUPS.items() if name in names)
    if name == "import":
        from startup import measure_startup

        started = {s.statement: (s.median, True) for s in measure_startup(options.rounds)}
        yield name, {"ms": {"Trawl": started["import trawl"]}}
    elif group in modules:
        case = _ours(importlib.import_module(modules[group]).CASES[name](), options)
        result = measure_case(case, options.rounds, options.seconds, options.clock)
        speeds = {who: (statistics.median(all_), False) for who, all_ in result.speeds.items()}
        yield name, {"frames/s": speeds}
    else:
        growths = {"sizes": [sizes], "sizes_async": [sizes_async]}
        growths["workers"] = [lambda count=count: workers(count) for count in COUNTS]
        races = RACES if group == "multi" else importlib.import_module(f"{group}.cases").RACES
        for make in growths.get(name) or [races[name]]:
            race = _ours(make(), options)
            raced = measure_race(race, options.rounds, options.seconds)
            yield (
                race.name,
                {
                    measure: {
                        who: (statistics.median(values[measure]), how.less)
                        for who, values in raced.values.items()
                        if measure in values
                    }
                    for measure, how in race.measures.items()
                },
            )


def _ours(case: Any, options: Options) -> Any:
    """The case, or race, without other libraries and other options."""
    names = (TRAWL, HAND) if options.loops else (TRAWL,)
    ours = tuple(one for one in case.contenders if one.name in names)
    return dataclasses.replace(case, contenders=ours)


def compared(before: list[Run], after: list[Run]) -> list[dict[str, Any]]:
    """A row for each measure of a case: ratios of Trawl, of the loop, and of both to each other."""
    rows = []
    for case, measures in after[0].items():
        for measure in measures:
            (old, old_loop), (new, new_loop) = (
                [_of(runs, case, measure, name) for name in (TRAWL, HAND)]
                for runs in (before, after)
            )
            rows.append(
                {
                    "case": case,
                    "measure": measure,
                    "trawl": _ratios(new, old),
                    "loop": _ratios(new_loop, old_loop),
                    "to_loop_before": _ratios(old, old_loop),
                    "to_loop": _ratios(new, new_loop),
                }
            )
    return rows


def _of(runs: list[Run], case: str, measure: str, name: str) -> list[Figure | None]:
    return [run.get(case, {}).get(measure, {}).get(name) for run in runs]


def _ratios(ones: list[Figure | None], others: list[Figure | None]) -> list[float]:
    pairs = zip(ones, others, strict=True)
    return [_better(one, other) for one, other in pairs if one is not None and other is not None]


def _better(one: Figure, other: Figure) -> float:
    """How many times as good `one` is."""
    if not (one[0] and other[0]):
        return 1.0
    return other[0] / one[0] if one[1] else one[0] / other[0]


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="After, by before (medians over the pairs)")
    for name in ("case", "measure"):
        table.add_column(name)
    for name in ("Trawl", "min - max", "loop", "to loop before", "to loop after"):
        table.add_column(name, justify="right")
    for row in rows:
        spread = f"{min(row['trawl']):.2f} - {max(row['trawl']):.2f}" if row["trawl"] else ""
        cells = [_median(row[key]) for key in ("trawl", "loop", "to_loop_before", "to_loop")]
        table.add_row(row["case"], row["measure"], cells[0], spread, *cells[1:])
    return table


def _median(values: list[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else ""


if __name__ == "__main__":
    main(tyro.cli(Options))
