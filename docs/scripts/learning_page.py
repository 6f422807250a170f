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
# What each is called, the return that it aims at, and what its curve counts.
NAMES = {
    "ppo": ("PPO, CartPole-v1", 475, "frames"),
    "ppo_workers": ("PPO, 2 workers", 475, "frames"),
    "ppo_recurrent": ("PPO, recurrent, without velocities", 475, "frames"),
    "dqn": ("DQN, CartPole-v1", 475, "frames"),
    "sac": ("SAC, Pendulum-v1", -200, "gradient steps"),
    "offline": ("Cloning, CartPole-v1", 450, "passes over the data"),
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
        "| Example | Return | Seeds that reached it, Trawl / TorchRL | Trawl, s | TorchRL, s "
        "| Trawl is × as fast |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, (title, target, _) in NAMES.items():
        runs = results["examples"].get(name)
        if runs:
            rows.append(f"| {title} | {target} | {row(runs)} |")
    versions = ", ".join(f"{k} {v}" for k, v in results["about"]["versions"].items())
    about = (
        "Seconds are medians of the runs that reached the return, with the least and the most; the "
        "ratio is that of the medians. Evaluations and imports are not counted. Measured by "
        f"`benchmarks/learning/run.py` on {results['about']['cores']} cores, {versions}."
    )
    return "\n".join(rows) + "\n\n" + about + "\n\n![Learning curves](assets/learning.png)"


def row(runs: list[dict[str, Any]]) -> str:
    """What the runs of an example came to."""
    times = {who: [seconds(run) for run in solved(runs, who)] for who in COLOURS}
    counts = [f"{len(times[who])} of {len(of(runs, who))}" for who in COLOURS]
    cells = [" / ".join(counts), *(spread(times[who]) for who in COLOURS)]
    ours, theirs = (times[who] for who in COLOURS)
    ratio = statistics.median(theirs) / statistics.median(ours) if ours and theirs else None
    return " | ".join([*cells, "–" if ratio is None else f"**{ratio:.2f}**"])


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


def seconds(run: dict[str, Any]) -> float:
    """What a run took."""
    if "seconds" in run:
        return float(run["seconds"])
    return float(run["collect_seconds"] + run["learn_seconds"])


def draw(results: dict[str, Any]) -> None:
    """The mean returns, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in NAMES if name in results["examples"]]
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6.5), layout="constrained")
    for axis, name in zip(axes.flat, names, strict=False):
        title, target, unit = NAMES[name]
        for who, colour in COLOURS.items():
            for run in of(results["examples"][name], who):
                points = run.get("curve") or [(0, float("nan"))]
                label = who if run["seed"] == 0 else None
                axis.plot(*zip(*points, strict=True), color=colour, alpha=0.7, label=label)
        axis.axhline(target, color="#9a9a9a", linestyle=":")
        axis.set_title(title)
        axis.set_xlabel(unit)
        axis.set_ylabel("mean return")
    axes.flat[0].legend()
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
