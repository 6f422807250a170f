"""The record of a dataset, ``_dataset.json``: its format, and the number of valid frames.

The file is replaced atomically, so a reader never sees a mix of two states. Its content is checked
when it is read, because a dataset may be damaged or come from an untrusted source.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trawl.data.sinks.entries import Entry, entries_from_json, is_count
from trawl.data.sinks.files import damaged, open_inside, read_json, write_json
from trawl.registry import Registry

# Readers of Parquet folders skip names that begin with an underscore.
RECORD, FRAMES = "_dataset.json", "frames"
# Name of the record in datasets of Trawl 0.1, which can still be read.
_FIRST_RECORD = "dataset.json"
#: The formats of datasets: subclasses of :class:`~trawl.data.Sink`, by their names.
FORMATS: Registry[Any] = Registry(
    "trawl.sinks",
    {
        "memmap": "trawl.data.sinks.memmap:MemmapSink",
        "minari": "trawl.extras.formats.minari:MinariSink",
        "parquet": "trawl.extras.formats.parquet:ParquetSink",
    },
    lambda found: isinstance(found, type) and hasattr(found, "batches"),
    "a subclass of trawl.data.Sink",
)
VERSION = 1
# Key of the description of the dataset's files, which is not shown to users.
LAYOUT = "layout"
_OWN = ("format", "version", "frames", "complete", LAYOUT)
# Far below the limit of int64, because the trajectory ids of a collection are added to it.
LARGEST_ID = 2**62


@dataclass(frozen=True)
class Record:
    """The checked content of a dataset's record.

    Attributes:
        directory: path of the dataset.
        path: path of the record's file.
        format: name of the format.
        frames: number of valid frames.
        complete: False while the dataset is being written, or if writing was cut short.
        given: the sink's ``info``.
        entries: entries that each frame has.
        next_id: first trajectory id for new trajectories; all ids in the dataset are below it.
        layout: the format's own part of the record, which is not checked yet.
    """

    directory: Path
    path: Path
    format: str
    frames: int
    complete: bool
    given: dict[str, Any]
    entries: list[Entry]
    next_id: int
    layout: dict[str, Any]

    def damaged(self, what: str) -> ValueError:
        """Returns an error that describes the damage to the record."""
        return damaged(self.path, what)

    def facts(self) -> dict[str, Any]:
        """Returns the facts for users: the sink's ``info``, and the record's own facts."""
        own = {"format": self.format, "version": VERSION, "frames": self.frames}
        return {**own, "complete": self.complete, **self.given}


def read_record(directory: str | os.PathLike[str]) -> Record:
    """Reads and checks the record of a dataset.

    Raises:
        FileNotFoundError: if the directory does not exist, or is not a dataset.
        ValueError: if the record is damaged, or its format or version is unknown.
    """
    place = Path(directory)
    for name in (RECORD, _FIRST_RECORD):
        try:
            file = open_inside(place, name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        return _checked(place, place / name, read_json(file, place / name))
    why = f"it has no {RECORD}" if os.path.isdir(directory) else "there is no such folder"
    raise FileNotFoundError(f"{directory} is not a dataset: {why}")


def drop_first_record(directory: Path) -> None:
    """Removes files that only datasets of Trawl 0.1 have.

    Call this function only after the new record was written.
    """
    for name in (_FIRST_RECORD, f".{_FIRST_RECORD}", "reserve", "unfinished.parquet"):
        (directory / name).unlink(missing_ok=True)


def to_json(record: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of ``_dataset.json``, made from a sink's record and its ``info``."""
    head = {name: record[name] for name in _OWN if name != LAYOUT}
    return {**head, **given, **record}


def write_record(record: Record) -> None:
    """Writes a record, which replaces that of its dataset."""
    facts = {**record.facts(), LAYOUT: record.layout}
    given = {name: facts.pop(name) for name in record.given}
    write_json(record.directory / RECORD, to_json(facts, given))


def _checked(directory: Path, path: Path, facts: dict[str, Any]) -> Record:
    found, version = facts.get("format"), facts.get("version")
    known = isinstance(found, str) and found in FORMATS
    if not known or type(version) is not int or version != VERSION:
        raise ValueError(
            f"{path} has format {reprlib.repr(found)} of version {reprlib.repr(version)}, but this "
            f"version of Trawl reads {', '.join(FORMATS)} of version {VERSION}"
        )
    frames, complete, layout = (facts.get(name) for name in ("frames", "complete", LAYOUT))
    if not is_count(frames):
        raise damaged(
            path, f"frames must be the number of frames, but it is {reprlib.repr(frames)}"
        )
    if type(complete) is not bool:
        raise damaged(path, f"complete must be true or false, but it is {reprlib.repr(complete)}")
    if not isinstance(layout, dict):
        raise damaged(path, f"{LAYOUT} must be an object, but it is {reprlib.repr(layout)}")
    next_id = layout.get("next_id")
    if not is_count(next_id) or next_id > LARGEST_ID:
        raise damaged(path, f"next_id must be a number, but it is {reprlib.repr(next_id)}")
    try:
        entries = entries_from_json(layout.get("entries"), frames)
    except ValueError as error:
        raise damaged(path, str(error)) from None
    given = {name: value for name, value in facts.items() if name not in _OWN}
    return Record(directory, path, str(found), frames, complete, given, entries, next_id, layout)
