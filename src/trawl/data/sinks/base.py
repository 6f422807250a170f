"""Base class of sinks, which handles a dataset's directory and record, commits and full disks."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, ClassVar

from tensordict import TensorDictBase

from trawl.data.sinks.entries import Entry, check_alike, entries_of, flat_frames
from trawl.data.sinks.files import (
    check_plain,
    create,
    explaining_full_disks,
    lock,
    sync,
    sync_tree,
    write_json,
)
from trawl.data.sinks.record import (
    FRAMES,
    LAYOUT,
    RECORD,
    VERSION,
    Record,
    drop_first_record,
    read_record,
    to_json,
    write_record,
)
from trawl.data.sinks.states import (
    STATE,
    SavedState,
    SinkState,
    drop_states,
    save_state,
    state_name,
)
from trawl.keys import TRAJ_IDS
from trawl.versions import version

# Bytes reserved on the disk, so that a sink can still be closed after the disk has become full.
# Each entry needs two blocks.
_RESERVE = 64 * 1024
_RESERVE_PER_ENTRY = 8 * 1024
# Readers of Parquet folders skip names that begin with a dot.
_ROOM = ".reserve"
_BEGUN = {f".{RECORD}", _ROOM}


class SinkFormat(ABC):
    """The part of a sink that depends on the format."""

    #: Name of the format.
    format: ClassVar[str]

    @abstractmethod
    def _begin(self, entries: list[Entry]) -> None:
        """Prepares the files for frames with these entries, before the first frames are added."""

    @abstractmethod
    def _append(self, rows: TensorDictBase) -> None:
        """Adds frames of shape ``(frames,)``, or raises an exception and adds none of them."""

    @abstractmethod
    def _flush(self, everything: bool) -> None:
        """Commits waiting frames.

        Args:
            everything: True to commit all of them; False to commit only those that can be
                committed now.
        """

    @abstractmethod
    def _layout(self) -> dict[str, Any]:
        """Returns the format's own part of the record."""

    @abstractmethod
    def _restore(self, record: Record) -> None:
        """Continues after the commit that the record describes, and ignores any later data.

        Raises:
            ValueError: if committed data is missing or damaged. In this case, nothing is changed.
        """

    @abstractmethod
    def _finish(self) -> None:
        """Completes the files, after the last commit and before the final record."""

    @abstractmethod
    def _release(self) -> None:
        """Closes files, and drops frames that were not committed."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of frames that were written but are not committed yet."""

    @classmethod
    def read(cls, record: Record) -> TensorDictBase:
        """Returns the frames of a dataset of this format, of shape ``(frames,)``.

        Raises:
            ValueError: if the dataset is damaged.
        """
        raise NotImplementedError(f"{cls.__name__} can't read datasets")

    @classmethod
    def batches(cls, record: Record, size: int) -> Iterator[TensorDictBase]:
        """Yields the frames of a dataset of this format, ``size`` at a time."""
        whole = cls.read(record)
        for start in range(0, len(whole), size):
            yield whole[start : start + size]

    def _waiting_state(self) -> Any:
        """Returns the frames that are still waiting after a commit, as plain data."""
        return None

    def _restore_waiting(self, state: Any) -> None:
        """Restores the frames that :meth:`_waiting_state` returned."""
        if state is not None:
            raise ValueError(f"the format {self.format} has no frames that wait after a commit")


