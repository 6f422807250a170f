"""Conversion between samples of Gymnasium spaces and flat lists of arrays.

A :class:`SpaceCodec` is made once for each space. It lists the leaves (key, shape, dtype) that
the space's samples fill in a TensorDict, encodes samples into arrays, and decodes arrays into
actions for ``env.step``. Batches of samples from vector environments are handled like single
samples, but their arrays have additional leading dimensions. A :class:`TensorCodec` does the same
with tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor
from torch.nn.functional import one_hot
from typing_extensions import override

from trawl.envs.specs import (
    Binary,
    Bounded,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    NonTensor,
    OneHot,
    Spec,
    Unbounded,
)
from trawl.keys import DONE_KEYS, RESET_MASK, Key, show_key
from trawl.memory import Array

# Keys that a frame uses besides those of observations and actions.
_RESERVED = ("reward", *DONE_KEYS, "next", "collector", RESET_MASK)


@dataclass(frozen=True)
class SpaceLeaf:
    """One of the arrays that a sample of a space consists of.

    Attributes:
        key: key of the array in a TensorDict.
        path: path of the array in a sample, as a sequence of dict keys and tuple indices.
        space: the Gymnasium space of the leaf.
        spec: shape, dtype and domain of the encoded array.
    """

    key: Key
    path: tuple[Any, ...]
    space: Space[Any]
    spec: Spec

    def check(
        self, array: Array, batch: Sequence[int] = (), agent: tuple[str, Any] | None = None
    ) -> None:
        """Rejects an array if its shape or dtype doesn't match ``batch`` and the space.

        Args:
            array: the array.
            batch: batch size of the array.
            agent: the group and the name of the agent whose observation it is, or None.

        Raises:
            ValueError: if the shape is wrong; the message names the key and both shapes.
            TypeError: if the dtype is of another kind; the message names the key and both dtypes.
        """
        expected = (*batch, *self.spec.shape)
        if array.shape == expected and (
            array.dtype == self.dtype or np.can_cast(array.dtype, self.dtype, "same_kind")
        ):
            return
        name = f"observation {show_key(self.key)}"
        if agent is not None:
            name = f"observation {show_key((agent[0], *self.key))} of agent {agent[1]!r}"
        if array.shape != expected:
            raise ValueError(
                f"{name} has shape {array.shape}, but its observation space says {expected}"
            )
        raise TypeError(f"{name} is {array.dtype}, but its space says {self.dtype}")

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the encoded array."""
        return torch.empty(0, dtype=self.spec.dtype).numpy().dtype


class SpaceCodec:
    """Encodes and decodes the samples of one Gymnasium space.

    Args:
        space: the space of a single environment.
        root: ``"observation"`` or ``"action"``. If the space is a single leaf, this is its key. If
            the space is a Tuple, this is the first part of all keys. The entries of a top-level
            Dict space keep their own names.
        categorical: True to keep discrete values as indices instead of one-hot vectors.
        ops: operations on the arrays; by default, those of numpy.

    Attributes:
        decode_one: :meth:`decode` as a function of the only array; None if there are several.
    """

    def __init__(
        self,
        space: Space[Any],
        root: str,
        categorical: bool = False,
        ops: SpaceOps | None = None,
    ) -> None:
        self.space = space
        self.leaves = list(_leaves(space, (root,), (), categorical, top=True))
        ops = _NUMPY if ops is None else ops
        self._encoders = [_encoder(leaf, ops) for leaf in self.leaves]
        self._pick = picker([leaf.path for leaf in self.leaves])
        # The leaves that need encoding.
        self._encoded = [(i, one) for i, one in enumerate(self._encoders) if one is not None]
        self._decoders = [_decoder(leaf, ops) for leaf in self.leaves]
        is_leaf = len(self.leaves) == 1 and not self.leaves[0].path
        self.decode_one = self._decoders[0] if is_leaf else None

    @property
    def fixed(self) -> bool:
        """True if every leaf has a fixed shape and dtype, and therefore fits into an array."""
        return not self.loose

    @property
    def loose(self) -> list[SpaceLeaf]:
        """Leaves without a fixed layout."""
        return [leaf for leaf in self.leaves if isinstance(leaf.spec, NonTensor)]

    @property
    def plain(self) -> bool:
        """True if there is a single leaf that needs no encoding, as in a Box or MultiBinary."""
        return len(self.leaves) == 1 and self._encoders[0] is None

    @property
    def verbatim(self) -> bool:
        """True if all leaves have a fixed layout and need no encoding."""
        return self.fixed and all(encoder is None for encoder in self._encoders)

    def compact(self) -> SpaceCodec:
        """Returns a codec of the same actions, with discrete actions as indices."""
        return SpaceCodec(self.space, "action", categorical=True)

    def composite(self, batch: Sequence[int] = ()) -> Composite:
        """Returns the specs of the leaves, with ``batch`` prepended to each shape."""
        result = Composite(shape=batch)
        for leaf in self.leaves:
            result[leaf.key] = leaf.spec.expand(*batch)
        return result

    def encode(self, sample: Any, info: Any = None) -> list[Any]:
        """Returns the arrays of a sample or a batch of samples, in the order of ``leaves``.

        Args:
            sample: the sample.
            info: info that was returned with an observation, which some codecs read as well.
        """
        values = self._pick(sample)
        for index, encoder in self._encoded:
            values[index] = encoder(values[index])
        return values

    def decode(self, arrays: Iterable[Any]) -> Any:
        """Returns the action for ``env.step``, given arrays in the order of ``leaves``."""
        parts = [decoder(array) for decoder, array in zip(self._decoders, arrays, strict=True)]
        if self.decode_one is not None:
            return parts[0]
        return _nest(self.space, iter(parts))


