"""State of a collection in its dataset, from which ``trawl collect --resume`` continues.

A state is a file in the dataset's directory. It holds the collector's state at the end of a batch,
and the sink's state at the same time. The dataset's record names the file. If frames were committed
after the state was saved, the resumed collection drops these frames, and collects them again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trawl.data.sinks.entries import Entry, entries_from_json, is_count
from trawl.data.sinks.files import damaged
from trawl.data.sinks.record import LARGEST_ID, Record, read_record
from trawl.data.state_files import (
    DIGITS,
    SUFFIX,
    check_plain_data,
    read_state,
    write_state,
)

# Readers of Parquet folders skip names that begin with an underscore.
_STEM = "_state"
_NAME = re.compile(rf"{_STEM}-[0-9a-f]{{{DIGITS}}}{re.escape(SUFFIX)}")
_FORMAT = 1
# Maximum size of a file in bytes. Loading a file takes as much memory as the file has bytes.
_MOST = 8 << 30
#: Key of the state's file name, in the format's own part of the dataset's record.
STATE = "state"


@dataclass(frozen=True)
class SinkState:
    """The state of a sink between two batches.

    Attributes:
        frames: number of committed frames.
        first_id: number that is added to the trajectory ids of batches.
        next_id: first trajectory id for new trajectories.
        entries: entries that each frame has; empty before the first batch.
        layout: the format's own part of the record.
        waiting: frames that are not committed yet, as plain data.
    """

    frames: int
    first_id: int
    next_id: int
    entries: list[Entry]
    layout: dict[str, Any]
    waiting: Any

    def to_plain(self) -> dict[str, Any]:
        """Returns the state as plain data."""
        return {**vars(self), "entries": [entry.to_json() for entry in self.entries]}

    def record(self, now: Record) -> Record:
        """Returns the record that the dataset had when the state was saved."""
        layout = {**now.layout, **self.layout, "next_id": self.next_id}
        layout["entries"] = [entry.to_json() for entry in self.entries]
        return replace(
            now,
            frames=self.frames,
            complete=False,
            entries=self.entries,
            next_id=self.next_id,
            layout=layout,
        )


@dataclass(frozen=True)
class SavedState:
    """Last saved state of a collection.

    Attributes:
        name: name of the file.
        version: version of Trawl that saved the state.
        collector: unchecked state of the collector.
        sink: state of the sink.
    """

    name: str
    version: str
    collector: dict[str, Any]
    sink: SinkState


def load_state(directory: str | os.PathLike[str]) -> SavedState | None:
    """Returns the last saved state of a dataset's collection; None if there is none.

    The dataset may come from an untrusted source: no code from it is run, no link is followed, and
    a small file doesn't take much memory.

    Raises:
        FileNotFoundError: if the dataset does not exist.
        ValueError: if the state is damaged, or was saved in another format.
    """
    record = read_record(directory)
    name = state_name(record)
    if name is None:
        return None
    path = record.directory / name
    content = read_state(record.directory, name, most=_MOST, map_location="cpu")
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"{path} has format {content.get('format')!r}, but this version of Trawl reads format "
            f"{_FORMAT}: use the version that saved it"
        )
    collector, version = content.get("collector"), content.get("trawl")
    if not isinstance(collector, dict) or not isinstance(version, str):
        raise damaged(path, "it has no state of a collector")
    return SavedState(name, version, collector, _sink_state(path, content.get("sink"), record))


def _sink_state(path: Path, facts: Any, record: Record) -> SinkState:
    facts = facts if isinstance(facts, dict) else {}
    numbers = [facts.get(name) for name in ("frames", "first_id", "next_id")]
    if not all(is_count(number) and number <= LARGEST_ID for number in numbers):
        raise damaged(path, f"it has the numbers {numbers}")
    frames, first_id, next_id = (int(number) for number in numbers if number is not None)
    if frames > record.frames:
        raise damaged(path, f"it counts {frames} frames, but the dataset has {record.frames}")
    layout = facts.get("layout")
    if not isinstance(layout, dict):
        raise damaged(path, f"layout must be a dictionary, but it is {layout!r}")
    try:
        entries = entries_from_json(facts.get("entries"), frames)
    except ValueError as error:
        raise damaged(path, str(error)) from None
    if frames and entries != record.entries:
        raise damaged(path, "its frames have other entries than those of the dataset")
    return SinkState(frames, first_id, next_id, entries, layout, facts.get("waiting"))


def save_state(directory: Path, version: str, collector: Mapping[str, Any], sink: SinkState) -> str:
    """Writes the state of a collection, and returns the name of the file.

    Raises:
        TypeError: if the collector's state is not plain data.
        OSError: if the file can't be written.
    """
    check_plain_data("the state", collector)
    content = {"format": _FORMAT, "trawl": version, "collector": collector, "sink": sink.to_plain()}
    return write_state(directory, _STEM, content)


def state_name(record: Record) -> str | None:
    """Returns the name of the state's file in a dataset's record; None if there is no state.

    Raises:
        ValueError: if the name in the record is not the name of a state's file.
    """
    name = record.layout.get(STATE)
    if name is None:
        return None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise record.damaged(f"{name!r} is not the name of a state")
    return name


def drop_states(directory: Path, kept: str | None) -> None:
    """Removes all states from a dataset, except one."""
    for name in os.listdir(directory):
        if _NAME.fullmatch(name) and name != kept:
            (directory / name).unlink(missing_ok=True)