class Sink(SinkFormat):
    """Writes batches to a dataset on disk.

    A dataset is a directory. Its file ``_dataset.json`` holds the number of valid frames, and each
    commit replaces this file. If the process is killed, all committed frames can still be read,
    and a sink with ``resume=True`` continues after them. Commits also survive a power cut, because
    frames are on the disk before ``_dataset.json`` counts them. A subclass writes frames in its
    format in ``_append``, and calls ``_commit`` when the frames are on the disk.

    Leaving the ``with`` block closes the sink. If an exception leaves the block, the dataset is
    marked as not complete. A sink that is closed without any frames removes its directory.

    Args:
        directory: path of the dataset. Without ``resume``, this path must not exist. Missing
            parent directories are created.
        info: facts about the dataset, which are stored in its ``_dataset.json``. You can add facts
            to the attribute :attr:`info` until the sink is closed.
        resume: True to continue a dataset of this format. If no dataset exists, the sink begins a
            new one. Trajectories in the dataset are not continued. New trajectories have ids above
            those in the dataset.

    Attributes:
        directory: path of the dataset.
        frames: number of committed frames, which can be read even after a crash.
        info: facts about the dataset, which are written to ``_dataset.json``.
        closed: True if the sink is closed.

    Raises:
        FileExistsError: if ``directory`` exists, unless ``resume`` is True and the directory is a
            dataset.
        BlockingIOError: if another sink is writing to the dataset.
        OSError: if the directory can't be written.
        ValueError: if ``resume`` is True, and the dataset has another format or is damaged.
    """

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
        self._state: str | None = None  # name of the file with the collector's state
        self._first_id = self._next_id = 0
        # Absolute, because the process may change its working directory.
        self._place = self.directory.absolute()
        self._reserve = self._place / _ROOM
        self._frames_at = self._place / FRAMES
        new = not (resume and self._is_there())
        if new:
            self._make()
        self._lock = lock(self._place, "another sink or process is writing to this dataset")
        self.closed, restored = False, new
        try:
            with self._explained():
                if not new:
                    self._resume()
                    restored = True
                self._reserve_space(_RESERVE)
                self._write_record(complete=False)
                if not new:
                    drop_first_record(self._place)
                    drop_states(self._place, self._state)
        except BaseException:
            if new:
                self._discard()
            elif restored:
                self._reserve.unlink(missing_ok=True)
            self._close_files()
            raise

    # --- writing

    def write(self, batch: TensorDictBase) -> None:
        """Appends the frames of a batch of any shape, environment by environment.

        Rows without experience (masked out, or with trajectory id -1) are left out. If this method
        raises an error, the dataset has no frame of the batch.

        Args:
            batch: a TensorDict that a collector delivered. All batches must have the same entries.

        Raises:
            ValueError: if the entries differ from those of earlier batches.
            TypeError: if the batch is not a TensorDict, or an entry is neither a tensor of a fixed
                shape nor text.
            RuntimeError: if the sink is closed.
            OSError: if the batch can't be written. If the disk is full, the message includes the
                path and the free space.
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
            with self._explained():
                if not self._entries:
                    entries = entries_of(rows)
                    self._reserve_space(_RESERVE + _RESERVE_PER_ENTRY * len(entries))
                    self._begin(entries)
                    self._entries = entries
                self._append(rows)
        except BaseException:
            self._next_id = before
            raise

    def _with_own_ids(self, rows: TensorDictBase) -> TensorDictBase:
        """Returns the frames, with trajectory ids above those already in a resumed dataset."""
        ids = rows.get(TRAJ_IDS, None)
        if ids is None:
            return rows
        if self._first_id:
            ids = ids + self._first_id
            rows = rows.copy().set(TRAJ_IDS, ids)
        self._next_id = max(self._next_id, int(ids.max()) + 1)
        return rows

    def commit(self) -> None:
        """Commits the frames written so far, so that they can be read even after a crash.

        Sinks also commit on their own, at times that depend on the format. The format ``minari``
        commits only whole episodes; frames of unfinished episodes are not committed yet.

        Raises:
            OSError: if the frames can't be written.
        """
        if not self.closed and self._entries:
            with self._explained():
                self._flush(everything=False)

    def _commit(self, frames: int) -> None:
        """Writes a record in which ``frames`` is the number of valid frames."""
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
            STATE: self._state,
        }
        write_json(self._place / RECORD, to_json(facts, self.info), wait=wait)

    # --- the state of the collection

    def save_state(self, collector: Mapping[str, Any] | None) -> None:
        """Commits the frames written so far, and saves the state of their collector with them.

        Call this method between two batches. Only the last state is kept. Whoever resumes the
        dataset loads it with :func:`~trawl.data.sinks.states.load_state`, and calls
        :meth:`continue_from`.

        Args:
            collector: the state that the collector's ``state_dict()`` returned; None to remove the
                last state.

        Raises:
            TypeError: if the state is not plain data.
            OSError: if the state can't be written. The last state is kept.
        """
        self.commit()
        before = self._state
        with self._explained():
            try:
                self._state = None
                if collector is not None:
                    self._state = save_state(self._place, version(), collector, self._own_state())
                self._write_record(complete=False)
            except BaseException:
                self._state = before
                raise
            drop_states(self._place, self._state)

    def _own_state(self) -> SinkState:
        return SinkState(
            self.frames,
            self._first_id,
            self._next_id,
            self._entries,
            self._layout(),
            self._waiting_state(),
        )

    def continue_from(self, saved: SavedState) -> None:
        """Goes back to the commit at which a state was saved.

        Later frames are dropped, because the collector that loads the state collects them again.
        Trajectories continue with their ids.

        Args:
            saved: the last state of this dataset.

        Raises:
            ValueError: if the dataset has another state by now, or is damaged. The sink is closed.
            OSError: if the dataset can't be written. The sink is closed.
        """
        try:
            with self._explained():
                self._go_back(saved)
        except BaseException:
            # The dataset itself is still valid: a record is replaced as a whole.
            self._close_files()
            raise

    def _go_back(self, saved: SavedState) -> None:
        now, own = read_record(self._place), saved.sink
        if state_name(now) != saved.name:
            raise ValueError(f"another process has changed {self.directory} in the meantime")
        earlier = own.record(now)
        self._release()
        # The record comes first, so that it never counts frames that are dropped.
        write_record(earlier)
        self.frames, self._entries = own.frames, own.entries
        self._first_id, self._next_id = own.first_id, own.next_id
        if own.frames:
            self._restore(earlier)
        elif own.entries:
            self._begin(own.entries)
        self._restore_waiting(own.waiting)

    # --- closing

    def close(self, *, complete: bool = True, sync: bool = True) -> None:
        """Commits all frames and closes the sink.

        This method can be called again, for example after an interruption.

        Args:
            complete: False to mark the dataset as not complete, because collection was cut short.
            sync: True to wait until the files that this method writes are on the disk. Frames that
                were committed earlier survive a power cut in any case.

        Raises:
            OSError: if a file can't be written. Committed frames can still be read, and the
                dataset is marked as not complete if the record can be written.
        """
        if self.closed:
            return
        failure: Exception | None = None
        try:
            with self._explained():
                if self._entries:
                    self._flush(everything=True)
        except Exception as error:
            failure = error
        if not self.frames:
            self._discard()
        else:
            with self._explained():
                self._seal(complete and failure is None, sync)
        self._close_files()
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

    def _close_files(self) -> None:
        self.closed = True
        self._release()
        os.close(self._lock)

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.close(complete=kind is None)

    # --- the directory

    def _is_there(self) -> bool:
        """Returns True if there is a dataset to continue."""
        if not os.path.lexists(self.directory):
            return False
        try:
            found = read_record(self.directory).format
        except FileNotFoundError as error:
            # A process that is killed while it begins a dataset leaves at most these files.
            if self.directory.is_dir() and set(os.listdir(self.directory)) <= _BEGUN:
                return True
            raise FileExistsError(
                f"{self.directory} already exists, and is not a dataset that can be continued"
            ) from error
        if found != self.format:
            raise ValueError(
                f"{self.directory} is a dataset of format {found}, and can't be continued as "
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
                raise FileExistsError(_exists_already(self.directory)) from None
            # The parent of the dataset is a file.
            reason = os.strerror(errno.ENOTDIR)
            raise NotADirectoryError(errno.ENOTDIR, reason, error.filename) from None
        # A folder that can't be opened for reading may still be writable.
        with suppress(PermissionError):
            sync(path.parent for path in [self._place, *missing])

    def _resume(self) -> None:
        check_plain(self._place)
        try:
            record = read_record(self._place)
        except FileNotFoundError:  # the process was killed before it wrote the record
            return
        self.frames = record.frames
        self.info = {**record.given, **self.info}
        self._first_id = self._next_id = record.next_id
        self._state = state_name(record)
        # Without committed frames, the files may be incomplete. The next batch creates them again.
        if self.frames:
            self._entries = record.entries
            self._restore(record)

    def _reserve_space(self, size: int) -> None:
        with open(create(self._reserve), "wb") as file:
            # Random bytes, because zeros may take no space on a file system that compresses.
            file.write(secrets.token_bytes(size))

    def _explained(self) -> AbstractContextManager[None]:
        return explaining_full_disks(self._place, self.directory)


def was_closed(directory: str | os.PathLike[str]) -> bool:
    """Returns True if the last sink that wrote to a dataset was closed.

    Returns False if the sink is still open, or if its process ended without closing it. An open
    sink keeps a file that reserves space on the disk, and :meth:`Sink.close` removes this file.
    """
    return not os.path.lexists(Path(directory) / _ROOM)


def check_free(directory: str | os.PathLike[str]) -> None:
    """Checks that nothing exists at the path of a new dataset.

    Raises:
        FileExistsError: if the path exists.
    """
    if os.path.lexists(directory):
        raise FileExistsError(_exists_already(directory))


def _exists_already(directory: str | os.PathLike[str]) -> str:
    return f"{directory} already exists, and is not overwritten"
