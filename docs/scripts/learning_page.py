"""Writes what the examples learned into docs/examples.md, and draws their learning curves.

    python docs/scripts/learning_page.py

The results are what ``benchmarks/learning/run.py`` writes. The text between
``<!-- learning:begin -->`` and ``<!-- learning:end -->`` is replaced.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "learning.json"
PAGE = ROOT / "docs" / "examples.md"
PICTURE = ROOT / "docs" / "assets" / "learning.png"
BEGIN, END = "<!-- learning:begin -->", "<!-- learning:end -->"
# What each is called, and what its curve counts.
NAMES = {
    "ppo": ("PPO, CartPole-v1", "frames"),
    "ppo_few_epochs": ("PPO, three passes over each batch, not ten", "frames"),
    "ppo_workers": ("PPO, 2 workers", "frames"),
    "ppo_recurrent": ("PPO, recurrent, without velocities", "frames"),
    "dqn": ("DQN, CartPole-v1", "frames"),
    "sac": ("SAC, Pendulum-v1", "gradient steps"),
    "offline": ("Cloning, CartPole-v1", "passes over the data"),
}
COLOURS = {"Trawl": "#0b7a75", "TorchRL": "#c8553d"}


def main() -> None:
    """Writes the table and the picture."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{after}", encoding="utf-8")
    draw(results)


def table(results: dict[str, Any]) -> str:
    """A row for each example: how many seeds got there, and how long that took."""
    rows = [
        "| Example | Return | Seeds that reached the return, Trawl / TorchRL | Trawl, s "
        "| TorchRL, s | Speed-up | Frames/s, learning included, Trawl / TorchRL "
        "| Share of time spent collecting, Trawl / TorchRL |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (title, _) in NAMES.items():
        if name in results:
            runs = results[name]["runs"]
            rows.append(f"| {title} | {target(runs):g} | {row(runs)} |")
    about = next(iter(results.values()))["about"]
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items())
    text = (
        "Seconds are medians of the runs that reached the return, with the minimum and the "
        "maximum. The speed-up is the ratio of the medians. Timing begins when the collector is "
        "made, and excludes evaluations. For cloning, it covers the whole run, including the "
        "program that collects the data. Measured by "
        f"`benchmarks/learning/run.py` on {about['cores']} cores, {versions}."
    )
    return "\n".join(rows) + "\n\n" + text + "\n\n![Learning curves](assets/learning.png)"


def target(runs: list[dict[str, Any]]) -> float:
    """The return that an example aims at."""
    return float(next(run["target"] for run in runs if "target" in run))


def row(runs: list[dict[str, Any]]) -> str:
    """What the runs of an example came to."""
    times = {who: [run["seconds"] for run in solved(runs, who)] for who in COLOURS}
    counts = [f"{len(times[who])} of {len(of(runs, who))}" for who in COLOURS]
    cells = [" / ".join(counts), *(spread(times[who]) for who in COLOURS)]
    ours, theirs = (times[who] for who in COLOURS)
    ratio = statistics.median(theirs) / statistics.median(ours) if ours and theirs else None
    share = " / ".join(collecting(solved(runs, who)) for who in COLOURS)
    speeds = " / ".join(speed(of(runs, who)) for who in COLOURS)
    return " | ".join([*cells, "–" if ratio is None else f"**{ratio:.2f}**", speeds, share])


def speed(runs: list[dict[str, Any]]) -> str:
    """The median of frames per second, learning included."""
    found = [run["frames"] / run["seconds"] for run in runs if "frames" in run]
    return f"{statistics.median(found):,.0f}" if found else "–"


def collecting(runs: list[dict[str, Any]]) -> str:
    """The median share of the time that runs waited for the collector, where that is known."""
    shares = [run["collect_seconds"] / run["seconds"] for run in runs if "collect_seconds" in run]
    return f"{statistics.median(shares):.0%}" if shares else "–"


def of(runs: list[dict[str, Any]], who: str) -> list[dict[str, Any]]:
    """Somebody's runs."""
    return [run for run in runs if run["who"] == who]


def solved(runs: list[dict[str, Any]], who: str) -> list[dict[str, Any]]:
    """Those of them that reached the return."""
    return [run for run in of(runs, who) if run.get("solved")]


def spread(times: list[float]) -> str:
    """Median, least and most."""
    if not times:
        return "–"
    return f"{statistics.median(times):.1f} ({min(times):.1f} – {max(times):.1f})"


def draw(results: dict[str, Any]) -> None:
    """The mean returns, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in NAMES if name in results]
    figure, axes = pyplot.subplots(2, 4, figsize=(15, 6.5), layout="constrained")
    for axis, name in zip(axes.flat, names, strict=False):
        title, unit = NAMES[name]
        runs = results[name]["runs"]
        for who, colour in COLOURS.items():
            for run in of(runs, who):
                points = run.get("curve") or [(0, float("nan"))]
                label = who if run["seed"] == 0 else None
                axis.plot(*zip(*points, strict=True), color=colour, alpha=0.7, label=label)
        axis.axhline(target(runs), color="#9a9a9a", linestyle=":")
        axis.set_title(title)
        axis.set_xlabel(unit)
        axis.locator_params(axis="x", nbins=4)
        axis.set_ylabel("mean return")
    axes.flat[0].legend()
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
