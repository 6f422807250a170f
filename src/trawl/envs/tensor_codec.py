"""Conversion between samples of Gymnasium spaces that are tensors and flat lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor
from torch.nn.functional import one_hot
from typing_extensions import override

from trawl.envs.spaces import SpaceCodec, SpaceLeaf, SpaceOps
from trawl.keys import show_key


class TensorCodec(SpaceCodec):
    """Encodes and decodes the tensors of a batch of samples of one Gymnasium space.

    Actions that it decodes share no memory with a batch, because an environment may change them.

    Args:
        space: the space of a single environment.
        root: ``"observation"`` or ``"action"``; see :class:`~trawl.envs.spaces.SpaceCodec`.
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
        super().__init__(space, root, categorical, _ops(device))
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


def _ops(device: torch.device) -> SpaceOps:
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
