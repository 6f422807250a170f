"""The format ``memmap``: a memory-mapped TensorDict, with a file for each entry."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import reprlib
import shutil
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.data.sinks.base import Sink
from trawl.data.sinks.entries import Entry
from trawl.data.sinks.files import damaged, is_inside, open_frames, sync, sync_tree
from trawl.data.sinks.record import FRAMES, Record
from trawl.keys import Key, nested, show_key


class MemmapSink(Sink):
    """Writes a memory-mapped TensorDict of any size and any dtype, which is fast to write and read.

    After the sink is closed, ``TensorDict.load_memmap`` can read the dataset's ``frames/``.
    :meth:`write` commits each batch, and waits a few milliseconds for the disk. Therefore, use
    batches of at least a few hundred frames. This format can't hold text.

    Args:
        directory: path of the dataset. Without ``resume``, this path must not exist. Missing
            parent directories are created.
        info: facts about the dataset, which are stored in its ``_dataset.json``.
        resume: True to continue a dataset of this format. If no dataset exists, the sink begins a
            new one.

    Raises:
        FileExistsError: if ``directory`` exists, unless ``resume`` is True and the directory is a
            dataset.
        OSError: if the directory can't be written.

    Examples:
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
        self._files: list[str | None] = []
        self._open: dict[Key, int] = {}
        super().__init__(directory, info, resume=resume)

    @override
    def _begin(self, entries: list[Entry]) -> None:
        for entry in entries:
            if entry.dtype is None:
                raise TypeError(
                    f"the format memmap can't hold text, but entry {show_key(entry.key)} is "
                    "text: use the format parquet"
                )
        if not any(entry.row for entry in entries):
            raise ValueError("all entries of the frames are empty, so there is nothing to write")
        # A failed attempt may have left files.
        self._release()
        shutil.rmtree(self._frames_at, ignore_errors=True)
        laid_out = _lay_out(self._frames_at, entries, 1)
        paths = [Path(laid_out.get(entry.key).filename) for entry in entries]
        self._files = [
            path.relative_to(self._frames_at).as_posix() if entry.row else None
            for path, entry in zip(paths, entries, strict=True)
        ]
        for entry, name in zip(entries, self._files, strict=True):
            if name is not None:  # an empty entry has no file
                if not is_inside(name):
                    raise ValueError(
                        f"entry {show_key(entry.key)} has a name that can't be a file name"
                    )
                self._open[entry.key] = open_frames(self._frames_at, name, os.O_WRONLY)
        sync_tree(self._frames_at)

    @override
    def _append(self, rows: TensorDictBase) -> None:
        for entry in self._entries:
            # Writes right after the committed frames. Bytes that a failed call has left there are
            # overwritten, or cut off when the sink is closed.
            if entry.row:
                _write(self._open[entry.key], rows.get(entry.key), self.frames * entry.row)
        sync(self._open.values())
        self._commit(self.frames + len(rows))

    @override
    def _flush(self, everything: bool) -> None:
        """Does nothing, because each batch is committed as it is written."""

    @property
    @override
    def waiting(self) -> int:
        return 0

    @override
    def _finish(self) -> None:
        for entry in self._entries:
            if entry.row:
                os.ftruncate(self._open[entry.key], self.frames * entry.row)
        # TensorDict's own JSON files come from a dataset that has the final size and no content.
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
        return {"files": self._files}

    @override
    def _restore(self, record: Record) -> None:
        self._files = _files(record)
        for entry, name in zip(record.entries, self._files, strict=True):
            if name is not None:
                file = _open_entry(self._place, name, entry, record.frames, os.O_WRONLY)
                self._open[entry.key] = file

    @override
    @classmethod
    def read(cls, record: Record) -> TensorDictBase:
        tensors = {
            entry.key: _map(record.directory, name, entry, record.frames)
            for entry, name in zip(record.entries, _files(record), strict=True)
        }
        # TensorDict's own JSON files are only up to date after a sink was closed.
        result: TensorDictBase = TensorDict(nested(tensors), [record.frames], device="cpu")
        return result.lock_()


