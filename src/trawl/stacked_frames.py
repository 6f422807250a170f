"""Tensor of stacked frames that stores each frame once, and expands when it is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self, override

from trawl.computed_tensor import ComputedTensor
from trawl.foreign.torch import PIN_MEMORY, TO_COPY, UNSAFE_VIEW, make_wrapper

aten: Any = torch.ops.aten

# Share of the frames that a copy must need to have them all, so that several copies share them.
_NEARLY_ALL = 0.8
# Sorting is faster than marking all frames, if there are so many times as many frames as positions.
_SPARSE = 32


class StackedFrames(ComputedTensor):
    """Tensor of stacked frames that stores each frame once.

    ``StackedFrames(frames, positions)`` equals ``frames[positions]``. ``frames`` has the shape
    ``(number of frames, *frame)``. ``positions`` are int64, and their last dimension is usually the
    stack. Operations on the dimensions of ``positions``, such as slices, masks, ``reshape``,
    ``stack`` and ``cat``, return ``StackedFrames``, and copy only frames that are needed, or none.
    Copies (``clone()``, ``to(device)``, pickles) also store each frame once. Any other operation
    is computed with the stacks, and returns an ordinary tensor.

    Several tensors may share their frames, so an operation in place, such as ``copy_``, raises an
    error: change what ``to_dense()`` returns.

    Attributes:
        stored: the frames and the positions.

    Examples:
        >>> import torch
        >>> from trawl.data import StackedFrames
        >>> frames = torch.arange(6).reshape(6, 1)
        >>> stacks = StackedFrames(frames, torch.tensor([[0, 1, 2], [1, 2, 3], [2, 3, 4]]))
        >>> stacks.shape
        torch.Size([3, 3, 1])
        >>> type(stacks[1:]).__name__
        'StackedFrames'
        >>> stacks[1].flatten() + 0.5
        tensor([1.5000, 2.5000, 3.5000])
    """

    stored: tuple[Tensor, Tensor]

    @staticmethod
    def __new__(cls, frames: Tensor, positions: Tensor) -> StackedFrames:
        """Returns the tensor, without a copy of the frames."""
        shape = (*positions.shape, *frames.shape[1:])
        made: StackedFrames = make_wrapper(cls, shape, dtype=frames.dtype, device=frames.device)
        made.stored = frames, positions
        return made

    @property
    def frames(self) -> Tensor:
        """All frames, of shape ``(number of frames, *frame)``, which other tensors may share."""
        return self.stored[0]

    @property
    def positions(self) -> Tensor:
        """Position in the frames of each frame of the stacks, int64."""
        return self.stored[1]

    @override
    def to_dense(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the stacks as an ordinary tensor, which shares no memory with this one."""
        frames, positions = self.stored
        return frames.index_select(0, positions.reshape(-1)).reshape(self.shape)

    def compact(self) -> StackedFrames:
        """Returns an equal tensor without the frames that no stack needs.

        If nearly all frames are needed, the result is ``self``.
        """
        frames, positions = self.stored
        # Compiled functions and meta tensors have no values to look at.
        if torch.compiler.is_compiling() or frames.is_meta:
            return self
        if _SPARSE * positions.numel() < len(frames):
            used, renumbered = torch.unique(positions, return_inverse=True)
            return StackedFrames(frames.index_select(0, used), renumbered)
        needed = torch.zeros(len(frames), dtype=torch.bool, device=frames.device)
        needed[positions.reshape(-1)] = True
        if needed.count_nonzero() > _NEARLY_ALL * len(frames):
            return self
        return StackedFrames(frames[needed], (needed.cumsum(0) - 1)[positions])

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Returns the names of the tensors that this one consists of, for ``torch.compile``."""
        return ["frames", "positions"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, _: Any, size: Any, stride: Any) -> StackedFrames:
        """Returns the tensor that consists of ``inner``, for ``torch.compile``."""
        return StackedFrames(inner["frames"], inner["positions"])

    @override
    def is_shared(self) -> bool:
        return all(one.is_shared() for one in self.stored)

    @override
    def share_memory_(self) -> Self:
        for one in self.stored:
            one.share_memory_()
        return self

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return StackedFrames, self.compact().stored

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"StackedFrames(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"frames={len(self.frames)})"
        )


# torch.load() takes them by default, which allows only classes that are named.
torch.serialization.add_safe_globals([StackedFrames])


def _dense(value: Any) -> Any:
    return value.to_dense() if isinstance(value, StackedFrames) else value


# --- operations on the positions. Each handler returns NotImplemented if the stacks are needed.


def _on_dim(op: Any) -> Callable[..., Any]:
    """Returns a handler of a view whose second argument is a dimension."""

    def handler(stacks: StackedFrames, dim: int = 0, *args: Any, **kwargs: Any) -> Any:
        lead = _leading(stacks, dim)
        if lead is None:
            return NotImplemented
        frames, positions = stacks.stored
        return _views(frames, op(positions, lead, *args, **kwargs))

    return handler


def _split(op: Any) -> Callable[..., Any]:
    def handler(stacks: StackedFrames, sizes: Any, dim: int = 0) -> Any:
        lead = _leading(stacks, dim)
        if lead is None:
            return NotImplemented
        frames, positions = stacks.stored
        return _views(frames, op(positions, sizes, lead))

    return handler


def _views(frames: Tensor, positions: Any) -> Any:
    """Returns stacks, or a list of stacks if ``positions`` are several tensors."""
    if isinstance(positions, Tensor):
        return StackedFrames(frames, positions)
    return [StackedFrames(frames, one) for one in positions]


def _leading(stacks: StackedFrames, dim: int, more: int = 0) -> int | None:
    """Returns a dimension as one of ``positions``; None if it is none of them, or out of range.

    Args:
        stacks: the stacks.
        dim: dimension of the stacks, which may be negative.
        more: number of dimensions that the operation adds.
    """
    dims = stacks.ndim + more
    lead = dim + dims if dim < 0 else dim
    return lead if 0 <= lead < stacks.positions.ndim + more else None


def _unsqueeze(stacks: StackedFrames, dim: int) -> Any:
    lead = _leading(stacks, dim, 1)
    frames, positions = stacks.stored
    return NotImplemented if lead is None else _views(frames, positions.unsqueeze(lead))


def _transpose(stacks: StackedFrames, one: int, other: int) -> Any:
    leads = _leading(stacks, one), _leading(stacks, other)
    if None in leads:
        return NotImplemented
    frames, positions = stacks.stored
    return _views(frames, aten.transpose.int(positions, *leads))


def _permute(stacks: StackedFrames, dims: Sequence[int]) -> Any:
    leads = stacks.positions.ndim
    order = [_leading(stacks, dim) for dim in dims[:leads]]
    kept = all(dims[dim] in (dim, dim - stacks.ndim) for dim in range(leads, len(dims)))
    if None in order or not kept or len(dims) != stacks.ndim:
        return NotImplemented
    frames, positions = stacks.stored
    return _views(frames, aten.permute.default(positions, order))


def _view(stacks: StackedFrames, shape: Sequence[int]) -> Any:
    frames, positions = stacks.stored
    frame = tuple(frames.shape[1:])
    leads = len(shape) - len(frame)
    lead = list(shape[:leads])
    if leads < 0 or tuple(shape[leads:]) != frame:
        return NotImplemented
    if -1 not in lead and math.prod(lead) != positions.numel():
        return NotImplemented
    return _views(frames, positions.reshape(lead))


def _at(stacks: StackedFrames, indices: Sequence[Tensor | None]) -> Any:
    if isinstance(stacks, StackedFrames):
        given = list(indices)
        while given and given[-1] is None:
            given.pop()
        masks = (torch.bool, torch.uint8)
        used = sum(1 if one is None or one.dtype not in masks else one.ndim for one in given)
        frames, positions = stacks.stored
        if used <= positions.ndim:
            found = aten.index.Tensor(positions, [_dense(one) for one in given])
            return StackedFrames(frames, found)
    return NotImplemented


def _select_many(stacks: StackedFrames, dim: int, chosen: Tensor) -> Any:
    lead = _leading(stacks, dim) if isinstance(stacks, StackedFrames) else None
    if lead is None:
        return NotImplemented
    frames, positions = stacks.stored
    return StackedFrames(frames, positions.index_select(lead, _dense(chosen)))


def _same(stacks: StackedFrames) -> Any:
    return StackedFrames(*stacks.stored)


def _clone(stacks: StackedFrames, memory_format: Any = None) -> Any:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        return NotImplemented
    small = stacks.compact()
    if small is not stacks:
        return small
    frames, positions = stacks.stored
    return StackedFrames(frames.clone(), positions.clone())


def _to_copy(stacks: StackedFrames, *, dtype: Any = None, device: Any = None, **more: Any) -> Any:
    if dtype not in (None, stacks.dtype) or device is None:
        return NotImplemented
    wait = {"non_blocking": more.get("non_blocking", False)}
    frames, positions = stacks.compact().stored
    return StackedFrames(frames.to(device, **wait), positions.to(device, **wait))


def _pinned(stacks: StackedFrames, *args: Any, **kwargs: Any) -> Any:
    frames, positions = stacks.compact().stored
    return StackedFrames(frames.pin_memory(), positions.pin_memory())


def _record_stream(stacks: StackedFrames, stream: Any) -> None:
    for one in stacks.stored:
        one.record_stream(stream)


def _join(join: Callable[..., Tensor]) -> Callable[..., Any]:
    """Returns a handler of ``stack`` or ``cat``."""

    def handler(parts: Sequence[Any], dim: int = 0) -> Any:
        first = parts[0]
        alike = all(
            isinstance(part, StackedFrames)
            and part.ndim == first.ndim
            and part.frames.shape[1:] == first.frames.shape[1:]
            and part.dtype == first.dtype
            and part.device == first.device
            for part in parts
        )
        if not alike:
            return NotImplemented
        lead = _leading(first, dim, 1 if join is torch.stack else 0)
        if lead is None:
            return NotImplemented
        frames, positions = _joined_frames(parts)
        return StackedFrames(frames, join(positions, lead))

    return handler


def _joined_frames(parts: Sequence[StackedFrames]) -> tuple[Tensor, list[Tensor]]:
    """Returns the frames of several tensors, and their positions for each tensor."""
    stored = [part.stored for part in parts]
    if all(frames is stored[0][0] for frames, _ in stored):
        return stored[0][0], [positions for _, positions in stored]
    places: dict[int, int] = {}
    together: list[Tensor] = []
    indices = []
    count = 0
    for frames, positions in (part.compact().stored for part in parts):
        if id(frames) not in places:
            places[id(frames)] = count
            together.append(frames)
            count += len(frames)
        indices.append(positions + places[id(frames)])
    return torch.cat(together), indices


def _like(name: str) -> tuple[Any, Callable[..., Any]]:
    """Returns an operation that needs only the layout of its first argument, and its handler."""
    op = getattr(aten, name).default
    return op, lambda stacks, *args, **kwargs: op(
        stacks.frames.new_empty(stacks.shape) if isinstance(stacks, StackedFrames) else stacks,
        *args,
        **kwargs,
    )


StackedFrames.handlers = {
    aten.select.int: _on_dim(aten.select.int),
    aten.slice.Tensor: _on_dim(aten.slice.Tensor),
    aten.unbind.int: _on_dim(aten.unbind.int),
    aten.squeeze.dim: _on_dim(aten.squeeze.dim),
    aten.split.Tensor: _split(aten.split.Tensor),
    aten.split_with_sizes.default: _split(aten.split_with_sizes.default),
    aten.unsqueeze.default: _unsqueeze,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
    aten.view.default: _view,
    UNSAFE_VIEW: _view,
    aten.index.Tensor: _at,
    aten.index_select.default: _select_many,
    aten.detach.default: _same,
    aten.detach_.default: lambda stacks: stacks,
    aten.alias.default: _same,
    aten.lift_fresh.default: _same,
    aten.clone.default: _clone,
    TO_COPY: _to_copy,
    PIN_MEMORY: _pinned,
    aten.record_stream.default: _record_stream,
    aten.stack.default: _join(torch.stack),
    aten.cat.default: _join(torch.cat),
    **dict(map(_like, ["empty_like", "zeros_like", "ones_like", "full_like", "rand_like"])),
    **dict(map(_like, ["new_empty", "new_zeros", "new_ones", "new_full"])),
}