def check_keys(observed: SpaceCodec, acted: SpaceCodec) -> None:
    """Rejects observation keys that a frame uses for something else."""
    taken = {(name,) for name in _RESERVED} | {leaf.key for leaf in acted.leaves}
    for key in (leaf.key for leaf in observed.leaves):
        parts = {key[:length] for length in range(1, len(key) + 1)}
        if parts & taken or any(other[: len(key)] == key for other in taken):
            raise ValueError(
                f"the environment has an observation {show_key(key)}, but a frame needs that key "
                f"for an action, or for something else ({', '.join(_RESERVED)}): rename the "
                "observation with a wrapper; for an entry of info, pass another key"
            )


class MissingPart(ValueError):
    """Raised if a sample lacks a part that its space has."""


def picker(paths: Sequence[tuple[Any, ...]]) -> Callable[[Any], list[Any]]:
    """Returns a function that returns the parts of a sample at the given paths.

    The function raises :class:`MissingPart` if the sample lacks one of them.
    """
    if list(paths) == [()]:
        return lambda sample: [sample]
    if len(paths) > 1 and all(len(path) == 1 for path in paths):
        pick: Callable[[Any], Iterable[Any]] = itemgetter(*(path[0] for path in paths))
    else:

        def pick(sample: Any) -> Iterable[Any]:
            return [_part(sample, path) for path in paths]

    def picked(sample: Any) -> list[Any]:
        try:
            return list(pick(sample))
        except (KeyError, IndexError, TypeError) as error:
            raise _missing(sample, paths) from error

    return picked


