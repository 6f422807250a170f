"""``dataset.json``: what a dataset is, and how much of what lies there counts.

It is replaced as a whole, so that a reader finds a state or the one after, never half of each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RECORD, FRAMES = "dataset.json", "frames"
FORMATS = ("memmap", "minari", "parquet")
VERSION = 1
# How the frames lie there: for those who read and write them, and not for users.
LAYOUT = "layout"


def read_record(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The record of a dataset.

    Raises:
        FileNotFoundError: if there is no dataset.
        ValueError: if the record is damaged, or of a format that this version doesn't know.
    """
    path = Path(directory) / RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{directory} is no dataset: it has no {RECORD}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    facts = record if isinstance(record, dict) else {}
    found, version = facts.get("format"), facts.get("version")
    if found not in FORMATS or version != VERSION:
        raise ValueError(
            f"{path} has format {found!r} of version {version!r}, but this version of Trawl reads "
            f"{', '.join(FORMATS)} of version {VERSION}"
        )
    return facts


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Puts a JSON file into the place of one that may be there, at once."""
    text = json.dumps(content, indent=2, allow_nan=False)
    new = path.with_name(f".{path.name}")
    new.write_text(text + "\n", encoding="utf-8")
    os.replace(new, path)


def sync(directory: Path) -> None:
    """Waits until the disk has all that is under a directory."""
    for path in [*directory.rglob("*"), directory, directory.parent]:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