def _files(record: Record) -> list[str | None]:
    """Returns the file of each entry, relative to ``frames/``; None for an empty entry.

    Raises:
        ValueError: if the record does not name a separate file inside ``frames/`` for each entry,
            or if an entry is text.
    """
    names = record.layout.get("files")
    if not isinstance(names, list) or len(names) != len(record.entries):
        raise record.damaged(
            f"files must be a list with one file for each entry, but it is {reprlib.repr(names)}"
        )
    files: list[str | None] = []
    for entry, name in zip(record.entries, names, strict=True):
        if entry.dtype is None:
            raise record.damaged(
                f"the format memmap can't hold text, but {show_key(entry.key)} is text"
            )
        if not entry.row:
            files.append(None)
            continue
        if not isinstance(name, str) or not is_inside(name):
            raise record.damaged(f"{reprlib.repr(name)} is not a file in its {FRAMES}/")
        files.append(name)
    there = [name for name in files if name is not None]
    if len(set(there)) < len(there):
        raise record.damaged("two entries have the same file")
    return files


def _open_entry(directory: Path, name: str, entry: Entry, frames: int, flags: int) -> int:
    """Opens the file of an entry, and checks that the file holds all frames."""
    file = open_frames(directory, f"{FRAMES}/{name}", flags)
    found, needed = os.fstat(file).st_size, frames * entry.row
    if found < needed:
        os.close(file)
        # Reading beyond the end of a mapped file would kill the process, and writing there would
        # leave a hole of zeros.
        raise damaged(directory / FRAMES / name, f"it has {found} bytes, but {needed} were written")
    return file


def _map(directory: Path, name: str | None, entry: Entry, frames: int) -> Tensor:
    shape = torch.Size((frames, *entry.shape))
    if name is None:
        return torch.empty(shape, dtype=entry.dtype)
    file = _open_entry(directory, name, entry, frames, os.O_RDONLY)
    try:
        memory = map_private(file, frames * entry.row)
    finally:
        os.close(file)
    assert entry.dtype is not None
    return torch.frombuffer(memory, dtype=entry.dtype).view(shape)


def _lay_out(path: Path, entries: list[Entry], frames: int) -> TensorDictBase:
    """Returns a new memory-mapped TensorDict, whose files have no content yet."""
    rows = {entry.key: torch.zeros((1, *entry.shape), dtype=entry.dtype) for entry in entries}
    template = TensorDict(nested(rows), [1])
    try:
        laid_out: TensorDictBase = template.expand(frames).memmap_like(str(path))
    except RuntimeError as error:
        # If the disk is full, torch raises a RuntimeError that ends with the error's number.
        number = re.search(r"\((\d+)\)$", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    return laid_out


def _write(file: int, rows: Tensor, offset: int) -> None:
    # Writes bytes, because numpy does not have all of torch's dtypes.
    flat = rows.detach().cpu().contiguous().reshape(-1)
    left = memoryview(flat.view(torch.uint8).numpy().data)
    while left:
        count = os.pwrite(file, left, offset)
        left, offset = left[count:], offset + count


# Python has defined this flag since 3.13; 0x4000 is its value on x86-64 and ARM. Without the flag,
# the kernel reserves memory for changes to all pages, and refuses to map files larger than memory.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def map_private(file: int, nbytes: int) -> Any:
    """Maps the beginning of a file copy-on-write: changes in memory do not reach the file.

    Unlike ``mmap.mmap`` before Python 3.13, this function keeps no descriptor open, because a
    process can have only a limited number of descriptors.

    Args:
        file: descriptor of the file, which the caller may close afterwards.
        nbytes: number of bytes to map, more than 0 and at most the size of the file.

    Returns:
        A writable buffer, which is unmapped when nothing refers to it any more.

    Raises:
        OSError: if the file can't be mapped.
    """
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NO_RESERVE
    address = _libc.mmap(None, nbytes, protection, flags, file, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    # Keeps the mapping at exit, because tensors may still be read then.
    weakref.finalize(buffer, _libc.munmap, address, nbytes).atexit = False
    return buffer
