"""``trawl show``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase

from trawl.cli.arguments import Show
from trawl.cli.errors import CliError, message_of
from trawl.cli.summary import (
    print_episodes,
    print_facts,
    show_bytes,
    show_resumed,
    show_workers,
    size_of,
)
from trawl.data import info, load
from trawl.keys import as_key, show_key
from trawl.observe import Episodes, EpisodeStats

# Frames read at a time: datasets may be larger than memory.
_CHUNK = 1 << 18


def show(args: Show) -> int:
    """Shows what a dataset holds.

    Returns:
        The exit code: 0.

    Raises:
        CliError: if there is no dataset, or its returns can't be plotted.
    """
    directory = Path(args.directory)
    try:
        facts = info(directory)
        stats, episodes, first = read_episodes(load(directory, _CHUNK))
    except (FileNotFoundError, ImportError, ValueError) as error:
        # An OSError without a file name has its message in the exception itself.
        raise CliError(str(error)) from error
    if args.plot is not None:
        _plot(args.plot, episodes, facts)
    console = Console(file=sys.stdout)
    print_facts(console, _facts(directory, facts))
    _print_entries(console, first, facts["frames"])
    if stats is not None:
        print_episodes(console, stats)
    if args.plot is not None:
        console.print(f"the returns are drawn in {args.plot}", markup=False, soft_wrap=True)
    return 0


def read_episodes(
    batches: Iterator[TensorDictBase],
) -> tuple[EpisodeStats | None, Episodes, TensorDictBase]:
    """The episodes of a dataset, and the first of its batches.

    Without trajectory ids there are no episodes, and None for their statistics.
    """
    stats, parts = EpisodeStats(), []
    keys = [("collector", "traj_ids"), ("next", "reward"), ("next", "done")]
    first = next(batches)
    present = set(first.keys(True))
    if not all(key in present for key in keys):
        return None, Episodes.concatenate([]), first
    parts = [stats.update(batch.select(*keys)) for batch in chain([first], batches)]
    return stats, Episodes.concatenate(parts), first


def _facts(directory: Path, info: dict[str, Any]) -> dict[str, str]:
    """How the dataset was made; a dataset need not say any of it but frames."""
    frames = f"{info['frames']:,}"
    if not info["complete"]:
        frames += f", not complete: stopped by {info.get('stopped_by') or 'an error'}"
    shown = {
        "dataset": f"{directory} ({show_bytes(size_of(directory))})",
        "environment": info.get("env"),
        "policy": info.get("policy"),
        "seed": info.get("seed"),
        "resumed": show_resumed(info["resumed"], info["frames"]) if info.get("resumed") else None,
        "workers": show_workers(info["workers"]) if info.get("workers") else None,
        "made": str(info.get("date") or "").replace("T", " ").replace("+00:00", " UTC"),
        "with": ", ".join(f"{name} {v}" for name, v in info.get("versions", {}).items()),
        "frames": frames,
    }
    return {name: str(value) for name, value in shown.items() if value not in (None, "")}


def _print_entries(console: Console, first: TensorDictBase, frames: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("entry", style="cyan")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("size", justify="right")
    for key in sorted(first.keys(True, True), key=as_key):
        value = first.get(key)
        size = frames * value[0].numel() * value.element_size()
        shape = ", ".join(f"{n:,}" for n in (frames, *value.shape[1:]))
        dtype = str(value.dtype).removeprefix("torch.")
        table.add_row(show_key(as_key(key)), f"({shape})", dtype, show_bytes(size))
    console.print(table)


def _plot(file: str, episodes: Episodes, info: dict[str, Any]) -> None:
    from trawl.observe.plots import plot_returns

    title = str(info.get("env") or "")
    if title and info.get("policy"):
        title += f", policy {info['policy']}"
    try:
        plot_returns(episodes, file, title=title)
    except OSError as error:
        raise CliError(f"{file} can't be written: {error.strerror}") from error
    except (ImportError, ValueError) as error:
        raise CliError(f"--plot {file}: {message_of(error)}") from error
