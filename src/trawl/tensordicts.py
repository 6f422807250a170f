"""Functions that build, copy, compare and stack TensorDicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
    pad,
)
from torch import Tensor

from trawl.foreign.tensordict import new_tensordict
from trawl.keys import Key
from trawl.stacked_frames import StackedFrames


def tensordict_of(
    tree: Mapping[str, Any],
    entries: Mapping[Key, Any],
    batch_size: torch.Size,
    names: Sequence[str | None],
) -> TensorDict:
    """Builds a TensorDict without a device.

    Args:
        tree: the keys of its entries, nested as in the TensorDict.
        entries: tensors by key. The first dimensions of each tensor must be the batch size.
        batch_size: the batch size, also of nested TensorDicts.
        names: name of each batch dimension, or None for a dimension without a name.
    """
    source = {
        name: tensordict_of(key, entries, batch_size, names)
        if isinstance(key, dict)
        else entries[key]
        for name, key in tree.items()
    }
    made: TensorDict = new_tensordict(source, batch_size=batch_size, names=list(names))
    return made


def size_groups(batch: TensorDict, agents: Mapping[str, int]) -> None:
    """Adds a batch dimension for the agents to the TensorDicts of groups, also under ``"next"``.

    Args:
        batch: a batch.
        agents: number of agents by the key of their group.
    """
    for group, count in agents.items():
        for root in (batch, batch.get("next")):
            part = root.get(group, None)
            if part is not None:
                part.batch_size = (*batch.batch_size, count)


def drop_private(batch: TensorDictBase) -> TensorDictBase:
    """Returns the batch without entries whose key has a part that begins with an underscore."""
    private: list[Key] = []
    _find_private(batch, (), private)
    return batch.exclude(*private) if private else batch


def _find_private(batch: TensorDictBase, path: Key, found: list[Key]) -> None:
    if batch.__class__ is not TensorDict and is_lazy(batch):
        # Its items may be tensors of different shapes, which can't be stacked.
        for name in batch.keys(True):
            names = (name,) if isinstance(name, str) else name
            if any(part.startswith("_") for part in names):
                found.append((*path, *names))
        return
    # Several times as fast as an iteration over ``batch.keys(True)``.
    for key, value in batch.items():
        if key.startswith("_"):
            found.append((*path, key))
        elif value.__class__ is TensorDict or (not isinstance(value, Tensor) and _is_branch(value)):
            _find_private(value, (*path, key), found)


def is_lazy(value: object) -> bool:
    """Returns True if a value is a lazy stack of TensorDicts, whose layouts may differ."""
    return isinstance(value, LazyStackedTensorDict) and not isinstance(value, NonTensorStack)


def has_lazy(tensordict: TensorDictBase) -> bool:
    """Returns True if a TensorDict is a lazy stack, or contains one."""
    return is_lazy(tensordict) or any(
        has_lazy(value) for value in tensordict.values() if _is_branch(value)
    )


def _is_branch(value: object) -> bool:
    return is_tensor_collection(value) and not is_non_tensor(value)


def whole_key(tensordict: TensorDictBase, key: Key) -> Key:
    """Returns the key of the lazy stack that holds the entry ``key``, or ``key`` if none does."""
    value: Any = tensordict
    for depth, part in enumerate(key):
        if is_lazy(value):
            return key[:depth]
        value = value.get(part, None)
        if not _is_branch(value):
            break
    return key


def tensors_at(tensordict: Any, key: Key, axis: int) -> Iterator[tuple[Tensor, int]]:
    """Yields the tensors of an entry; an entry in a lazy stack may have several.

    Args:
        tensordict: the TensorDict that has the entry.
        key: the key of the entry.
        axis: a dimension of ``tensordict``.

    Yields:
        A tensor, and the dimension of the tensor that corresponds to ``axis``.
    """
    if is_lazy(tensordict) and tensordict.stack_dim != axis:
        inner = axis if axis < tensordict.stack_dim else axis - 1
        for part in tensordict.tensordicts:
            yield from tensors_at(part, key, inner)
    elif is_lazy(tensordict) or len(key) == 1:
        yield tensordict.get(key), axis
    else:
        yield from tensors_at(tensordict.get(key[0]), key[1:], axis)


def snapshot(values: TensorDictBase) -> TensorDictBase:
    """Returns a copy of a TensorDict that shares no data with it, not even non-tensor data."""
    copied: TensorDictBase = _copied(values)
    return copied


def _copied(value: Any) -> Any:
    if isinstance(value, LazyStackedTensorDict):
        return type(value)(*map(_copied, value.tensordicts), stack_dim=value.stack_dim)
    if isinstance(value, NonTensorData):
        return NonTensorData(deepcopy(value.data), value.batch_size, device=value.device)
    if isinstance(value, TensorDict):
        entries = {key: _copied(entry) for key, entry in value.items()}
        return TensorDict(entries, value.batch_size, device=value.device)
    return value.clone()


def noted(values: TensorDictBase) -> TensorDictBase:
    """Returns a TensorDict with the same objects, for a later comparison by :func:`changes`.

    Unlike :meth:`~tensordict.TensorDictBase.copy`, this function keeps the wrappers of non-tensor
    data.
    """
    if is_lazy(values):
        parts = map(noted, values.tensordicts)
        return LazyStackedTensorDict(*parts, stack_dim=values.stack_dim)
    entries = {key: noted(v) if _is_branch(v) else v for key, v in values.items()}
    made: TensorDict = new_tensordict(entries, batch_size=values.batch_size, device=values.device)
    return made


def changes(before: TensorDictBase, after: TensorDictBase) -> TensorDictBase:
    """Returns the entries of ``after`` that are not the same objects as in ``before``.

    A lazy stack in ``after`` is a lazy stack in the result, too.

    Args:
        before: the earlier state of a TensorDict, from :func:`noted`. In a ``copy()``, values that
            are no tensors are other objects.
        after: the later state of the TensorDict.
    """
    if is_lazy(after):
        olds = _parts(before, after)
        news = [changes(old, new) for old, new in zip(olds, after.tensordicts, strict=True)]
        return LazyStackedTensorDict(*news, stack_dim=after.stack_dim)
    found = TensorDict({}, after.batch_size, device=after.device)
    for key, value in after.items():
        old = before.get(key, None)
        if value is old:
            continue
        if _is_branch(value) and _is_branch(old):
            value = changes(old, value)
            if value.is_empty():
                continue
        found.set(key, value)
    return found


def _parts(before: Any, after: Any) -> list[TensorDictBase]:
    """Returns the parts of ``before`` that match the parts of a lazy stack, or empty parts."""
    if is_lazy(before) and before.stack_dim == after.stack_dim:
        return list(before.tensordicts)
    return [TensorDict({}, part.batch_size) for part in after.tensordicts]


def zeros(batch: TensorDictBase) -> TensorDictBase:
    """Returns a batch of zeros with the same entries; what is no tensor is the same."""
    found: TensorDictBase = batch.apply(_zeros)
    return found


def _zeros(value: Tensor) -> Tensor:
    if isinstance(value, StackedFrames):
        return StackedFrames(torch.zeros_like(value.frames[:1]), torch.zeros_like(value.positions))
    return torch.zeros_like(value)


def padded(batch: TensorDictBase, missing: int) -> TensorDictBase:
    """Returns a batch with ``missing`` frames of zeros appended along its last dimension."""
    if has_lazy(batch):
        blank = zeros(batch[..., :1])
        whole: TensorDictBase = torch.cat([batch, *[blank] * missing], batch.ndim - 1)
    else:
        whole = pad(batch, [*[0] * (2 * batch.ndim - 1), missing])
    whole.names = batch.names
    return whole


def of_frames(batch: TensorDictBase, key: Key) -> Tensor | None:
    """Returns an entry with one value for each frame, in the batch's shape; None if it is missing.

    The entry may have further dimensions of size 1, as flags have.
    """
    value: Tensor | None = batch.get(key, None)
    return None if value is None else value.reshape(batch.shape)


def broadcastable(mask: Tensor, value: Tensor) -> Tensor:
    """Returns the mask on the value's device, with as many dimensions as the value.

    Args:
        mask: mask with the shape of the value's first dimensions.
        value: a tensor.
    """
    return mask.to(value.device).reshape(*mask.shape, *[1] * (value.ndim - mask.ndim))


def stack_frames(frames: Sequence[TensorDictBase], axis: int) -> TensorDictBase:
    """Stacks frames into a batch.

    If all frames have the same layout, the batch is dense. Lazy stacks within the frames, which
    hold the entries of agents with different specs, remain lazy stacks. If the layouts differ, the
    batch is a lazy stack of copies of the frames.

    Args:
        frames: the frames, at least one.
        axis: index of the new dimension.
    """
    try:
        return _stack(frames, axis)
    except (TypeError, RuntimeError):  # not all tensors, or not all of one shape
        # Copies the frames, because a lazy stack keeps them, and later frames share their tensors.
        return TensorDict.maybe_dense_stack([frame.clone() for frame in frames], axis)


def _stack(frames: Sequence[TensorDictBase], axis: int) -> TensorDictBase:
    first = frames[0]
    if is_lazy(first):
        return _stack_lazy(frames, axis)
    entries: dict[str, Any] = {}
    for key, value in first.items():
        column = [frame.get(key, None) for frame in frames]
        nested = _is_branch(value) and not is_tensorclass(value)
        entries[key] = _stack(column, axis) if nested else torch.stack(column, axis)
    size = first.batch_size
    return TensorDict(entries, (*size[:axis], len(frames), *size[axis:]), device=first.device)


def _stack_lazy(frames: Sequence[Any], axis: int) -> TensorDictBase:
    dim, count = frames[0].stack_dim, len(frames[0].tensordicts)
    if not all(is_lazy(f) and f.stack_dim == dim and len(f.tensordicts) == count for f in frames):
        raise TypeError("lazy stacks of different structure can't be stacked")
    # The parts lack the dimension along which they are stacked.
    inner = axis if axis <= dim else axis - 1
    parts = [_stack([frame.tensordicts[i] for frame in frames], inner) for i in range(count)]
    return LazyStackedTensorDict(*parts, stack_dim=dim + 1 if axis <= dim else dim)
