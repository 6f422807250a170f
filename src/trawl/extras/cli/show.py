"""The command ``trawl show``."""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tensordict import TensorDictBase

from trawl.data import load
from trawl.data.sinks.base import was_closed
from trawl.data.sinks.entries import Entry
from trawl.data.sinks.record import Record, read_record
from trawl.extras.cli.arguments import ShowArguments
from trawl.extras.cli.errors import CliError, message_of, shown
from trawl.extras.cli.summary import (
    print_episodes,
    print_facts,
    show_environment,
    show_policy,
    show_resumed,
    show_workers,
    size_of,
)
from trawl.extras.cli.transforms import show_transforms
from trawl.extras.report.histograms import EntrySummary, followed, summaries
from trawl.extras.report.page import HtmlReport
from trawl.extras.report.trace import find_trace
from trawl.keys import TRAJ_IDS, Key, show_key
from trawl.observe import Episodes, EpisodeStats
from trawl.observe.episodes import done_keys, reward_keys
from trawl.observe.formats import show_bytes

# Maximum numbers of frames and bytes to read at a time. Datasets may be larger than memory.
_CHUNK, _CHUNK_BYTES = 1 << 18, 64 << 20
# Dtypes of rewards.
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_NUMBERS = _FLOATS | {torch.int64, torch.int32}


def show(args: ShowArguments) -> int:
    """Prints a description of a dataset.

    Returns:
        The exit code: 0.

    Raises:
        CliError: if the dataset does not exist or can't be read, if its returns can't be plotted,
            or if the report can't be written.
    """
    directory = Path(args.directory)
    found: list[EntrySummary] = []
    # Checked before the record is read: if the sink is closed in between, the record already tells
    # how the collection ended.
    closed = was_closed(directory)
    try:
        record = read_record(directory)
        facts = record.facts()
        batches = load(directory, _chunk(record))
        if args.html is not None:
            found = summaries(record.entries, record.frames)
            batches = followed(batches, found)
        stats, episodes = read_episodes(batches, record.entries)
        # Without episodes, the rest of the frames is not read yet.
        deque(batches if found else (), maxlen=0)
    except (FileNotFoundError, ImportError, ValueError) as error:
        # An OSError without a file name has its message in the exception itself.
        raise CliError(str(error)) from error
    if args.plot is not None:
        _plot(args.plot, episodes, facts)
    described = _facts(directory, facts, closed)
    if args.html is not None:
        trace, why = find_trace(record)
        _write_html(
            args.html,
            HtmlReport(
                _title(facts) or directory.resolve().name,
                described,
                record,
                stats,
                episodes,
                found,
                trace,
                why,
            ),
        )
    console = Console(file=sys.stdout)
    print_facts(console, described)
    _print_entries(console, record)
    if stats is not None:
        print_episodes(console, stats)
    if args.plot is not None:
        console.print(f"the returns are plotted in {args.plot}", markup=False, soft_wrap=True)
    if args.html is not None:
        console.print(f"the report is written to {args.html}", markup=False, soft_wrap=True)
    return 0


def read_episodes(
    batches: Iterator[TensorDictBase], entries: Sequence[Entry]
) -> tuple[EpisodeStats | None, Episodes]:
    """Returns the statistics of a dataset's episodes, and the episodes.

    If trajectory ids, rewards or flags are missing or have unexpected dtypes, there are no
    episodes, and the statistics are None.

    Args:
        batches: frames of the dataset.
        entries: entries of the frames.
    """
    first = next(batches)
    keys = _episode_keys(entries)
    if not keys:
        return None, Episodes.concatenate([])
    stats = EpisodeStats()
    parts = [stats.update(batch.select(*keys)) for batch in chain([first], batches)]
    return stats, Episodes.concatenate(parts)


def _episode_keys(entries: Sequence[Entry]) -> list[Key]:
    """Returns the keys of the entries that make up episodes; no keys if an entry is unsuitable."""
    dtypes = {entry.key: entry.dtype for entry in entries if entry.size}
    rewards, flags = reward_keys(dtypes), done_keys(dtypes)
    kinds = {TRAJ_IDS: {torch.int64}}
    kinds |= dict.fromkeys(rewards, _NUMBERS) | {key: {torch.bool} for key in flags}
    known = all(dtypes.get(key) in kind for key, kind in kinds.items())
    return list(kinds) if rewards and flags and known else []


def _chunk(record: Record) -> int:
    """Returns the number of frames to read at a time."""
    row = sum(entry.row for entry in record.entries)
    return max(1, min(_CHUNK, _CHUNK_BYTES // max(1, row)))


def _facts(directory: Path, info: dict[str, Any], closed: bool) -> dict[str, str]:
    """Returns facts about how the dataset was made, without facts that its record lacks."""
    frames = f"{info['frames']:,}{_ending(info, closed)}"
    versions = info.get("versions")
    if isinstance(versions, dict):
        versions = ", ".join(f"{name} {shown(value)}" for name, value in versions.items())
    facts = {
        "dataset": f"{directory} ({show_bytes(size_of(directory))})",
        "environment": show_environment(info),
        "policy": show_policy(info),
        "seed": info.get("seed"),
        "transforms": show_transforms(info),
        "resumed": show_resumed(info["resumed"], info["frames"]) if info.get("resumed") else None,
        "workers": show_workers(info["workers"]) if info.get("workers") else None,
        "made": str(info.get("date") or "").replace("T", " ").replace("+00:00", " UTC"),
        "with": versions,
        "frames": frames,
    }
    return {name: shown(value) for name, value in facts.items() if value not in (None, "")}


def _ending(info: dict[str, Any], closed: bool) -> str:
    """Describes how an incomplete collection ended; returns an empty string for a complete one.

    Args:
        info: facts about the dataset.
        closed: False if the dataset's sink was not closed.
    """
    stopped = info.get("stopped_by")
    if info["complete"]:
        return ""
    if not closed:
        return ", not finished: the collection is still running, or it was killed"
    if not stopped:
        return ", not complete: stopped before the end"
    if isinstance(stopped, str) and stopped in signal.Signals.__members__:
        return f", not complete: stopped by {stopped}"
    return f", not complete: stopped by an error: {shown(stopped)}"


def _print_entries(console: Console, record: Record) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("entry", style="cyan")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("size", justify="right")
    for entry in sorted(record.entries, key=lambda entry: entry.key):
        shape = f"({', '.join(f'{n:,}' for n in (record.frames, *entry.shape))})"
        size = "" if entry.dtype is None else show_bytes(record.frames * entry.row)
        # Text, because rich would interpret brackets in a str as markup.
        table.add_row(Text(show_key(entry.key)), shape, entry.kind, size)
    console.print(table)


def _title(info: dict[str, Any]) -> str:
    """Returns the environment and the policy, as far as they are recorded."""
    title = show_environment(info)
    return f"{title}, policy {show_policy(info)}" if title and info.get("policy") else title


def _write_html(file: str, report: HtmlReport) -> None:
    try:
        Path(file).write_text(report.render(), encoding="utf-8")
    except OSError as error:
        raise CliError(f"{file} can't be written: {error.strerror or error}") from error


def _plot(file: str, episodes: Episodes, info: dict[str, Any]) -> None:
    from trawl.extras.monitors.plots import plot_returns

    try:
        plot_returns(episodes, file, title=_title(info))
    except OSError as error:
        raise CliError(f"{file} can't be written: {error.strerror}") from error
    except (ImportError, ValueError) as error:
        raise CliError(f"--plot {file}: {message_of(error)}") from error
