"""Datasets on disk: the frames of a collection as a memory-mapped TensorDict.

A dataset is a directory::

    DIR/
        frames/        what TensorDict.load_memmap reads: flat frames, in the order of collection
        dataset.json   how it was made

Frames are appended while collection goes on, a file for each entry, so that memory holds no more
than a batch. All of this happens in ``DIR.partial-…`` beside it, which takes its place, and its
name, when it is whole: a directory named DIR is never a half of something.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from trawl.keys import Key, as_key, show_key, show_keys

FRAMES, INFO, FORMAT = "frames", "dataset.json", 1
# What the last steps need on a disk that collection has filled up: two blocks for each file.
_RESERVE = 64 * 1024
_RESERVE_PER_ENTRY = 8 * 1024


class DatasetWriter:
    """Writes batches, as they come, into a dataset on disk.

    Leaving the ``with`` block finishes the dataset; an exception within finishes it too, marked
    as not complete, with the batches that were added before. Without any frame there is none.

    Args:
        directory: where the dataset goes. It must not exist; its parents are made.
        info: how it is made, for ``dataset.json``; may be added to until the end, as
            :attr:`info`. ``format``, ``frames`` and ``complete`` are the writer's own.

    Attributes:
        frames: number of frames written.
        info: what goes into ``dataset.json``.

    Raises:
        FileExistsError: if there is something at ``directory``.
        OSError: if it can't be written there.

    Example:
        >>> import os, tempfile
        >>> from trawl import Collector
        >>> from trawl.data import DatasetWriter, info, load
        >>> directory = os.path.join(tempfile.mkdtemp(), "cartpole")
        >>> with (
        ...     Collector("CartPole-v1", frames_per_batch=50, total_frames=200) as collector,
        ...     DatasetWriter(directory, {"env": "CartPole-v1"}) as writer,
        ... ):
        ...     for batch in collector:
        ...         writer.add(batch)
        >>> load(directory).shape, info(directory)["complete"]
        (torch.Size([200]), True)
    """

    def __init__(
        self, directory: str | os.PathLike[str], info: Mapping[str, Any] | None = None
    ) -> None:
        self.directory = Path(directory)
        self.info: dict[str, Any] = dict(info or {})
        self.frames = 0
        self._template: TensorDictBase | None = None
        self._entries: list[_Entry] = []
        self._targets: list[Path] | None = None
        self._closed = False
        check_free(self.directory)
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:  # a file, where a directory should be
            reason = os.strerror(errno.ENOTDIR)
            raise NotADirectoryError(errno.ENOTDIR, reason, error.filename) from None
        name = f"{self.directory.name}.partial-{secrets.token_hex(4)}"
        self._partial = self.directory.with_name(name)
        self._partial.mkdir()
        self._reserve = self._partial / "reserve"
        self._keep_room(_RESERVE)

    def add(self, batch: TensorDictBase) -> None:
        """Appends the frames of a batch of any shape, row by row.

        Rows that are no experience (masked out, or with trajectory id -1) are left out. A batch
        that can't be written whole is as if it had not been added.

        Raises:
            ValueError: if its entries are not those of the batches before.
            TypeError: if an entry is no tensor of a fixed shape.
            OSError: if it can't be written, as on a full disk.
        """
        rows = flat_frames(batch)
        if not len(rows):
            return
        if self._template is None:
            self._begin(rows)
        _check_alike(self._entries, rows)
        for entry in self._entries:
            # At the place that the count of whole batches says: what a failed call has left
            # there is written over, or cut off in the end.
            entry.write(rows.get(entry.key), self.frames)
        self.frames += len(rows)

    def _begin(self, rows: TensorDictBase) -> None:
        entries = [_Entry.of(as_key(key), value) for key, value in _leaves(rows)]
        self._keep_room(_RESERVE + _RESERVE_PER_ENTRY * len(entries))
        for number, entry in enumerate(entries):
            entry.open(self._partial / f"{number}.raw")
        self._entries, self._template = entries, rows[:1].clone()

    def finish(self, *, complete: bool = True, sync: bool = True) -> Path | None:
        """Makes what was added a dataset.

        May be called again after it was interrupted.

        Args:
            complete: whether all was collected that was meant to be.
            sync: whether to wait until the disk has it all, so that it outlasts a power cut.

        Returns:
            The dataset's directory; None if there are no frames, and so nothing.

        Raises:
            OSError: if that can't be done; what was written is left for another attempt.
        """
        if self._closed:
            return self.directory if self.frames else None
        if not self.frames:
            self.discard()
            return None
        for entry in self._entries:
            entry.close(self.frames)
        self._reserve.unlink(missing_ok=True)
        self._lay_out()
        facts = {"format": FORMAT, "frames": self.frames, "complete": complete}
        text = json.dumps({**facts, **self.info, **facts}, indent=2, allow_nan=False)
        (self._partial / INFO).write_text(text + "\n", encoding="utf-8")
        if sync:
            _sync(self._partial)
        check_free(self.directory)
        os.rename(self._partial, self.directory)
        self._closed = True
        if sync:
            _sync_path(self.directory.parent)
        return self.directory

    def _lay_out(self) -> None:
        """TensorDict lays out an empty dataset of this size; our files take its files' places."""
        frames = self._partial / FRAMES
        if self._targets is None:
            assert self._template is not None
            whole = self._template.expand(self.frames)
            try:
                laid_out = whole.memmap_like(str(frames))
            except RuntimeError as error:  # what torch makes of a full disk
                raise OSError(f"{frames} can't be written: {error}") from error
            self._targets = [Path(laid_out.get(entry.key).filename) for entry in self._entries]
        for entry, target in zip(self._entries, self._targets, strict=True):
            if entry.row and entry.path.exists():
                os.replace(entry.path, target)
            entry.path.unlink(missing_ok=True)

    def discard(self) -> None:
        """Removes what was written, and closes."""
        self._closed = True
        self.frames = 0
        for entry in self._entries:
            entry.close(0)
        shutil.rmtree(self._partial, ignore_errors=True)

    def _keep_room(self, size: int) -> None:
        try:
            # Zeros might take no room on a disk that compresses.
            self._reserve.write_bytes(secrets.token_bytes(size))
        except OSError:
            self.discard()
            raise

    @property
    def partial(self) -> Path:
        """Where the frames are until the dataset is finished."""
        return self._partial

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self.finish(complete=kind is None)


