"""Compare Trawl with its peers and with hand-written loops.

    python benchmarks/run.py                        # all cases: about a quarter of an hour
    python benchmarks/run.py --quick                # a glance; writes no files
    python benchmarks/run.py --cases pendulum sync2
    python benchmarks/run.py --group multi          # those of many processes
    python benchmarks/run.py --group weights        # what new weights cost
    python benchmarks/run.py --group clusters       # those of Ray, process groups and RPC
    python benchmarks/run.py --group logs           # what it costs to log actions for a replay
    python benchmarks/run.py --group figures        # what the figures in stats() cost
    python benchmarks/run.py --group traces         # what it costs to write a timeline
    python benchmarks/run.py --group environments   # those that Gymnasium does not make
    python benchmarks/run.py --group infos          # what entries of info cost
    python benchmarks/run.py --group stacks         # stacks of frames, each stored once
    python benchmarks/run.py --group normalizing    # what normalised observations cost
    python benchmarks/run.py --memory               # does memory stay flat?

The cases of one process run in this one, on one thread. In those of many processes each contender
has a process of its own, which is stopped, with its workers, while it is another's turn. Absolute
speeds depend on the machine and on what else it does; the ratios are what counts. Needs, besides
Trawl: envpool, matplotlib, psutil, ray, rich, stable-baselines3, tianshou, torchrl and tyro; RLlib
also needs dm-tree, lz4 and scipy. A peer that is missing is left out with a note. `make bench`
installs them all, except for Sample Factory: it asks for old versions of what others need, but its
sampler also runs with the present ones. To add it:

    pip install --no-deps sample-factory==2.1.1 signal-slot-mp==1.0.5 colorlog==6.12.0
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from rich.console import Console


ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "assets"
SingleName = Literal[
    "pendulum",
    "frame1",
    "frames16",
    "batch8",
    "envpool",
    "envpool_short",
    "envpool_ready",
    "envpool_ready_short",
    "images",
    "stochastic",
    "stochastic8",
    "tanh_normal",
    "tanh_normal8",
    "categorical1",
    "categorical8",
    "spread8",
    "torchrl_env",
    "tensors",
    "vmas",
    "gymnax",
    "gymnax_short",
    "jumanji",
    "import",
]
MultiName = Literal[
    "sync2",
    "async2",
    "images2",
    "images_async2",
    "delivery",
    "vector2",
    "first_batch",
    "parallel2",
    "parallel16",
    "groups16",
    "ready16",
    "async64",
    "async_images",
    "collected2",
    "straggler",
    "prefetch2",
    "snapshots2",
    "workers",
    "sizes",
    "sizes_async",
]
WeightsName = Literal[
    "weights_2",
    "weights_8",
    "weights_16",
    "weights_asleep",
    "weights_1000x10000",
    "weights_1000x1000",
    "taking_large",
    "taking_1000x10000",
    "taking_1000x1000",
    "updating_sync",
    "updating_async",
]
ClustersName = Literal[
    "ray_sync",
    "ray_async",
    "group_sync",
    "group_async",
    "rpc_sync",
    "rpc_async",
    "ray_images",
    "ray_first_batch",
    "ray_weights_8",
]
LogsName = Literal["log_pong", "log_cartpole", "log_cartpole_short", "log_pool", "log_pool_short"]
FiguresName = Literal["figures_cartpole", "figures_pool"]
TracesName = Literal["trace_cartpole", "trace_cartpole_short", "trace_workers"]
EnvironmentsName = Literal["dm_control"]
InfosName = Literal["info_cartpole", "info_random"]
StacksName = Literal["stack_images", "stack_images8", "stack_pong", "stack_tensors"]
NormalizingName = Literal["normalize_pendulum", "normalize_tensors"]
GroupName = Literal[
    "single",
    "multi",
    "weights",
    "clusters",
    "logs",
    "figures",
    "traces",
    "environments",
    "infos",
    "stacks",
    "normalizing",
    "all",
]
GROUPS: dict[str, tuple[str, ...]] = {
    "single": get_args(SingleName),
    "multi": get_args(MultiName),
    "weights": get_args(WeightsName),
    "clusters": get_args(ClustersName),
    "logs": get_args(LogsName),
    "figures": get_args(FiguresName),
    "traces": get_args(TracesName),
    "environments": get_args(EnvironmentsName),
    "infos": get_args(InfosName),
    "stacks": get_args(StacksName),
    "normalizing": get_args(NormalizingName),
    "all": tuple(
        name
        for group in (
            SingleName,
            MultiName,
            WeightsName,
            ClustersName,
            LogsName,
            FiguresName,
            TracesName,
            EnvironmentsName,
            InfosName,
            StacksName,
            NormalizingName,
        )
        for name in get_args(group)
    ),
}


@dataclass(frozen=True)
class Options:
    """Compare Trawl with its peers and with hand-written loops."""

    cases: tuple[
        SingleName
        | MultiName
        | WeightsName
        | ClustersName
        | LogsName
        | FiguresName
        | TracesName
        | EnvironmentsName
        | InfosName
        | StacksName
        | NormalizingName,
        ...,
    ] = ()
    """What to measure; the whole group if none is named."""
    group: GroupName = "all"
    """The cases of one process, of many processes, of new weights, of clusters, of the costs of
    logged actions, of figures or of timelines, of other kinds of environments, of values of info,
    of stacks of frames, of normalisation, or all."""
    rounds: int = 7
    """How many times each contender gets its turn."""
    seconds: float = 0.7
    """How long a turn is."""
    clock: Literal["wall", "cpu"] = "wall"
    """Wall time, or this process's processor time: steadier on a busy machine, not for many."""
    json: Path = RESULTS / "single.json"
    """Where the numbers of one process go."""
    chart: Path = PICTURES / "speed.png"
    """Where the picture of one process goes."""
    multi_json: Path = RESULTS / "multi.json"
    """Where the numbers of many processes go."""
    weights_json: Path = RESULTS / "weights.json"
    """Where the numbers of weights go."""
    clusters_json: Path = RESULTS / "clusters.json"
    """Where the numbers of clusters go."""
    logs_json: Path = RESULTS / "logs.json"
    """Where the numbers of logged actions go."""
    figures_json: Path = RESULTS / "figures.json"
    """Where the numbers of figures go."""
    traces_json: Path = RESULTS / "traces.json"
    """Where the numbers of timelines go."""
    environments_json: Path = RESULTS / "environments.json"
    """Where the numbers of other kinds of environments go."""
    infos_json: Path = RESULTS / "infos.json"
    """Where the numbers of values of info go."""
    stacks_json: Path = RESULTS / "stacks.json"
    """Where the numbers of stacks of frames go."""
    normalizing_json: Path = RESULTS / "normalizing.json"
    """Where the numbers of normalisation go."""
    growth: Path = PICTURES / "growth.png"
    """Where the picture of many processes goes; it is made of the cases workers and sizes."""
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
    names = options.cases or GROUPS[options.group]
    single = [name for name in names if name in GROUPS["single"]]
    multi = [name for name in names if name in GROUPS["multi"]]
    if single:
        compare(single, options, console)
    if multi:
        compare_multi(multi, options, console)
    for group, path in (
        ("logs", options.logs_json),
        ("figures", options.figures_json),
        ("traces", options.traces_json),
        ("environments", options.environments_json),
        ("infos", options.infos_json),
        ("stacks", options.stacks_json),
        ("normalizing", options.normalizing_json),
    ):
        if chosen := [name for name in names if name in GROUPS[group]]:
            compare_costs(group, chosen, path, options, console)
    for group, title, path in (
        ("weights", "New weights", options.weights_json),
        ("clusters", "Clusters", options.clusters_json),
    ):
        chosen = [name for name in names if name in GROUPS[group]]
        if chosen:
            compare_races(group, title, chosen, path, options, console)