def _part(sample: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        sample = sample[step]
    return sample


def _missing(sample: Any, paths: Sequence[tuple[Any, ...]]) -> MissingPart:
    """Returns the error for a sample that lacks some of its parts."""
    for path in paths:
        try:
            _part(sample, path)
        except (KeyError, IndexError, TypeError):
            name = path[0] if len(path) == 1 else path
            has = sorted(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
            return MissingPart(f"an observation lacks {name!r}, which its space has; it is {has}")
    return MissingPart(f"an observation doesn't have the parts of its space: {sample!r}")


def _leaves(
    space: Space[Any], key: Key, path: tuple[Any, ...], categorical: bool, top: bool = False
) -> Iterator[SpaceLeaf]:
    if isinstance(space, spaces.Dict):
        prefix = () if top else key
        for name, child in space.spaces.items():
            yield from _leaves(child, (*prefix, str(name)), (*path, name), categorical)
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from _leaves(child, (*key, str(index)), (*path, index), categorical)
    else:
        yield SpaceLeaf(key, path, space, _spec(space, categorical))


def _nest(space: Space[Any], parts: Iterator[Any]) -> Any:
    """Returns a sample of a space, made of its leaves in order."""
    if isinstance(space, spaces.Dict):
        return {name: _nest(child, parts) for name, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_nest(child, parts) for child in space.spaces)
    return next(parts)


def _spec(space: Space[Any], categorical: bool) -> Spec:
    if isinstance(space, spaces.Box):
        return _box_spec(space)
    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n)) if categorical else OneHot(int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        nvec = torch.as_tensor(np.asarray(space.nvec, dtype=np.int64))
        return MultiCategorical(nvec) if categorical else MultiOneHot(nvec.flatten().tolist())
    if isinstance(space, spaces.MultiBinary):
        return Binary(space.shape)
    return NonTensor(space)


def _box_spec(space: spaces.Box) -> Spec:
    # A scalar Box becomes a vector with one element, like a reward.
    low, high = np.atleast_1d(space.low), np.atleast_1d(space.high)
    dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
    if not (np.isfinite(low).any() or np.isfinite(high).any()):
        return Unbounded(low.shape, dtype)
    return Bounded(torch.from_numpy(low.copy()), torch.from_numpy(high.copy()), dtype)


@dataclass(frozen=True)
class SpaceOps:
    """The operations of encoding and decoding that differ between libraries of arrays.

    Attributes:
        array: returns a value of a sample as an array.
        indices: returns a value of a discrete space as an array of integers.
        offset: returns the least values of a discrete space, to add or subtract.
        one_hot: returns one-hot vectors, given indices and the number of elements.
        join: concatenates vectors along their last dimension.
        stack: stacks arrays along a new last dimension.
        split: divides vectors into parts of given sizes.
        copier: returns a function that copies an array to a dtype of numpy. The environment may
            keep and change its action, but the batch must not change.
        kept: returns the values of a discrete space in the dtype of the space, if that matters.
    """

    array: Callable[[Any], Any]
    indices: Callable[[Any], Any]
    offset: Callable[[Any], Any]
    one_hot: Callable[[Any, int], Any]
    join: Callable[[list[Any]], Any]
    stack: Callable[[list[Any]], Any]
    split: Callable[[Any, list[int]], Any]
    copier: Callable[[Any], Callable[[Any], Any]]
    kept: Callable[[Any, Any], Any] = lambda values, dtype: values


def _one_hot(index: Array, n: int) -> Array:
    if ((index < 0) | (index >= n)).any():
        raise ValueError(f"discrete value {index} lies outside its space of {n} values")
    result = np.zeros((*index.shape, n), dtype=np.int64)
    np.put_along_axis(result, index.astype(np.int64)[..., None], 1, -1)
    return result


_NUMPY = SpaceOps(
    array=np.asarray,
    indices=np.asarray,
    offset=lambda start: start,
    one_hot=_one_hot,
    join=lambda parts: np.concatenate(parts, -1),
    stack=lambda parts: np.stack(parts, -1),
    split=lambda array, sizes: np.split(array, np.cumsum(sizes)[:-1], -1),
    copier=lambda dtype: lambda array: array.astype(dtype),
    kept=lambda values, dtype: values.astype(dtype),
)


def _encoder(leaf: SpaceLeaf, ops: SpaceOps) -> Callable[[Any], Any] | None:
    """Returns a function that encodes a leaf of a sample; None if it needs no encoding."""
    space, array, indices = leaf.space, ops.array, ops.indices
    if isinstance(space, spaces.Box) and space.shape == ():
        return lambda value: array(value)[..., None]
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return None
    start, one_hot, join = ops.offset(space.start), ops.one_hot, ops.join
    if isinstance(leaf.spec, (Categorical, MultiCategorical)):
        return lambda value: indices(value) - start
    if isinstance(space, spaces.Discrete):
        n = int(space.n)
        return lambda value: one_hot(indices(value) - start, n)
    sizes, dims = _sizes(space), len(space.shape)

    def encode(value: Any) -> Any:
        index = indices(value) - start
        index = index.reshape(*index.shape[: index.ndim - dims], -1)
        return join([one_hot(index[..., i], n) for i, n in enumerate(sizes)])

    return encode


def _decoder(leaf: SpaceLeaf, ops: SpaceOps) -> Callable[[Any], Any]:
    """Returns a function that makes a leaf of an action of its array."""
    space, spec = leaf.space, leaf.spec
    if isinstance(spec, NonTensor):
        return lambda value: value
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        copied = ops.copier(space.dtype)
        # A number has one element as an entry of a frame.
        is_number = isinstance(space, spaces.Box) and space.shape == ()
        return (lambda array: copied(array[..., 0])) if is_number else copied
    start, kept, dtype = ops.offset(space.start), ops.kept, space.dtype
    if isinstance(space, spaces.Discrete):
        if isinstance(spec, Categorical):
            return lambda array: array[()] + start
        return lambda array: array.argmax(-1) + start
    if isinstance(spec, MultiCategorical):
        return lambda array: kept(array + start, dtype)
    shape, sizes, split, stack = space.shape, _sizes(space), ops.split, ops.stack

    def decode(array: Any) -> Any:
        index = stack([part.argmax(-1) for part in split(array, sizes)])
        return kept(index.reshape(*index.shape[:-1], *shape) + start, dtype)

    return decode


def _sizes(space: spaces.MultiDiscrete) -> list[int]:
    return [int(n) for n in np.asarray(space.nvec).flatten()]


# --- tensors


class TensorCodec(SpaceCodec):
    """Encodes and decodes the tensors of a batch of samples of one Gymnasium space.

    Actions that it decodes share no memory with a batch, because an environment may change them.

    Args:
        space: the space of a single environment.
        root: ``"observation"`` or ``"action"``; see :class:`~trawl.envs.entries.spaces.SpaceCodec`.
        device: device of the tensors.
        num_envs: number of environments.
        categorical: True to keep discrete values as indices instead of one-hot vectors.

    Raises:
        ValueError: if a leaf of the space has no fixed shape and dtype.
    """

    def __init__(
        self,
        space: Space[Any],
        root: str,
        device: torch.device,
        num_envs: int,
        categorical: bool = False,
    ) -> None:
        super().__init__(space, root, categorical, _tensor_ops(device))
        if self.loose:
            keys = ", ".join(show_key(leaf.key) for leaf in self.loose)
            raise ValueError(
                f"the {root} space of an environment whose data are tensors must have a fixed "
                f"shape and dtype, but {keys} has none: {space}"
            )
        self._root = root
        self._device = device
        self._num_envs = num_envs
        # Shape and dtype of each leaf as the environment returned it first.
        self._seen: list[tuple[torch.Size, torch.dtype]] = []
        # The same for a single tensor that needs no encoding; None for other spaces.
        self._plain: tuple[torch.Size, torch.dtype] | None = None

    @override
    def encode(self, sample: Any, info: Any = None) -> list[Tensor]:
        """Returns the leaves of a batch of samples, each of shape ``(num_envs, ...)``.

        Raises:
            TypeError: if a leaf is not a tensor, or has another dtype than before.
            ValueError: if a leaf has the wrong shape, or is on another device.
        """
        if self._plain is not None and sample.__class__ is Tensor:
            shape, dtype = self._plain
            if sample.shape == shape and sample.dtype is dtype and sample.device == self._device:
                return [sample]
        values = [self._at(sample, leaf) for leaf in self.leaves]
        if not self._seen:
            self._learn(values)
        for leaf, value, seen in zip(self.leaves, values, self._seen, strict=True):
            if value.shape != seen[0] or value.dtype is not seen[1] or value.device != self._device:
                self._explain(leaf, value, *seen)
        return [
            value if encode is None else encode(value)
            for value, encode in zip(values, self._encoders, strict=True)
        ]

    def _at(self, sample: Any, leaf: SpaceLeaf) -> Tensor:
        value = sample
        for step in leaf.path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError) as error:
                raise ValueError(
                    f"{self._root} {show_key(leaf.key)} is missing: the environment returned "
                    f"{_outline(sample)}"
                ) from error
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{self._root} {show_key(leaf.key)} must be a torch tensor, as in the first reset, "
                f"but it is {type(value).__name__}"
            )
        return value

    def _learn(self, values: list[Tensor]) -> None:
        """Checks the first sample, and records its layout."""
        for leaf, value in zip(self.leaves, values, strict=True):
            expected = torch.Size((self._num_envs, *(leaf.space.shape or ())))
            if value.device != self._device:
                raise ValueError(
                    f"{self._root} {show_key(leaf.key)} is on {value.device}, but the device of "
                    f"the environment, or the argument device, is {self._device}: pass the device "
                    "of the data"
                )
            if value.shape != expected:
                self._explain(leaf, value, expected, value.dtype)
            if not torch.can_cast(value.dtype, leaf.spec.dtype):
                raise TypeError(
                    f"{self._root} {show_key(leaf.key)} is {value.dtype}, but its space says "
                    f"{leaf.spec.dtype}"
                )
        self._seen = [(value.shape, value.dtype) for value in values]
        if len(values) == 1 and not self.leaves[0].path and self._encoders == [None]:
            (self._plain,) = self._seen

    def _explain(
        self, leaf: SpaceLeaf, value: Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        name = f"{self._root} {show_key(leaf.key)}"
        if value.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but {tuple(shape)} is expected: one row "
                "for each environment, of the shape that the space says"
            )
        if value.device != self._device:
            raise ValueError(
                f"{name} is on {value.device}, but the environment's data are on {self._device}: "
                "the device must not change"
            )
        raise TypeError(f"{name} is {value.dtype}, but at first {dtype}: the dtype must not change")


def _outline(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return f"a mapping with the keys {list(sample)}"
    return type(sample).__name__


def _tensor_ops(device: torch.device) -> SpaceOps:
    """Returns the operations on tensors of a device."""

    def offset(start: Any) -> Any:
        if not np.ndim(start):
            return int(start)
        # Made once: a copy from the host in each step would wait for the device.
        return torch.as_tensor(np.asarray(start, np.int64), device=device)

    def copier(dtype: Any) -> Callable[[Tensor], Tensor]:
        own = torch.from_numpy(np.empty(0, dtype)).dtype
        return lambda value: value.to(own, copy=True)

    return SpaceOps(
        array=lambda value: value,
        # Flags can't be subtracted, and small integers can't hold all differences.
        indices=Tensor.long,
        offset=offset,
        one_hot=lambda index, n: one_hot(index.long(), n),
        join=lambda parts: torch.cat(parts, -1),
        stack=lambda parts: torch.stack(parts, -1),
        split=lambda value, sizes: value.split(sizes, -1),
        copier=copier,
    )
