"""The format ``parquet``: Parquet files, with a row for each frame."""

from __future__ import annotations

import json
import os
import reprlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from trawl.data.sinks.base import Sink
from trawl.data.sinks.entries import (
    Entry,
    bytes_of,
    from_numbers,
    from_texts,
    is_count,
    rechunk,
    to_numbers,
    to_texts,
)
from trawl.data.sinks.files import create, open_frames, reading, sync
from trawl.data.sinks.record import FRAMES, VERSION, Record
from trawl.keys import Key, nested, show_key

# Readers of Parquet folders skip names that begin with a dot.
_UNFINISHED = ".unfinished.parquet"
# In measurements with these options, writing was faster than with the defaults, and files of floats
# were smaller. The checksums detect damage.
_WRITING: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": False,
    "write_page_checksum": True,
}


class ParquetSink(Sink):
    """Writes Parquet files, which pandas, Polars, DuckDB and Hugging Face's datasets can read.

    Each frame is a row. The entry ``("next", "reward")`` is in the column ``next.reward``. A column
    holds numbers if its entry is a single number, strings if the entry is text, and otherwise lists
    of a fixed length. The schema's metadata, under the key ``trawl``, holds keys, dtypes and
    shapes, so that other programs can restore the frames. To install the required packages, run
    ``pip install 'trawl-rl[parquet]'``.

    Frames are held in memory until ``commit_bytes`` or ``commit_seconds`` is reached. They are then
    written to a new file and committed.

    Args:
        directory: path of the dataset. Without ``resume``, this path must not exist. Missing
            parent directories are created.
        info: facts about the dataset, which are stored in its ``_dataset.json``.
        resume: True to continue a dataset of this format. If no dataset exists, the sink begins a
            new one.
        commit_bytes: size of the frames in memory, in bytes, at which a file is written.
        commit_seconds: time in seconds since the last commit after which the next batch triggers a
            new commit.

    Raises:
        ImportError: if pyarrow is not installed.
        ValueError: if ``commit_bytes`` or ``commit_seconds`` is negative.
        FileExistsError: if ``directory`` exists, unless ``resume`` is True and the directory is a
            dataset.
        OSError: if the directory can't be written.

    Examples:
        >>> import os, tempfile
        >>> from trawl import Collector
        >>> from trawl.data import ParquetSink, load
        >>> directory = os.path.join(tempfile.mkdtemp(), "cartpole")
        >>> with (
        ...     Collector("CartPole-v1", frames_per_batch=50, total_frames=200) as collector,
        ...     ParquetSink(directory) as sink,
        ... ):
        ...     for batch in collector:
        ...         sink.write(batch)
        >>> load(directory).shape, os.listdir(os.path.join(directory, "frames"))
        (torch.Size([200]), ['00000000.parquet'])
    """

    format = "parquet"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        info: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
        commit_bytes: int = 16 << 20,
        commit_seconds: float = 10.0,
    ) -> None:
        _import_pyarrow()
        for name, value in (("commit_bytes", commit_bytes), ("commit_seconds", commit_seconds)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, but it is {value!r}")
        self._commit_bytes, self._commit_seconds = commit_bytes, commit_seconds
        self._waiting: list[TensorDictBase] = []
        self._bytes = 0  # of the waiting frames
        self._files = 0
        self._committed_at = time.monotonic()
        super().__init__(directory, info, resume=resume)

    @override
    def _begin(self, entries: list[Entry]) -> None:
        _check_columns(entries)
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
        from pyarrow import parquet

        rows = torch.cat(list(parts))
        new = self._place / _UNFINISHED
        table = to_table(rows, self._entries)
        with open(create(new), "wb") as file:
            parquet.write_table(table, file, **_WRITING)
            file.flush()
            os.fsync(file.fileno())
        # This may replace a file that a failed commit has left.
        os.replace(new, self._frames_at / _name(self._files))
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
        for _ in _files(record):
            pass
        self._files = _count(record)
        self._drop_uncommitted()

    def _drop_uncommitted(self) -> None:
        (self._place / _UNFINISHED).unlink(missing_ok=True)
        # There may be several, if the sink has gone back to an earlier commit.
        for name in os.listdir(self._frames_at):
            number, _, kind = name.partition(".")
            if kind == "parquet" and number.isdecimal() and int(number) >= self._files:
                (self._frames_at / name).unlink()


def read(record: Record) -> TensorDictBase:
    """Returns the frames of a dataset, in memory, of shape ``(frames,)``."""
    pa = _import_pyarrow()
    tables = []
    for path, file in _files(record):
        with _reading(path):
            tables.append(file.read())
    with _reading(record.directory / FRAMES):
        return from_table(pa.concat_tables(tables), record.entries)


def batches(record: Record, size: int) -> Iterator[TensorDictBase]:
    """Yields the frames of a dataset, ``size`` at a time."""
    return rechunk(_parts(record, size), size)


def _parts(record: Record, size: int) -> Iterator[TensorDictBase]:
    """Yields the frames of each file, at most ``size`` at a time."""
    pa = _import_pyarrow()
    for path, file in _files(record):
        parts = file.iter_batches(batch_size=size)
        while True:
            with _reading(path):
                part = next(parts, None)
                if part is None:
                    break
                rows = from_table(pa.Table.from_batches([part]), record.entries)
            yield rows


def _files(record: Record) -> Iterator[tuple[Path, Any]]:
    """Yields the path and the opened file of each Parquet file, in order.

    Raises:
        ValueError: if a file is missing or damaged, or lacks a column of the record; also, after
            the last file, if the number of frames differs from the record.
    """
    _import_pyarrow()
    from pyarrow import parquet

    frames = 0
    for number in range(_count(record)):
        name = f"{FRAMES}/{_name(number)}"
        path = record.directory / name
        with open(open_frames(record.directory, name), "rb") as opened:
            with _reading(path):
                file = parquet.ParquetFile(opened, page_checksum_verification=True)
                _check_schema(file.schema_arrow, record.entries)
                frames += file.metadata.num_rows
            yield path, file
    if frames != record.frames:
        raise record.damaged(f"it records {record.frames} frames, but the files hold {frames}")


def _check_schema(schema: Any, entries: Sequence[Entry]) -> None:
    """Checks that a file has a column of the right type for each entry."""
    for entry in entries:
        if not entry.size:
            continue
        if schema.names.count(entry.column) != 1:
            raise ValueError(f"it lacks the column {entry.column!r}")
        found, count = schema.field(entry.column).type, 1
        if hasattr(found, "list_size"):
            found, count = found.value_type, found.list_size
        if (found, count) != _arrow_type(entry):
            raise ValueError(
                f"the column {entry.column!r} does not hold {entry.kind} of shape {entry.shape}"
            )


def _arrow_type(entry: Entry) -> tuple[Any, int]:
    """Returns the type of an entry's values in a table, and the number of values in a row."""
    pa = _import_pyarrow()
    if entry.dtype is None:
        return pa.string(), 1
    sample = to_numbers(torch.zeros(1, dtype=entry.dtype))
    return pa.from_numpy_dtype(sample.dtype), entry.size * sample.size


def _count(record: Record) -> int:
    count = record.layout.get("files")
    # No file is empty, so there can't be more files than frames.
    if not is_count(count) or count > record.frames:
        raise record.damaged(f"files must be the number of files, but it is {reprlib.repr(count)}")
    return count


def _reading(path: Path) -> AbstractContextManager[None]:
    """Reports errors of pyarrow within the context as a damaged file."""
    return reading(path, OSError, MemoryError, ValueError, _import_pyarrow().ArrowException)


def to_table(rows: TensorDictBase, entries: Sequence[Entry]) -> Any:
    """Converts frames to a pyarrow table."""
    pa = _import_pyarrow()
    columns, fields = [], []
    for entry in entries:
        if not entry.size:
            continue  # Parquet has no fixed-length lists of length 0; the metadata lists the entry
        values = _column(rows.get(entry.key), entry)
        columns.append(values)
        facts = entry.to_json()
        about = {"shape": json.dumps(facts["shape"]), "dtype": facts["dtype"]}
        fields.append(pa.field(entry.column, values.type, metadata=about))
    facts = {"version": VERSION, "entries": [entry.to_json() for entry in entries]}
    schema = pa.schema(fields, metadata={"trawl": json.dumps(facts)})
    return pa.Table.from_arrays(columns, schema=schema)


def _column(value: Any, entry: Entry) -> Any:
    pa = _import_pyarrow()
    if entry.dtype is None:
        return pa.array(to_texts(value), pa.string())
    numbers = to_numbers(value)
    values = pa.array(numbers.reshape(-1))
    if numbers.shape[1] > 1:
        values = pa.FixedSizeListArray.from_arrays(values, numbers.shape[1])
    return values


def from_table(table: Any, entries: Sequence[Entry]) -> TensorDictBase:
    """Converts a pyarrow table from :func:`to_table` back to frames.

    Raises:
        ValueError: if a value is missing.
    """
    found: dict[Key, Any] = {}
    for entry in entries:
        if not entry.size:
            found[entry.key] = torch.empty((len(table), *entry.shape), dtype=entry.dtype)
            continue
        values = table[entry.column].combine_chunks()
        if values.null_count:
            raise ValueError(f"the column {entry.column!r} has missing values")
        if entry.dtype is None:
            found[entry.key] = from_texts(values.to_pylist())
            continue
        if hasattr(values.type, "list_size"):
            values = values.flatten()
            if values.null_count:
                raise ValueError(f"the column {entry.column!r} has missing values")
        numbers = values.to_numpy(zero_copy_only=False)
        found[entry.key] = from_numbers(entry, numbers.reshape(len(table), -1))
    return TensorDict(nested(found), [len(table)])


def _name(number: int) -> str:
    return f"{number:08d}.parquet"


def _check_columns(entries: Sequence[Entry]) -> None:
    columns: dict[str, Entry] = {}
    for entry in entries:
        other = columns.setdefault(entry.column, entry)
        if other is not entry:
            raise ValueError(
                f"entries {show_key(other.key)} and {show_key(entry.key)} would both be the "
                f"column {entry.column!r}: rename one of them"
            )
    if not any(entry.size for entry in entries):
        raise ValueError("all entries of the frames are empty, so there is nothing to write")


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(
            "Parquet datasets need pyarrow: pip install 'trawl-rl[parquet]'", name="pyarrow"
        ) from error
    return pyarrow
