"""Datasets on disk, of any format, read back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from typing import Any, overload

from tensordict import TensorDictBase

from trawl.data.sinks.record import read_record


@overload
def load(directory: str | os.PathLike[str]) -> TensorDictBase: ...


@overload
def load(directory: str | os.PathLike[str], batch_size: None) -> TensorDictBase: ...


@overload
def load(directory: str | os.PathLike[str], batch_size: int) -> Iterator[TensorDictBase]: ...


def load(
    directory: str | os.PathLike[str], batch_size: int | None = None
) -> TensorDictBase | Iterator[TensorDictBase]:
    """The frames of a dataset, whatever its format: as they were collected.

    A dataset can be read while it is written, and after its process was killed: what was
    committed is there. It may come from a stranger: reading it runs none of its code, and neither
    writes nor opens files outside it.

    Args:
        directory: the dataset.
        batch_size: frames to read at a time, the last time less. None: all of them.

    Returns:
        A TensorDict of shape ``(frames,)``, or an iterator of TensorDicts ``(batch_size,)``.
        Frames that follow each other in time lie side by side, in pieces;
        ``("collector", "traj_ids")`` says what trajectory each belongs to. The format
        ``memmap`` is memory-mapped, copy-on-write: nothing is read until it is used, and what you
        change in it changes in memory only. Of the others all frames asked for come into memory.
        Those of ``minari`` come episode by episode.

    Raises:
        FileNotFoundError: if there is no dataset, or nothing was committed to it.
        ValueError: if it is damaged or of a later version, or ``batch_size`` is not positive. With
            ``batch_size`` what is damaged may be found as late as it is read.
        ImportError: if the library that reads the format is missing.

    Example:
        >>> import os, tempfile
        >>> from trawl import Collector
        >>> from trawl.data import MemmapSink, load
        >>> directory = os.path.join(tempfile.mkdtemp(), "cartpole")
        >>> sink = MemmapSink(directory)
        >>> with Collector("CartPole-v1", frames_per_batch=50, total_frames=200, sink=sink) as c:
        ...     for batch in c:
        ...         pass
        >>> load(directory).shape
        torch.Size([200])
        >>> print(*(len(batch) for batch in load(directory, batch_size=90)))
        90 90 20
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, or None for all, but it is {batch_size}")
    record = read_record(directory)
    if not record.frames:
        raise FileNotFoundError(f"{directory} has no frames: nothing was committed to it")
    reader = import_module(f"trawl.data.sinks.{record.format}")
    found: TensorDictBase | Iterator[TensorDictBase] = (
        reader.read(record) if batch_size is None else reader.batches(record, batch_size)
    )
    return found


def info(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """How a dataset was made.

    Args:
        directory: the dataset.

    Returns:
        Its ``format``, the format's ``version``, ``frames``, ``complete``, and what the sink was
        given.

    Raises:
        FileNotFoundError: if there is no dataset.
        ValueError: if it is one of a later version, or its ``_dataset.json`` is damaged.
    """
    return read_record(directory).facts()
