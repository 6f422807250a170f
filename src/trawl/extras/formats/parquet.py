"""The format ``parquet``: Parquet files, with a row for each frame."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import torch
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from trawl.data.sinks.entries import (
    Entry,
    from_numbers,
    from_texts,
    to_numbers,
    to_texts,
)
from trawl.data.sinks.parts import FilesSink
from trawl.data.sinks.record import VERSION
from trawl.keys import Key, nested, show_key

# In measurements with these options, writing was faster than with the defaults, and files of floats
# were smaller. The checksums detect damage.
_WRITING: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": False,
    "write_page_checksum": True,
}


class ParquetSink(FilesSink):
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
        super().__init__(
            directory,
            info,
            resume=resume,
            commit_bytes=commit_bytes,
            commit_seconds=commit_seconds,
        )

    @override
    def check_entries(self, entries: Sequence[Entry]) -> None:
        _check_columns(entries)

    @override
    @classmethod
    def write_file(cls, file: IO[bytes], rows: TensorDictBase, entries: Sequence[Entry]) -> None:
        from pyarrow import parquet

        parquet.write_table(to_table(rows, entries), file, **_WRITING)

    @override
    @classmethod
    def read_file(cls, file: IO[bytes], entries: Sequence[Entry]) -> TensorDictBase:
        return from_table(_opened(file).read(), entries)

    @override
    @classmethod
    def count_frames(cls, file: IO[bytes], entries: Sequence[Entry]) -> int:
        opened = _opened(file)
        _check_schema(opened.schema_arrow, entries)
        return int(opened.metadata.num_rows)

    @override
    @classmethod
    def read_parts(
        cls, file: IO[bytes], entries: Sequence[Entry], size: int
    ) -> Iterator[TensorDictBase]:
        pa = _import_pyarrow()
        for part in _opened(file).iter_batches(batch_size=size):
            yield from_table(pa.Table.from_batches([part]), entries)


def _opened(file: IO[bytes]) -> Any:
    _import_pyarrow()
    from pyarrow import parquet

    return parquet.ParquetFile(file, page_checksum_verification=True)


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
