"""Functions that read datasets of any format from disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, overload

from tensordict import TensorDictBase

from trawl.data.sinks.record import FORMATS, read_record


@overload
def load(directory: str | os.PathLike[str]) -> TensorDictBase: ...


@overload
def load(directory: str | os.PathLike[str], batch_size: None) -> TensorDictBase: ...


@overload
def load(directory: str | os.PathLike[str], batch_size: int) -> Iterator[TensorDictBase]: ...


def load(
    directory: str | os.PathLike[str], batch_size: int | None = None
) -> TensorDictBase | Iterator[TensorDictBase]:
    """Returns the frames of a dataset of any format.

    You can read a dataset while it is being written, and after the process that wrote it was
    killed. In both cases, you get all committed frames. You can also read a dataset that you don't
    trust: reading it runs no code from the dataset, and neither opens nor writes files outside the
    dataset's directory.

    Args:
        directory: path of the dataset.
        batch_size: number of frames to read at a time; the last batch may have fewer. None reads
            all frames at once.

    Returns:
        A TensorDict of shape ``(frames,)`` or, with ``batch_size``, an iterator over TensorDicts
        of shape ``(batch_size,)``. The frames are in the order in which they were written: batch by
        batch and, within a batch, environment by environment. With the format ``minari``, they are
        ordered by episode instead. ``("collector", "traj_ids")`` is the id of the trajectory that
        a frame belongs to. With the format ``memmap``, the frames are memory-mapped copy-on-write:
        they are read from disk when you access them, and your changes stay in memory. With the
        other formats, all requested frames are read into memory.

    Raises:
        FileNotFoundError: if the dataset does not exist, or has no committed frames.
        ValueError: if the dataset is damaged, its format or version is unknown, or ``batch_size``
            is not positive. With ``batch_size``, damage may be reported only when the damaged
            part is read.
        ImportError: if the library that reads the format is not installed.

    Examples:
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
        raise ValueError(
            f"batch_size must be at least 1, or None for all frames, but it is {batch_size}"
        )
    record = read_record(directory)
    if not record.frames:
        raise FileNotFoundError(f"{directory} has no frames: nothing was committed to it")
    kind = FORMATS[record.format]
    found: TensorDictBase | Iterator[TensorDictBase] = (
        kind.read(record) if batch_size is None else kind.batches(record, batch_size)
    )
    return found


def info(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the facts that are recorded about a dataset.

    Args:
        directory: path of the dataset.

    Returns:
        The dataset's ``format``, the format's ``version``, the number of ``frames``, ``complete``
        (False while the dataset is being written, or if writing was cut short), and all entries
        of the sink's ``info``.

    Raises:
        FileNotFoundError: if the dataset does not exist.
        ValueError: if the dataset's format or version is unknown, or its ``_dataset.json`` is
            damaged.
    """
    return read_record(directory).facts()
