"""Parquet files, one after the other: a row for each frame."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from trawl.data.sinks.base import Sink
from trawl.data.sinks.entries import Entry, from_numbers, to_numbers
from trawl.data.sinks.record import FRAMES, LAYOUT, VERSION
from trawl.keys import nested, show_key


class ParquetSink(Sink):
    """Writes Parquet files, which pandas, Polars, DuckDB and Hugging Face's datasets read.

    A frame is a row. ``("next", "reward")`` is the column ``next.reward``; an entry of a single
    number is a column of numbers, any other a column of lists of a fixed length. The schema's
    metadata (``trawl``) tells keys, dtypes and shapes, so that frames are read back as they were.
    It needs ``pip install 'trawl-rl[parquet]'``.

    A file is written, and so a commit made, when ``commit_bytes`` or ``commit_seconds`` are
    reached: the frames since the last one are held in memory until then.

    Args:
        directory: where the dataset goes. It must not exist; its parents are made.
        info: how it is made, for ``dataset.json``.
        resume: whether to go on with a dataset that is there.
        commit_bytes: bytes of frames after which a file is written.
        commit_seconds: seconds after which a file is written with the next batch.

    Raises:
        ImportError: if pyarrow is missing.
        ValueError: if ``commit_bytes`` or ``commit_seconds`` is negative.
        FileExistsError: if there is something at ``directory``.
        OSError: if it can't be written there.

    Example:
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
        self._files = 0
        self._committed_at = time.monotonic()
        super().__init__(directory, info, resume=resume)

    @override
    def _begin(self, entries: list[Entry]) -> None:
        _check_columns(entries)
        self._frames_at.mkdir(exist_ok=True)

    @override
    def _append(self, rows: TensorDictBase) -> None:
        # Of its own: the user may change the batch before it is written.
        waiting = [*self._waiting, rows.clone()]
        size = sum(map(len, waiting)) * sum(entry.row for entry in self._entries)
        late = time.monotonic() - self._committed_at >= self._commit_seconds
        if late or size >= self._commit_bytes:
            self._write_file(waiting)
        else:
            self._waiting = waiting

    @override
    def _flush(self, everything: bool) -> None:
        if self._waiting:
            self._write_file(self._waiting)

    def _write_file(self, parts: Sequence[TensorDictBase]) -> None:
        from pyarrow import parquet

        rows = torch.cat(list(parts))
        new = self._place / "unfinished.parquet"
        with open(new, "wb") as file:
            # Measured: quicker than the defaults, and smaller for floats.
            table = to_table(rows, self._entries)
            parquet.write_table(table, file, compression="zstd", use_dictionary=False)
        # A file of this number may be there already: of a commit that came to nothing.
        os.replace(new, self._frames_at / _name(self._files))
        self._files += 1
        try:
            self._commit(self.frames + len(rows))
        except BaseException:
            self._files -= 1
            raise
        self._waiting, self._committed_at = [], time.monotonic()

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
    def _restore(self, layout: dict[str, Any]) -> None:
        self._files = layout["files"]
        self._drop_uncommitted()

    def _drop_uncommitted(self) -> None:
        (self._place / "unfinished.parquet").unlink(missing_ok=True)
        (self._frames_at / _name(self._files)).unlink(missing_ok=True)


def read(directory: Path, record: Mapping[str, Any]) -> TensorDictBase:
    """The frames of a dataset, in memory, of shape ``(frames,)``."""
    entries = _entries(record)
    return from_table(_dataset(directory, record).to_table(), entries)


def batches(directory: Path, record: Mapping[str, Any], size: int) -> Iterator[TensorDictBase]:
    """The frames of a dataset, so many at a time."""
    pa = _import_pyarrow()
    entries = _entries(record)
    parts: list[Any] = []
    for part in _dataset(directory, record).to_batches(batch_size=size, batch_readahead=2):
        parts.append(pa.Table.from_batches([part]))
        # What is read ends with a file, whatever its size.
        while sum(map(len, parts)) >= size:
            table = pa.concat_tables(parts)
            yield from_table(table[:size], entries)
            parts = [table[size:]]
    if sum(map(len, parts)):
        yield from_table(pa.concat_tables(parts), entries)


def to_table(rows: TensorDictBase, entries: Sequence[Entry]) -> Any:
    """Frames as a pyarrow table."""
    pa = _import_pyarrow()
    columns, fields = [], []
    for entry in entries:
        if not entry.size:
            continue  # Parquet has no empty lists of a fixed length; the metadata tell of it
        numbers = to_numbers(rows.get(entry.key))
        values = pa.array(numbers.reshape(-1))
        if numbers.shape[1] > 1:
            values = pa.FixedSizeListArray.from_arrays(values, numbers.shape[1])
        columns.append(values)
        facts = entry.to_json()
        about = {"shape": json.dumps(facts["shape"]), "dtype": facts["dtype"]}
        fields.append(pa.field(entry.column, values.type, metadata=about))
    facts = {"version": VERSION, "entries": [entry.to_json() for entry in entries]}
    schema = pa.schema(fields, metadata={"trawl": json.dumps(facts)})
    return pa.Table.from_arrays(columns, schema=schema)


def from_table(table: Any, entries: Sequence[Entry]) -> TensorDictBase:
    """The inverse of :func:`to_table`."""
    tensors = {}
    for entry in entries:
        if not entry.size:
            tensors[entry.key] = torch.empty((len(table), *entry.shape), dtype=entry.dtype)
            continue
        values = table[entry.column].combine_chunks()
        if hasattr(values, "flatten") and hasattr(values.type, "list_size"):
            values = values.flatten()
        numbers = values.to_numpy(zero_copy_only=False)
        tensors[entry.key] = from_numbers(entry, numbers.reshape(len(table), -1))
    return TensorDict(nested(tensors), [len(table)])


def _dataset(directory: Path, record: Mapping[str, Any]) -> Any:
    _import_pyarrow()
    from pyarrow import dataset

    count = record[LAYOUT]["files"]
    files = [str(directory / FRAMES / _name(number)) for number in range(count)]
    return dataset.dataset(files, format="parquet")


def _entries(record: Mapping[str, Any]) -> list[Entry]:
    return [Entry.from_json(facts) for facts in record[LAYOUT]["entries"]]


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
        raise ValueError("frames whose entries are all empty can't be rows of a table")


def _import_pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(
            "Parquet datasets need pyarrow: pip install 'trawl-rl[parquet]'", name="pyarrow"
        ) from error
    return pyarrow
