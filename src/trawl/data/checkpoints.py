"""Folders that keep the last two checkpoints of a run."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trawl.data.sinks.files import explaining_full_disks, lock
from trawl.data.state_files import DIGITS, SUFFIX, check_plain_data, read_state, write_state
from trawl.errors import StateError

# A number of more digits is not one of ours, and its successor might be no name of a file.
_NAME = re.compile(rf"checkpoint-([0-9]{{8,18}})-[0-9a-f]{{{DIGITS}}}{re.escape(SUFFIX)}")
_LARGEST = 10**18 - 1


class CheckpointFolder:
    """A folder of checkpoints. Other files in the folder are left alone.

    Args:
        path: path of the folder, which is created when the first checkpoint is saved.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # Absolute, because the process may change its working directory.
        self._place = self.path.absolute()
        self._lock: int | None = None
        # Process that has locked the folder: the lock of a forked child is that of its parent.
        self._owner = 0
        # Name of the last checkpoint that is known to be whole.
        self._last: str | None = None

    def names(self) -> list[str]:
        """Returns the names of the checkpoints, newest first."""
        try:
            found = filter(_NAME.fullmatch, os.listdir(self._place))
        except FileNotFoundError:
            return []
        return sorted(found, key=_number, reverse=True)

    def save(self, content: Mapping[str, Any]) -> Path:
        """Saves a checkpoint, and removes all but the last two.

        The folder is locked from the first call until :meth:`close`.

        Returns:
            The path of the file.

        Raises:
            TypeError: if the content is not plain data.
            BlockingIOError: if another process or collector saves checkpoints in the folder.
            OSError: if the checkpoint can't be written. Earlier checkpoints are kept.
        """
        for name, value in content.items():
            check_plain_data(name, value)
        with explaining_full_disks(self._place, self.path):
            self._ensure_lock()
            before = self.names()
            number = _number(before[0]) + 1 if before else 1
            if number > _LARGEST:
                raise ValueError(
                    f"{self.path / before[0]} has the largest number that a checkpoint can have: "
                    "remove it, or save in another folder"
                )
            name = write_state(self._place, f"checkpoint-{number:08d}", content)
        kept = {name, self._last or (before[0] if before else name)}
        self._last = name
        for old in before:
            if old not in kept:
                # A folder with such a name is not one of ours.
                with suppress(IsADirectoryError):
                    (self._place / old).unlink(missing_ok=True)
        return self.path / name

    def _ensure_lock(self) -> None:
        """Locks the folder, unless this process has locked the folder that is there now."""
        self._place.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            mine, there = os.fstat(self._lock), os.stat(self._place)
            same = (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
            if same and self._owner == os.getpid():
                return
            self.close()
        self._lock = lock(self._place, "another collector saves its checkpoints here")
        self._owner = os.getpid()

    def files(self) -> list[Path]:
        """Returns the paths of the checkpoints, newest first."""
        return [self.path / name for name in self.names()]

    def read(self, file: Path) -> dict[str, Any]:
        """Returns the content of a checkpoint.

        Raises:
            FileNotFoundError: if another process has removed it.
            StateError: if it is damaged, or can't be read.
        """
        try:
            return read_state(self._place, file.name)
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise StateError(str(error)) from error

    def loaded(self, file: Path) -> None:
        """Notes that a checkpoint is known to be whole, so that it is kept."""
        self._last = file.name

    def close(self) -> None:
        """Unlocks the folder. Further calls do nothing."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_folder(path: Any) -> None:
    """Checks that a path may be that of a folder of checkpoints.

    Raises:
        TypeError: if it is no path.
        NotADirectoryError: if it is the path of a file.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be the path of a folder, but it is {path!r}")
    if os.path.isfile(path):
        raise NotADirectoryError(
            errno.ENOTDIR, "path must be the folder of the checkpoints, but it is a file", str(path)
        )


def _number(name: str) -> int:
    found = _NAME.fullmatch(name)
    assert found is not None
    return int(found[1])
