"""Statistics in a CSV file."""

from __future__ import annotations

import csv
import errno
import os
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from typing_extensions import override

from trawl.extras.monitors.sinks import StatsSink, unwritable

_TIME = "time"
_REMEDY = "pass another file"


class CSVSink(StatsSink):
    """Writes a row of a CSV file for each poll.

    The first column, ``time``, is the Unix time in seconds. Each statistic has a column with its
    name, even if it is a string. A field is empty if a poll lacks the statistic. When a new
    statistic appears, the file gets another column. If the file is deleted, the next poll writes it
    anew with all rows.

    Args:
        file: path of the file. It must not exist, unless ``append`` is True.
        append: True to continue an existing file.

    Raises:
        FileExistsError: when the monitor is made, if the file exists and ``append`` is False.
        ValueError: when the monitor is made, if ``append`` is True and the file was not written by
            a ``CSVSink``, or is a device or a pipe.
        OSError: when the monitor is made, if the file can't be written.

    Examples:
        >>> import csv, os, tempfile
        >>> from trawl import Collector
        >>> from trawl.observe import CSVSink, Monitor
        >>> file = os.path.join(tempfile.mkdtemp(), "stats.csv")
        >>> with (
        ...     Collector("CartPole-v1", frames_per_batch=10, total_frames=30) as collector,
        ...     Monitor(collector, [CSVSink(file)]),
        ... ):
        ...     for batch in collector:
        ...         pass
        >>> with open(file, newline="") as opened:
        ...     *_, last = csv.DictReader(opened)
        >>> print(last["frames"])
        30
    """

    target = "FILE"

    @override
    @classmethod
    def from_text(cls, target: str, resume: bool) -> CSVSink:
        return cls(target, append=resume)

    def __init__(self, file: str | os.PathLike[str], append: bool = False) -> None:
        self.file = os.fspath(file)
        self.append = append
        self._columns: list[str] = []
        self._opened: IO[str] | None = None

    def open(self) -> None:
        """Makes the file, or reads the columns of the file to continue."""
        self._columns = [_TIME]
        with unwritable(self.file, _REMEDY):
            try:
                self._opened = _text(self.file, "x+")
            except FileExistsError:
                if not self.append:
                    raise
                if not (os.path.isfile(self.file) or os.path.isdir(self.file)):
                    raise ValueError(f"{self.file} is not a regular file: {_REMEDY}") from None
                self._opened = _text(self.file, "r+")
        if self.append:
            try:
                self._continue(self._opened)
            except BaseException:
                self.close()
                raise

    def _continue(self, file: IO[str]) -> None:
        """Reads the columns, and removes a last line that a crash has cut."""
        try:
            header = next(csv.reader(file), [_TIME])
        except (UnicodeDecodeError, csv.Error):
            header = []
        if header[:1] != [_TIME]:
            raise ValueError(
                f"{self.file} was not written by a CSVSink, and can't be continued: {_REMEDY}"
            )
        with open(self.file, "rb+") as raw:
            end = raw.seek(0, os.SEEK_END)
            while end and _last_byte(raw, end) != b"\n":
                end -= 1
            raw.truncate(end)
        file.seek(0, os.SEEK_END)
        self._columns = header if end else [_TIME]

    def write(self, stats: Mapping[str, Any], step: int) -> None:
        """Writes a row."""
        assert self._opened is not None
        new = [name for name in stats if name not in self._columns]
        if new or not self._opened.tell() or self._is_gone(self._opened):
            self._add_columns(new)
        row = {_TIME: round(time.time(), 3), **stats}
        csv.writer(self._opened).writerow([row.get(name, "") for name in self._columns])
        self._opened.flush()

    def _is_gone(self, opened: IO[str]) -> bool:
        """Returns True if the file was deleted, which is still open here.

        Raises:
            FileExistsError: if there is another file in its place.
        """
        try:
            found = os.stat(self.file)
        except FileNotFoundError:
            return True
        if not os.path.samestat(found, os.fstat(opened.fileno())):
            raise FileExistsError(
                errno.EEXIST, f"another file is in its place ({_REMEDY})", self.file
            )
        return False

    def _add_columns(self, new: list[str]) -> None:
        """Replaces the file by one with more columns; the old one stays whole until then."""
        assert self._opened is not None
        columns = [*self._columns, *new]
        folder, name = os.path.split(os.path.abspath(self.file))
        handle, temporary = tempfile.mkstemp(".new", f".{name}.", folder)
        wider = _text(handle, "w+")
        try:
            writer = csv.writer(wider)
            writer.writerow(columns)
            self._opened.seek(0)
            rows = csv.reader(self._opened)
            next(rows, None)
            writer.writerows([*row, *[""] * len(new)] for row in rows)
            wider.flush()
            os.chmod(temporary, stat.S_IMODE(os.fstat(self._opened.fileno()).st_mode))
            os.replace(temporary, self.file)
        except BaseException:
            # A full disk fails this too.
            with suppress(OSError):
                wider.close()
            os.unlink(temporary)
            self._opened.seek(0, os.SEEK_END)
            raise
        self._opened.close()
        self._opened, self._columns = wider, columns

    def close(self) -> None:
        """Closes the file."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _last_byte(file: IO[bytes], end: int) -> bytes:
    file.seek(end - 1)
    return file.read(1)


def _text(path: str | int, mode: str) -> IO[str]:
    return open(path, mode, newline="", encoding="utf-8")