def load(directory: str | os.PathLike[str]) -> TensorDictBase:
    """The frames of a dataset, memory-mapped: nothing is read until it is used.

    Args:
        directory: the dataset.

    Returns:
        A TensorDict of shape ``(frames,)``. Frames that follow each other in time lie side by
        side, in pieces; ``("collector", "traj_ids")`` says what trajectory each belongs to.

    Raises:
        FileNotFoundError: if there is no dataset.
        ValueError: if it is one of a later format.
    """
    info(directory)
    frames: TensorDictBase = TensorDict.load_memmap(str(Path(directory) / FRAMES))
    return frames


def info(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """How a dataset was made.

    Args:
        directory: the dataset.

    Returns:
        The content of ``dataset.json``: ``frames``, ``complete``, and what the writer was given.

    Raises:
        FileNotFoundError: if there is no dataset.
        ValueError: if it is one of a later format, or its ``dataset.json`` is damaged.
    """
    path = Path(directory) / INFO
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{directory} is no dataset: it has no {INFO}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    found = facts.get("format") if isinstance(facts, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} has format {found!r}, but this version reads {FORMAT}")
    result: dict[str, Any] = facts
    return result


def check_free(directory: str | os.PathLike[str]) -> None:
    """Checks that there is nothing where a dataset is to go.

    Raises:
        FileExistsError: if there is something.
    """
    if os.path.lexists(directory):
        raise FileExistsError(f"{directory} exists already, and nothing is written over")


def flat_frames(batch: TensorDictBase) -> TensorDictBase:
    """The frames of a batch, one after the other, environment by environment.

    Args:
        batch: of any shape. Rows where ``("collector", "mask")`` is False or the trajectory id
            is -1 are no experience, and left out; the mask is too.

    Returns:
        A TensorDict of shape ``(frames,)``.
    """
    flat = batch.reshape(batch.batch_size.numel())
    mask, ids = flat.get(("collector", "mask"), None), flat.get(("collector", "traj_ids"), None)
    keep = torch.ones(len(flat), dtype=torch.bool)
    if mask is not None:
        keep &= mask.cpu()
        flat = flat.exclude(("collector", "mask"))
    if ids is not None:
        keep &= ids.cpu() >= 0
    return flat if keep.all() else flat[keep]


class _Entry:
    """One entry of the frames, and the file that it is written to."""

    def __init__(self, key: Key, dtype: torch.dtype, shape: torch.Size) -> None:
        self.key, self.dtype, self.shape = key, dtype, shape
        self.row = shape.numel() * dtype.itemsize
        self.path = Path()
        self._file: int | None = None

    @classmethod
    def of(cls, key: Key, value: Any) -> _Entry:
        if not isinstance(value, Tensor) or value.is_nested:
            raise TypeError(
                f"a dataset holds tensors of fixed shapes, but entry {show_key(key)} is "
                f"{'ragged' if isinstance(value, Tensor) else type(value).__name__}"
            )
        return cls(key, value.dtype, value.shape[1:])

    def open(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, rows: Tensor, at: int) -> None:
        assert self._file is not None
        # As bytes, since numpy doesn't know all of torch's dtypes.
        flat = rows.detach().cpu().contiguous().reshape(-1)
        left = memoryview(flat.view(torch.uint8).numpy().data)
        offset = at * self.row
        while left:
            count = os.pwrite(self._file, left, offset)
            left, offset = left[count:], offset + count

    def close(self, frames: int) -> None:
        """Cuts off what is not of these frames, and closes."""
        if self._file is None:
            return
        os.ftruncate(self._file, frames * self.row)
        os.close(self._file)
        self._file = None


def _leaves(rows: TensorDictBase) -> list[tuple[Any, Any]]:
    """All entries, non-tensor ones too."""
    return list(rows.items(True, True, is_leaf=_is_leaf))


def _is_leaf(kind: type) -> bool:
    return issubclass(kind, (NonTensorData, NonTensorStack)) or not issubclass(kind, TensorDictBase)


def _check_alike(entries: list[_Entry], rows: TensorDictBase) -> None:
    found = {as_key(key): value for key, value in _leaves(rows)}
    expected = {entry.key for entry in entries}
    if set(found) != expected:
        raise ValueError(
            f"batches must have the same entries, but this one lacks "
            f"{show_keys(expected - set(found))} and adds {show_keys(set(found) - expected)}"
        )
    for entry in entries:
        new = _Entry.of(entry.key, found[entry.key])
        if (new.dtype, new.shape) != (entry.dtype, entry.shape):
            raise ValueError(
                f"entry {show_key(entry.key)} was {entry.dtype} of shape {tuple(entry.shape)}, "
                f"but in this batch it is {new.dtype} of shape {tuple(new.shape)}"
            )


def _sync(directory: Path) -> None:
    for path in [*directory.rglob("*"), directory]:
        _sync_path(path)


def _sync_path(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
