"""Tables and other texts that the ``trawl`` command prints."""

from __future__ import annotations

import os
import stat
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from trawl.extras.cli.errors import printable, shown
from trawl.extras.cli.transforms import show_transforms
from trawl.observe.episodes import EpisodeStats, Moments
from trawl.observe.formats import plural, short, show_bytes


def print_summary(
    console: Console, directory: Path, info: dict[str, Any], episodes: EpisodeStats
) -> None:
    """Prints a summary of a collection.

    Args:
        console: console to print to.
        directory: path of the dataset.
        info: facts about the dataset.
        episodes: statistics of the collected episodes.
    """
    seconds, share = info["seconds"], info["env_time_share"]
    rate = episodes.frames / seconds if seconds else 0.0
    facts = {
        "environment": show_environment(info),
        "policy": show_policy(info),
        "seed": str(info["seed"]),
        "transforms": show_transforms(info),
        "frames": f"{episodes.frames:,} in {seconds:.1f} s: {rate:,.0f} a second",
        "time": f"environment {share:.0%}, policy {1 - share:.0%}",
    }
    if info.get("bottleneck"):
        facts["limit"] = info["bottleneck"]["sentence"]
    facts["dataset"] = f"{directory} ({show_bytes(size_of(directory))})"
    if "workers" in info:
        facts["workers"] = show_workers(info["workers"])
    if info.get("resumed"):
        facts["resumed"] = show_resumed(info["resumed"], info["frames"])
    print_facts(console, {name: value for name, value in facts.items() if value})
    print_episodes(console, episodes)


def show_resumed(resumed: Any, frames: int) -> str:
    """Returns a line with the numbers of frames after which the collection was resumed.

    Examples:
        >>> show_resumed([{"frames": 400}, {"frames": 1200}], 2000)
        'after 400 and 1,200 frames: 2,000 in all'
    """
    try:
        places = " and ".join(f"{each['frames']:,}" for each in resumed)
    except (KeyError, TypeError, ValueError):  # not written by trawl collect
        return shown(resumed)
    return f"after {places} frames: {frames:,} in all"


def show_workers(workers: Any) -> str:
    """Returns a line with the number of workers and the number of frames from each.

    Examples:
        >>> show_workers({"count": 2, "sync": False, "restarts": 1, "frames": [400, 600]})
        '2, asynchronous; 400 to 600 frames each; 1 restart'
    """
    try:
        frames = workers["frames"]
        low, high = min(frames), max(frames)
        each = plural(high, "frame") if low == high else f"{low:,} to {plural(high, 'frame')}"
        order = "synchronous" if workers["sync"] else "asynchronous"
        parts = [f"{workers['count']}, {order}", f"{each} each"]
        if workers["restarts"]:
            parts.append(plural(workers["restarts"], "restart"))
    except (KeyError, TypeError, ValueError):  # not written by trawl collect
        return shown(workers)
    return "; ".join(parts)


def show_environment(info: dict[str, Any]) -> str:
    """Returns the environment and its arguments, as text.

    Examples:
        >>> show_environment({"env": "Pendulum-v1", "env_kwargs": {"g": 9.0}})
        "Pendulum-v1 {'g': 9.0}"
    """
    return " ".join(shown(info[name]) for name in ("env", "env_kwargs") if info.get(name))


def show_policy(info: dict[str, Any]) -> str:
    """Returns the policy, with a note if it was deterministic.

    Examples:
        >>> show_policy({"policy": "policies:actor", "deterministic": True})
        'policies:actor, deterministic'
    """
    named = [shown(info["policy"])] if info.get("policy") else []
    return ", ".join([*named, "deterministic"] if info.get("deterministic") else named)


def run_name(env: str, started: datetime) -> str:
    """Returns the default path for results, made from the environment and the start time."""
    name = env.replace(os.sep, "-").replace(":", "-")
    return os.path.join("runs", f"{name}-{started.astimezone():%Y%m%d-%H%M%S}")


def print_facts(console: Console, facts: dict[str, str]) -> None:
    """Prints names and values, one pair per line."""
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"{name:>{width}}", style="cyan", markup=False, highlight=False, end="  ")
        console.print(printable(value), markup=False, highlight=False, soft_wrap=True)


def print_episodes(console: Console, episodes: EpisodeStats) -> None:
    """Prints a table of the returns and lengths of episodes."""
    if not episodes.count:
        console.print("no episode has ended")
        return
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column(plural(episodes.count, "episode"), style="cyan")
    for name in ("mean", "std", "min", "max"):
        table.add_column(name, justify="right")
    for name, moments in (("return", episodes.returns), ("length", episodes.lengths)):
        table.add_row(name, *_numbers(moments))
    console.print(table)


def _numbers(moments: Moments) -> list[str]:
    return [short(value) for value in (moments.mean, moments.std, moments.low, moments.high)]


def size_of(directory: Path) -> int:
    """Returns the size of a dataset's frames in bytes."""
    # Files directly in the directory, such as the record, hold no frames. Links are not followed.
    inner = ((place, files) for place, _, files in os.walk(directory) if Path(place) != directory)
    found = (os.lstat(os.path.join(place, name)) for place, files in inner for name in files)
    return sum(facts.st_size for facts in found if stat.S_ISREG(facts.st_mode))
