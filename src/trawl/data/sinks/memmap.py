"""Memory-mapped TensorDicts: a file for each entry, which frames are appended to."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import MemoryMappedTensor, TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.data.sinks.base import Sink
from trawl.data.sinks.entries import Entry
from trawl.data.sinks.record import FRAMES, LAYOUT
from trawl.keys import Key, nested


class MemmapSink(Sink):
    """Writes a memory-mapped TensorDict: quick to write and to read, of any size and any dtype.

    The dataset's ``frames/`` is what ``TensorDict.load_memmap`` reads once the sink was closed.
    Each batch is committed as it is written.

    Args:
        directory: where the dataset goes. It must not exist; its parents are made.
        info: how it is made, for ``dataset.json``.
        resume: whether to go on with a dataset that is there.

    Raises:
        FileExistsError: if there is something at ``directory``.
        OSError: if it can't be written there.

    Example:
        >>> import os, tempfile
        >>> from trawl import Collector
        >>> from trawl.data import MemmapSink, info, load
        >>> directory = os.path.join(tempfile.mkdtemp(), "cartpole")
        >>> with (
        ...     Collector("CartPole-v1", frames_per_batch=50, total_frames=200) as collector,
        ...     MemmapSink(directory, {"env": "CartPole-v1"}) as sink,
        ... ):
        ...     for batch in collector:
        ...         sink.write(batch)
        >>> load(directory).shape, info(directory)["complete"]
        (torch.Size([200]), True)
    """

    format = "memmap"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        info: Mapping[str, Any] | None = None,
        *,
        resume: bool = False,
    ) -> None:
        self._files: dict[Key, Path] = {}
        self._open: dict[Key, int] = {}
        super().__init__(directory, info, resume=resume)

    @override
    def _begin(self, entries: list[Entry]) -> None:
        # What an attempt before may have left.
        self._release()
        shutil.rmtree(self._frames_at, ignore_errors=True)
        laid_out = _lay_out(self._frames_at, entries, 1)
        self._files = {entry.key: Path(laid_out.get(entry.key).filename) for entry in entries}
        self._open_files(entries)

    def _open_files(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.row:  # of what is empty there is no file
                path = self._files[entry.key]
                self._open[entry.key] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    @override
    def _append(self, rows: TensorDictBase) -> None:
        for entry in self._entries:
            # At the place that the count of whole batches says: what a failed call has left
            # there is written over, or cut off in the end.
            if entry.row:
                _write(self._open[entry.key], rows.get(entry.key), self.frames * entry.row)
        self._commit(self.frames + len(rows))

    @override
    def _flush(self, everything: bool) -> None:
        """Nothing waits."""

    @property
    @override
    def waiting(self) -> int:
        return 0

    @override
    def _finish(self) -> None:
        for entry in self._entries:
            if entry.row:
                os.ftruncate(self._open[entry.key], self.frames * entry.row)
        # TensorDict lays out an empty dataset of this size, and says so in files of its own.
        layout = self._place / "layout"
        shutil.rmtree(layout, ignore_errors=True)
        _lay_out(layout, self._entries, self.frames)
        for path in layout.rglob("*.json"):
            os.replace(path, self._frames_at / path.relative_to(layout))
        shutil.rmtree(layout)

    @override
    def _release(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    @override
    def _layout(self) -> dict[str, Any]:
        paths = [self._files.get(entry.key) for entry in self._entries]
        files = [path and path.relative_to(self._frames_at).as_posix() for path in paths]
        return {"files": files}

    @override
    def _restore(self, layout: dict[str, Any]) -> None:
        pairs = zip(self._entries, layout["files"], strict=True)
        self._files = {entry.key: self._frames_at / file for entry, file in pairs}
        self._open_files(self._entries)


def read(directory: Path, record: Mapping[str, Any]) -> TensorDictBase:
    """The frames of a dataset, memory-mapped, of shape ``(frames,)``."""
    layout, frames = record[LAYOUT], record["frames"]
    entries = [Entry.from_json(facts) for facts in layout["entries"]]
    tensors = {
        entry.key: _map(directory / FRAMES / file, entry, frames)
        for entry, file in zip(entries, layout["files"], strict=True)
    }
    # The files' own description is of the last time that a sink was closed.
    result: TensorDictBase = TensorDict(nested(tensors), [frames], device="cpu")
    return result.lock_()


def batches(directory: Path, record: Mapping[str, Any], size: int) -> Iterator[TensorDictBase]:
    """The frames of a dataset, so many at a time."""
    whole = read(directory, record)
    for start in range(0, len(whole), size):
        yield whole[start : start + size]


def _map(path: Path, entry: Entry, frames: int) -> Tensor:
    if not entry.row:
        return torch.empty((frames, *entry.shape), dtype=entry.dtype)
    found, needed = path.stat().st_size, frames * entry.row
    if found < needed:
        # To read beyond the end of a mapped file would kill the process.
        raise ValueError(f"{path} is damaged: it has {found} bytes, but {needed} were written")
    shape = torch.Size((frames, *entry.shape))
    mapped: Tensor = MemoryMappedTensor.from_filename(str(path), dtype=entry.dtype, shape=shape)
    return mapped


def _lay_out(path: Path, entries: list[Entry], frames: int) -> TensorDictBase:
    """The files of a memory-mapped TensorDict, without content."""
    rows = {entry.key: torch.zeros((1, *entry.shape), dtype=entry.dtype) for entry in entries}
    template = TensorDict(nested(rows), [1])
    try:
        laid_out: TensorDictBase = template.expand(frames).memmap_like(str(path))
    except RuntimeError as error:
        # What torch makes of a full disk: it tells the error's number in its message.
        number = re.search(r"\((\d+)\)$", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    return laid_out


def _write(file: int, rows: Tensor, offset: int) -> None:
    # As bytes, since numpy doesn't know all of torch's dtypes.
    flat = rows.detach().cpu().contiguous().reshape(-1)
    left = memoryview(flat.view(torch.uint8).numpy().data)
    while left:
        count = os.pwrite(file, left, offset)
        left, offset = left[count:], offset + count
