"""What was measured, as a table, as JSON and as a chart."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness import HAND, TRAWL, Contender, Result
from memory import Resident, growth
from startup import Startup

PACKAGES = (
    "trawl-rl",
    "torch",
    "tensordict",
    "numpy",
    "gymnasium",
    "envpool",
    "torchrl",
    "stable-baselines3",
    "tianshou",
    "ray",
    "sample-factory",
)
COLOURS = {
    TRAWL: "#0b7a75",
    "TorchRL": "#c8553d",
    "TorchRL, no ids": "#e0917f",
    "TorchRL, no buffers": "#d97b66",
    "TorchRL, SyncVectorEnv": "#edb9ad",
    "Stable-Baselines3": "#5b7fa3",
    "Tianshou": "#9db4c8",
    "RLlib": "#8a6fa8",
    "RLlib, one connector": "#bba9cf",
    "Sample Factory": "#d9a441",
}
# Of all others, in turn.
GREYS = ("#9a9a9a", "#6b6b6b", "#c4c4c4", "#4a4a4a")


def table(results: list[Result]) -> Table:
    """One row per contender: its speed, and how many times as fast Trawl is."""
    made = Table(title="Collection speed (medians over the rounds)")
    made.add_column("case")
    made.add_column("contender")
    headings = ("µs/frame", "frames/s", "to hand loop", "Trawl is x as fast", "min - max", "goal")
    for heading in headings:
        made.add_column(heading, justify="right")
    made.add_column("note", style="dim")
    for result in results:
        for i, contender in enumerate(result.case.contenders):
            made.add_row(result.case.name if i == 0 else "", *_row(result, contender))
        made.add_section()
    return made


def _row(result: Result, contender: Contender) -> list[str]:
    if contender.name in result.missing:
        return [contender.name, *[""] * 6, f"left out: {result.missing[contender.name]}"]
    speed = statistics.median(result.speeds[contender.name])
    to_hand = result.ratio(contender.name, HAND)
    cells = [
        contender.name,
        f"{1e6 / speed:.1f}",
        f"{speed:,.0f}",
        "" if to_hand is None else f"{to_hand:.2f}",
    ]
    ratios = result.ratios(TRAWL, contender.name)
    if contender.name == TRAWL or not ratios:
        return [*cells, "", "", _goal(contender.goal), contender.note]
    median = statistics.median(ratios)
    return [
        *cells,
        _judged(f"{median:.2f}", contender.goal is None or median >= contender.goal),
        f"{min(ratios):.2f} - {max(ratios):.2f}",
        _goal(contender.goal),
        contender.note,
    ]


def _goal(goal: float | None) -> str:
    return "" if goal is None else f">= {goal:.2f}"


def _judged(text: str, met: bool) -> str:
    return text if met else f"[bold red]{text}[/]"


def print_startup(console: Console, startups: list[Startup]) -> None:
    """Medians of the import times."""
    console.print("\n[bold]Import[/], beyond torch, tensordict and gymnasium")
    for startup in startups:
        if startup.median is None:
            console.print(f"  {startup.statement}: left out: {startup.error}")
            continue
        goal = "" if startup.goal is None else f"  (goal: <= {startup.goal:.0f} ms)"
        met = startup.goal is None or startup.median <= startup.goal
        console.print(f"  {startup.statement}: {_judged(f'{startup.median:.0f} ms', met)}{goal}")


def print_memory(console: Console, seen: list[Resident]) -> None:
    """Resident memory at intervals, and what it gained after the first tenth."""
    for point in seen:
        console.print(f"  {point.frames:>12,} frames  {point.mib:8.1f} MiB")
    console.print(f"Growth between 10 % and 100 %: {growth(seen):+.1f} MiB")


def as_json(
    results: list[Result], startups: list[Startup], settings: dict[str, Any]
) -> dict[str, Any]:
    """Everything measured, with what is needed to read it later."""
    return {
        **circumstances(settings),
        "cases": {result.case.name: _case_json(result) for result in results},
        "import": [
            {
                "statement": startup.statement,
                "goal_ms": startup.goal,
                "median_ms": startup.median,
                "error": startup.error,
                "rounds_ms": startup.milliseconds,
            }
            for startup in startups
        ],
    }


def circumstances(settings: dict[str, Any]) -> dict[str, Any]:
    """When, where and with what something was measured."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": _versions(),
        "settings": settings,
    }


def _case_json(result: Result) -> dict[str, Any]:
    return {
        "title": result.case.title,
        "contenders": [
            {
                "name": contender.name,
                "note": contender.note,
                "missing": result.missing.get(contender.name),
                "frames_per_second": result.speeds.get(contender.name, []),
                "goal": contender.goal,
                "trawl_times_as_fast": result.ratio(TRAWL, contender.name),
                "speed_to_hand": result.ratio(contender.name, HAND),
            }
            for contender in result.case.contenders
        ],
    }


def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    """The processor's name; Linux keeps it in a file, elsewhere `platform` knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _versions() -> dict[str, str | None]:
    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {package: version(package) for package in PACKAGES}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, default=lambda value: value.item()) + "\n")


def write_chart(path: Path, results: list[Result]) -> None:
    """Bars of each contender's speed, where the hand-written loop of its case is 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [result for result in results if _bars(result)]
    rows = sum(len(_bars(result)) for result in results) + len(results)
    # The layout keeps the legend near the bars, however many there are.
    figure, axes = pyplot.subplots(figsize=(9, 1.8 + 0.28 * rows), layout="constrained")
    y, ticks, colours = 0.0, [], dict(COLOURS)
    for result in results:
        bars = _bars(result)
        ticks.append((y + (len(bars) - 1) / 2, result.case.title))
        for name, ratio in bars:
            colour = colours.setdefault(name, GREYS[(len(colours) - len(COLOURS)) % len(GREYS)])
            axes.barh(y, ratio, height=0.85, color=colour, label=name)
            axes.text(ratio + 0.01, y, f"{ratio:.2f}", va="center", fontsize=8)
            y += 1
        y += 1
    axes.axvline(1.0, color="#444444", linewidth=1, linestyle="--")
    axes.set_yticks([tick for tick, _ in ticks], [title for _, title in ticks])
    axes.set_ylim(y - 1, -1)
    axes.set_xlabel("frames per second, hand-written loop = 1")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside upper center", ncols=3, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bars(result: Result) -> list[tuple[str, float]]:
    """Speed relative to the hand-written loop of everybody else in the case."""
    names = [contender.name for contender in result.case.contenders if contender.name != HAND]
    ratios = [(name, result.ratio(name, HAND)) for name in names]
    return [(name, ratio) for name, ratio in ratios if ratio is not None]
