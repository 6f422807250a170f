"""The section of the report on the bottleneck: the shares of time of workers and driver."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from trawl.cli.errors import shown
from trawl.cli.html.markup import Markup, figure, note, section, table, tag
from trawl.cli.html.values import is_number
from trawl.observe.glyphs import PART_COLORS

_WORKER_PARTS = tuple(PART_COLORS)
_DRIVER_PARTS = ("learner", "wait", "driver")
_MEANINGS = {
    "env": "steps and resets of the environments",
    "policy": "calls of the policy",
    "overhead": "the collector's own work in the workers",
    "weights": "loading new weights",
    "idle": "no batch is requested",
    "learner": "code between batches, such as writing the dataset",
    "wait": "waiting until a batch is ready",
    "driver": "other work of the collector in the driver thread",
}
# Number of workers to draw.
_MOST_WORKERS = 256
# A part is labelled in its bar if it takes at least this share.
_LABELLED = 0.12


def shares_section(info: dict[str, Any]) -> Markup:
    """Returns the section.

    Args:
        info: facts about the dataset, not yet checked.
    """
    stats = info.get("stats")
    stats = stats if isinstance(stats, dict) else {}
    workers, driver = _workers(stats), _shares(stats, _DRIVER_PARTS)
    content = _sentence(info.get("bottleneck"))
    if workers:
        whose = "workers" if len(workers) > 1 else "collector"
        content += [_bars("workers", f"Time of the {whose}", _WORKER_PARTS, workers)]
    if driver:
        rows = [("driver thread", driver)]
        content += [_bars("driver", "Time of the driver thread", _DRIVER_PARTS, rows)]
    if not workers and not driver:
        why = "No shares of time were recorded: trawl collect records them at the end of a run."
        content.append(note(why))
        if is_number(info.get("env_time_share")):
            share = info["env_time_share"]
            content.append(note(f"Of the time to make frames, the environment took {share:.0%}."))
    return section("bottleneck", "Bottleneck", *content)


def _sentence(found: Any) -> list[Markup]:
    sentence = found.get("sentence") if isinstance(found, dict) else None
    if not isinstance(sentence, str) or not sentence:
        return []
    return [tag("p", tag("strong", shown(sentence)), class_="lead")]


def _workers(stats: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Returns names and shares of all workers together, and of each one if there are several."""
    numbers = {int(m[1]) for name in stats if (m := re.fullmatch(r"worker_(\d{1,6})/\w+", name))}
    found = [("all workers" if numbers else "collector", _shares(stats, _WORKER_PARTS))]
    for number in sorted(numbers)[:_MOST_WORKERS]:
        shares = _shares(stats, _WORKER_PARTS, f"worker_{number}/")
        found.append((f"worker {number}", shares))
    return [(name, shares) for name, shares in found if shares]


def _shares(stats: dict[str, Any], parts: Sequence[str], prefix: str = "") -> dict[str, float]:
    """Returns the shares that statistics have, from 0 to 1, by the names of the parts."""
    found = {part: stats.get(f"{prefix}{part}_share") for part in parts}
    return {part: min(1.0, max(0.0, s)) for part, s in found.items() if is_number(s)}


def _bars(
    name: str, title: str, parts: Sequence[str], rows: Sequence[tuple[str, dict[str, float]]]
) -> Markup:
    """Returns a figure with a bar for each row, its legend, and a table of the same numbers."""
    drawn = [
        tag("div", tag("span", row, class_="bar-name"), _bar(parts, shares), class_="bar-line")
        for row, shares in rows
    ]
    keys = [
        tag(
            "li",
            tag("span", class_=f"box c-{part}"),
            tag("span", tag("b", part), f": {_MEANINGS[part]}"),
        )
        for part in parts
    ]
    cells = [
        [row, *(f"{shares[part]:.1%}" if part in shares else "–" for part in parts)]
        for row, shares in rows
    ]
    return figure(
        f"{name}-caption",
        f"{title}, in parts",
        tag("div", *drawn, class_="stacked", aria_hidden="true"),
        tag("ul", *keys, class_="legend"),
        table(f"{name}-shares", f"{title}, as shares", ("", *parts), cells),
    )


def _bar(parts: Sequence[str], shares: dict[str, float]) -> Markup:
    segments = []
    for part in parts:
        share = shares.get(part, 0.0)
        if share > 0:
            label = f"{part} {share:.0%}" if share >= _LABELLED else ""
            style = f"flex-grow:{share:.4f}"
            segments.append(tag("span", label, class_=f"bar c-{part}", style=style))
    return tag("span", *segments, class_="bar-row")