def compare(names: list[str], options: Options, console: Console) -> None:
    """Run the cases of one process, print the table, write the files."""
    from cases import CASES
    from harness import measure
    from report import as_json, print_startup, table, write_chart, write_json
    from startup import measure_startup

    results, startups = [], []
    for name in names:
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
    settings = {**_settings(options), "clock": options.clock}
    write_json(options.json, as_json(results, startups, settings))
    write_chart(options.chart, results)
    console.print(f"\nWritten: {options.json}, {options.chart}")


def compare_costs(
    group: str, names: list[str], path: Path, options: Options, console: Console
) -> None:
    """Run the cases of what something costs, print the table, write the file."""
    from harness import measure
    from report import as_json, table, write_json

    cases, results = importlib.import_module(group).CASES, []
    for name in names:
        with console.status(name):
            measured = measure(cases[name](), options.rounds, options.seconds, options.clock)
            results.append(measured)
    console.print(table(results))
    if not options.quick:
        settings = {**_settings(options), "clock": options.clock}
        write_json(path, as_json(results, [], settings))
        console.print(f"\nWritten: {path}")


def compare_multi(names: list[str], options: Options, console: Console) -> None:
    """Run the cases of many processes, print the tables, write the files."""
    from multi import report
    from multi.cases import RACES
    from multi.chart import write_growth
    from multi.growth import COUNTS, per_worker, sizes, sizes_async, workers
    from multi.race import Race, measure
    from report import write_json

    def run(race: Race) -> Any:
        with console.status(race.name):
            return measure(race, options.rounds, options.seconds)

    results = [run(RACES[name]()) for name in names if name in RACES]
    by_count = [run(workers(count)) for count in COUNTS] if "workers" in names else []
    by_size = run(sizes()) if "sizes" in names else None
    results += [by_size] if by_size else []
    results += [run(sizes_async())] if "sizes_async" in names else []
    added = per_worker(by_count)
    for table in report.tables(results, by_count, added):
        console.print(table)
    if options.quick:
        return
    settings = _settings(options)
    write_json(options.multi_json, report.as_json([*results, *by_count], added, settings))
    console.print(f"\nWritten: {options.multi_json}")
    if by_count or by_size:
        write_growth(options.growth, by_count, by_size)
        console.print(f"Written: {options.growth}")


def compare_races(
    group: str, title: str, names: list[str], path: Path, options: Options, console: Console
) -> None:
    """Run cases of a group that has no picture, print the tables, write the file."""
    from multi import report
    from multi.race import measure
    from report import write_json

    races = importlib.import_module(f"{group}.cases").RACES
    results = []
    for name in names:
        start = time.perf_counter()
        with console.status(name):
            results.append(measure(races[name](), options.rounds, options.seconds))
        console.print(f"{name}: {time.perf_counter() - start:.0f} s")
        if not options.quick:  # each time, as a later case may fail
            write_json(path, report.as_json(results, {}, _settings(options)))
    for table in report.tables(results, [], {}, title):
        console.print(table)
    if not options.quick:
        console.print(f"\nWritten: {path}")


def _settings(options: Options) -> dict[str, Any]:
    return {"rounds": options.rounds, "seconds": options.seconds}


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
