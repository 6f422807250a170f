"""What sinks of all formats have in common: the directory, its record, commits, full disks."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from tensordict import TensorDictBase

from trawl.data.sinks.entries import IDS, Entry, check_alike, entries_of, flat_frames
from trawl.data.sinks.files import check_plain, create, sync, sync_tree, write_json
from trawl.data.sinks.record import (
    FRAMES,
    LAYOUT,
    RECORD,
    VERSION,
    Record,
    drop_first_record,
    read_record,
    to_json,
)

# What the last steps need on a disk that collection has filled up: two blocks for each entry.
_RESERVE = 64 * 1024
_RESERVE_PER_ENTRY = 8 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Readers of Parquet folders skip names that begin with a dot.
_ROOM = ".reserve"
_BEGUN = {f".{RECORD}", _ROOM}


class Sink(ABC):
    """Writes batches, as they come, into a dataset on disk.

    A dataset is a directory. ``_dataset.json`` in it says how many frames count, and is replaced
    at each commit: whenever the process is killed, what was committed can be read, and a sink with
    ``resume=True`` goes on after it. A commit also outlives a power cut: frames are on the disk
    before ``_dataset.json`` speaks of them. A subclass writes frames of its format in ``_append``,
    and calls ``_commit`` when the disk has them.

    Leaving the ``with`` block closes the sink. After an exception within, the dataset is marked
    as not complete. Without any frame there is no dataset.

    Args:
        directory: where the dataset goes. It must not exist; its parents are made.
        info: how it is made, for ``_dataset.json``; may be added to until the end, as
            :attr:`info`.
        resume: whether to go on with a dataset of this format that is there. If there is none,
            it is begun. Trajectory ids go on after those of the dataset, as no trajectory does.

    Attributes:
        directory: the dataset.
        frames: number of frames committed: those that can be read whatever happens.
        info: what goes into ``_dataset.json``.
        closed: whether the sink was closed.

    Raises:
        FileExistsError: if there is something at ``directory``, or with ``resume`` something
            that is no dataset.
        BlockingIOError: if another sink writes there.
        OSError: if it can't be written there.
        ValueError: with ``resume``, if the dataset is of another format, or damaged.
    """

    #: The format's name.
    format: ClassVar[str]

    def __init__(
        self,
        directory: str | os.PathLike[str],
        info: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
    ) -> None:
        self.closed = True  # until there is something to close
        self.directory = Path(directory)
        self.info: dict[str, Any] = dict(info or {})
        self.frames = 0
        self._entries: list[Entry] = []
        self._first_id = self._next_id = 0
        # Where it is even if the process goes to another folder.
        self._place = self.directory.absolute()
        self._reserve = self._place / _ROOM
        self._frames_at = self._place / FRAMES
        new = not (resume and self._is_there())
        if new:
            self._make()
        self._lock = _lock(self._place)
        self.closed, restored = False, new
        try:
            with self._telling():
                if not new:
                    self._resume()
                    restored = True
                self._keep_room(_RESERVE)
                self._write_record(complete=False)
                if not new:
                    drop_first_record(self._place)
        except BaseException:
            if new:
                self._discard()
            elif restored:
                self._reserve.unlink(missing_ok=True)
            self._let_go()
            raise

    # --- what a format does

    @abstractmethod
    def _begin(self, entries: list[Entry]) -> None:
        """Makes place for frames of these entries; there is nothing of them yet."""

    @abstractmethod
    def _append(self, rows: TensorDictBase) -> None:
        """Takes frames ``(frames,)``, all or none: if it raises, it is as if it was not called."""

    @abstractmethod
    def _flush(self, everything: bool) -> None:
        """Commits what waits: all that can be committed now, or everything, at the end."""

    @abstractmethod
    def _layout(self) -> dict[str, Any]:
        """What the format keeps in the record."""

    @abstractmethod
    def _restore(self, record: Record) -> None:
        """Goes on after this commit: what lies there beyond it goes.

        Raises:
            ValueError: if what was committed is not there; nothing is changed then.
        """

    @abstractmethod
    def _finish(self) -> None:
        """Called when all is committed, before the record says that it is the end."""

    @abstractmethod
    def _release(self) -> None:
        """Lets go of files."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of frames that were taken, and are not committed yet."""

    # --- writing

    def write(self, batch: TensorDictBase) -> None:
        """Appends the frames of a batch of any shape, row by row.

        Rows that are no experience (masked out, or with trajectory id -1) are left out. A batch
        that can't be written is as if it had not been given.

        Args:
            batch: anything that a collector delivers: TensorDicts with the same entries.

        Raises:
            ValueError: if its entries are not those of the batches before.
            TypeError: if it is no TensorDict, or an entry is no tensor of a fixed shape.
            RuntimeError: if the sink is closed.
            OSError: if it can't be written, as on a full disk: says where, and how much is free.
        """
        if self.closed:
            raise RuntimeError(f"{type(self).__name__}({str(self.directory)!r}) is closed")
        if not isinstance(batch, TensorDictBase):
            raise TypeError(f"batch must be a TensorDict, but it is {type(batch).__name__}")
        rows = flat_frames(batch)
        if not len(rows):
            return
        check_alike(self._entries or entries_of(rows), rows)
        before = self._next_id
        rows = self._with_own_ids(rows)
        try:
            with self._telling():
                if not self._entries:
                    entries = entries_of(rows)
                    self._keep_room(_RESERVE + _RESERVE_PER_ENTRY * len(entries))
                    self._begin(entries)
                    self._entries = entries
                self._append(rows)
        except BaseException:
            self._next_id = before
            raise

    def _with_own_ids(self, rows: TensorDictBase) -> TensorDictBase:
        """The frames with trajectory ids that the dataset has not, if it was begun before."""
        ids = rows.get(IDS, None)
        if ids is None:
            return rows
        if self._first_id:
            ids = ids + self._first_id
            rows = rows.copy().set(IDS, ids)
        self._next_id = max(self._next_id, int(ids.max()) + 1)
        return rows

    def commit(self) -> None:
        """Makes sure that all that was taken can be read, whatever happens.

        Formats commit by themselves, as often as suits them. Minari's takes whole episodes only:
        those that have not ended are waiting still.

        Raises:
            OSError: if it can't be written.
        """
        if not self.closed and self._entries:
            with self._telling():
                self._flush(everything=False)

    def _commit(self, frames: int) -> None:
        """The record says from now on that so many frames are there."""
        before, self.frames = self.frames, frames
        try:
            self._write_record(complete=False)
        except BaseException:
            self.frames = before
            raise

    def _write_record(self, *, complete: bool, wait: bool = True) -> None:
        facts: dict[str, Any] = {
            "format": self.format,
            "version": VERSION,
            "frames": self.frames,
            "complete": complete,
        }
        facts[LAYOUT] = {
            "entries": [entry.to_json() for entry in self._entries],
            "next_id": self._next_id,
            **self._layout(),
        }
        write_json(self._place / RECORD, to_json(facts, self.info), wait=wait)

    # --- the end

    def close(self, *, complete: bool = True, sync: bool = True) -> None:
        """Commits what there is, and closes; may be called again, also after it was interrupted.

        Args:
            complete: whether all was collected that was meant to be.
            sync: whether to wait until the disk has also what closing writes. What was committed
                before outlives a power cut in any case.

        Raises:
            OSError: if something can't be written. What was committed can be read, and the
                dataset is marked as not complete if that can be written.
        """
        if self.closed:
            return
        failure: Exception | None = None
        try:
            with self._telling():
                if self._entries:
                    self._flush(everything=True)
        except Exception as error:
            failure = error
        if not self.frames:
            self._discard()
        else:
            with self._telling():
                self._seal(complete and failure is None, sync)
        self._let_go()
        if failure is not None:
            raise failure

    def _seal(self, complete: bool, wait: bool) -> None:
        self._reserve.unlink(missing_ok=True)
        self._finish()
        self._write_record(complete=complete, wait=wait)
        if wait:
            sync_tree(self._place)

    def _discard(self) -> None:
        shutil.rmtree(self._place, ignore_errors=True)

    def _let_go(self) -> None:
        self.closed = True
        self._release()
        os.close(self._lock)

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.close(complete=kind is None)

    # --- the directory

    def _is_there(self) -> bool:
        """Whether there is a dataset to go on with."""
        if not os.path.lexists(self.directory):
            return False
        try:
            found = read_record(self.directory).format
        except FileNotFoundError as error:
            # A process that is killed as it begins leaves no more than this.
            if self.directory.is_dir() and set(os.listdir(self.directory)) <= _BEGUN:
                return True
            raise FileExistsError(
                f"{self.directory} exists already, and is no dataset to go on with"
            ) from error
        if found != self.format:
            raise ValueError(
                f"{self.directory} is a dataset of format {found}, and can't be gone on with as "
                f"{self.format}"
            )
        return True

    def _make(self) -> None:
        check_free(self.directory)
        missing = [path for path in self._place.parents if not path.exists()]
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            self.directory.mkdir()
        except FileExistsError as error:
            if error.filename == str(self.directory):
                raise FileExistsError(_taken(self.directory)) from None
            # A file, where a directory should be.
            reason = os.strerror(errno.ENOTDIR)
            raise NotADirectoryError(errno.ENOTDIR, reason, error.filename) from None
        # One may write into folders that one may not read.
        with suppress(PermissionError):
            sync(path.parent for path in [self._place, *missing])

    def _resume(self) -> None:
        check_plain(self._place)
        try:
            record = read_record(self._place)
        except FileNotFoundError:  # as a process leaves it that is killed while it begins
            return
        self.frames = record.frames
        self.info = {**record.given, **self.info}
        self._first_id = self._next_id = record.next_id
        # Files without frames may be half made.
        if self.frames:
            self._entries = record.entries
            self._restore(record)

    def _keep_room(self, size: int) -> None:
        with open(create(self._reserve), "wb") as file:
            # Zeros might take no room on a disk that compresses.
            file.write(secrets.token_bytes(size))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Within it a disk that is full is told with its path, and how much is free."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            free = shutil.disk_usage(self._place.parent).free
            reason = f"{os.strerror(error.errno)} ({free:,} bytes free)"
            raise OSError(error.errno, reason, str(self.directory)) from error


def check_free(directory: str | os.PathLike[str]) -> None:
    """Checks that there is nothing where a dataset is to go.

    Raises:
        FileExistsError: if there is something.
    """
    if os.path.lexists(directory):
        raise FileExistsError(_taken(directory))


def _taken(directory: str | os.PathLike[str]) -> str:
    return f"{directory} exists already, and nothing is written over"


def _lock(place: Path) -> int:
    """Holds the directory, until the file is closed or the process ends, however it does."""
    file = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        reason = "is being written by another sink, or another process"
        raise BlockingIOError(error.errno, reason, str(place)) from None
    return file
