"""Base class of the formats whose datasets consist of files, one for each commit."""

from __future__ import annotations

import os
import reprlib
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from tensordict import TensorDictBase
from typing_extensions import override

from trawl.data.sinks.base import Sink
from trawl.data.sinks.entries import Entry, bytes_of, check_alike, is_count, rechunk
from trawl.data.sinks.files import create, open_frames, reading, sync
from trawl.data.sinks.record import FRAMES, Record


class FilesSink(Sink):
    """Writes a file with each commit.

    Frames are held in memory until ``commit_bytes`` or ``commit_seconds`` is reached. They are then
    written to a new file and committed. A subclass says how a file is written and read, in
    :meth:`write_file` and :meth:`read_file`.

    Args:
        directory: path of the dataset. Without ``resume``, this path must not exist. Missing
            parent directories are created.
        info: facts about the dataset, which are stored in its ``_dataset.json``.
        resume: True to continue a dataset of this format. If no dataset exists, the sink begins a
            new one.
        commit_bytes: size of the frames in memory, in bytes, at which a file is written.
        commit_seconds: time in seconds since the last commit after which the next batch triggers a
            new commit.

    Attributes:
        suffix: end of the files' names, after the dot; by default, the name of the format.

    Raises:
        ValueError: if ``commit_bytes`` or ``commit_seconds`` is negative.
        FileExistsError: if ``directory`` exists, unless ``resume`` is True and the directory is a
            dataset.
        OSError: if the directory can't be written.
    """

    suffix: ClassVar[str] = ""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        info: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        commit_bytes: int = 16 << 20,
        commit_seconds: float = 10.0,
    ) -> None:
        for name, value in (("commit_bytes", commit_bytes), ("commit_seconds", commit_seconds)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, but it is {value!r}")
        self._commit_bytes, self._commit_seconds = commit_bytes, commit_seconds
        self._waiting: list[TensorDictBase] = []
        self._bytes = 0  # of the waiting frames
        self._files = 0
        self._committed_at = time.monotonic()
        super().__init__(directory, info, resume=resume)

    # --- what a format does

    def check_entries(self, entries: Sequence[Entry]) -> None:
        """Checks the entries that all frames will have.

        Raises:
            ValueError: if the format can't hold them.
        """

    @classmethod
    @abstractmethod
    def write_file(cls, file: IO[bytes], rows: TensorDictBase, entries: Sequence[Entry]) -> None:
        """Writes frames of shape ``(frames,)`` to a new file.

        Args:
            file: the file, opened for writing.
            rows: the frames, at least one.
            entries: the entries of each frame: their keys, dtypes and shapes.
        """

    @classmethod
    @abstractmethod
    def read_file(cls, file: IO[bytes], entries: Sequence[Entry]) -> TensorDictBase:
        """Reads the frames of a file, which may come from an untrusted source.

        An exception means that the file is damaged, unless it is an ``ImportError``. So do frames
        with other entries.

        Args:
            file: the file, opened for reading.
            entries: the entries of each frame.
        """

    @classmethod
    def count_frames(cls, file: IO[bytes], entries: Sequence[Entry]) -> int:
        """Checks a file, and returns the number of its frames; by default, reads all of it."""
        return len(_checked(cls.read_file(file, entries), entries))

    @classmethod
    def read_parts(
        cls, file: IO[bytes], entries: Sequence[Entry], size: int
    ) -> Iterator[TensorDictBase]:
        """Reads the frames of a file in parts, of about ``size`` frames; by default, in one."""
        yield cls.read_file(file, entries)

    # --- writing

    @override
    def _begin(self, entries: list[Entry]) -> None:
        self.check_entries(entries)
        self._frames_at.mkdir(exist_ok=True)
        self._files = 0
        self._drop_uncommitted()
        sync([self._place])

    @override
    def _append(self, rows: TensorDictBase) -> None:
        # A copy, because the user may change the batch before it is written.
        waiting = [*self._waiting, rows.clone()]
        size = self._bytes + bytes_of(rows, self._entries)
        late = time.monotonic() - self._committed_at >= self._commit_seconds
        if late or size >= self._commit_bytes:
            self._write_file(waiting)
        else:
            self._waiting, self._bytes = waiting, size

    @override
    def _flush(self, everything: bool) -> None:
        if self._waiting:
            self._write_file(self._waiting)

    def _write_file(self, parts: Sequence[TensorDictBase]) -> None:
        rows = torch.cat(list(parts))
        new = self._unfinished()
        with open(create(new), "wb") as file:
            self.write_file(file, rows, self._entries)
            file.flush()
            os.fsync(file.fileno())
        # This may replace a file that a failed commit has left.
        os.replace(new, self._frames_at / self._name(self._files))
        sync([self._frames_at])
        self._files += 1
        try:
            self._commit(self.frames + len(rows))
        except BaseException:
            self._files -= 1
            raise
        self._waiting, self._bytes = [], 0
        self._committed_at = time.monotonic()

    @override
    def _release(self) -> None:
        self._waiting = []

    @property
    @override
    def waiting(self) -> int:
        return sum(map(len, self._waiting))

    @override
    def _finish(self) -> None:
        self._drop_uncommitted()

    @override
    def _layout(self) -> dict[str, Any]:
        return {"files": self._files}

    @override
    def _restore(self, record: Record) -> None:
        for _ in self._opened(record):
            pass
        self._files = _count(record)
        self._drop_uncommitted()

    def _drop_uncommitted(self) -> None:
        self._unfinished().unlink(missing_ok=True)
        # There may be several, if the sink has gone back to an earlier commit.
        for name in os.listdir(self._frames_at):
            number, _, kind = name.partition(".")
            if kind == self._suffix() and number.isdecimal() and int(number) >= self._files:
                (self._frames_at / name).unlink()

    def _unfinished(self) -> Path:
        # Readers of Parquet folders skip names that begin with a dot.
        return self._place / f".unfinished.{self._suffix()}"

    @classmethod
    def _suffix(cls) -> str:
        return cls.suffix or cls.format

    @classmethod
    def _name(cls, number: int) -> str:
        return f"{number:08d}.{cls._suffix()}"

    # --- reading

    @override
    @classmethod
    def read(cls, record: Record) -> TensorDictBase:
        parts = []
        for path, file in cls._opened(record):
            with _reading(path):
                parts.append(_checked(cls.read_file(file, record.entries), record.entries))
        with _reading(record.directory / FRAMES):
            return parts[0] if len(parts) == 1 else torch.cat(parts)

    @override
    @classmethod
    def batches(cls, record: Record, size: int) -> Iterator[TensorDictBase]:
        return rechunk(cls._parts(record, size), size)

    @classmethod
    def _parts(cls, record: Record, size: int) -> Iterator[TensorDictBase]:
        for path, file in cls._opened(record):
            parts = cls.read_parts(file, record.entries, size)
            while True:
                with _reading(path):
                    rows = next(parts, None)
                    if rows is None:
                        break
                    _checked(rows, record.entries)
                yield rows

    @classmethod
    def _opened(cls, record: Record) -> Iterator[tuple[Path, IO[bytes]]]:
        """Yields the path of each file, and the checked file, in order.

        Raises:
            ValueError: if a file is missing or damaged; also, after the last file, if the number of
                frames differs from the record.
        """
        frames = 0
        for number in range(_count(record)):
            name = f"{FRAMES}/{cls._name(number)}"
            path = record.directory / name
            with open(open_frames(record.directory, name), "rb") as file:
                with _reading(path):
                    frames += cls.count_frames(file, record.entries)
                    file.seek(0)
                yield path, file
        if frames != record.frames:
            raise record.damaged(f"it records {record.frames} frames, but the files hold {frames}")


def _count(record: Record) -> int:
    count = record.layout.get("files")
    # No file is empty, so there can't be more files than frames.
    if not is_count(count) or count > record.frames:
        raise record.damaged(f"files must be the number of files, but it is {reprlib.repr(count)}")
    return count


def _checked(rows: TensorDictBase, entries: Sequence[Entry]) -> TensorDictBase:
    check_alike(list(entries), rows)
    return rows


def _reading(path: Path) -> AbstractContextManager[None]:
    """Reports errors of a format within the context as a damaged file."""
    return reading(path, Exception)
