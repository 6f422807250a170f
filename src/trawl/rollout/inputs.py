"""Inputs for policies that may change them or keep them.

A policy of unknown code must not see the memory of a batch: it could write into it, and memory that
it keeps is filled again with later frames. Such a policy gets memory that nobody else refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import getrefcount
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trawl.keys import Key
from trawl.memory import Array


class InputRows(Protocol):
    """Rows of an entry as a policy reads them, each of which may be made when it is read."""

    def __getitem__(self, t: int, /) -> Tensor:
        """Returns row ``t`` of a chunk."""


class LazyRows(Sequence[Tensor]):
    """Tensors of the rows of a chunk, each made when it is read.

    Args:
        make: function of ``t`` that returns the tensor of the chunk's row ``t``.
        count: number of rows.
    """

    def __init__(self, make: Callable[[int], Tensor], count: int) -> None:
        self._make, self._count = make, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, t: Any) -> Any:
        return self._make(t)


class ArrayRows(Protocol):
    """Rows of an entry as arrays, each of which may be made when it is read.

    Attributes:
        shape: shape of all rows.
        dtype: their dtype.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def dtype(self) -> np.dtype[Any]: ...  # noqa: D102

    def __getitem__(self, t: int, /) -> Any:
        """Returns row ``t``."""


class LatestObservation:
    """The array that an environment returned last, if a policy can read it instead of a copy.

    Args:
        key: key of the observation.

    Attributes:
        array: the observation that begins the next frame; None if there is none.
    """

    def __init__(self, key: Key) -> None:
        self.key = key
        self.array: Array | None = None

    def take(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """Removes and returns the array, unless it is of another kind or others refer to it.

        An environment may return the same array again and again, and change it. Such an environment
        has a reference to the array, or to the memory that the array is a view of.
        """
        array, self.array = self.array, None
        if (
            array is not None
            and getrefcount(array) == _ONLY_LOCAL
            and array.flags.owndata
            and array.flags.carray
            and array.dtype == dtype
            and array.shape == shape
        ):
            return array
        return None


class InputCopies:
    """Copies of an entry's rows, all in the same memory.

    If something still refers to the last copy, the next copy gets new memory.

    Args:
        dtype: dtype of the entry; None for that of its arrays.
        latest: the environment's last observation, if it is this entry; None otherwise.

    Attributes:
        rows: the rows that are copied.
    """

    def __init__(self, dtype: torch.dtype | None, latest: LatestObservation | None = None) -> None:
        self._dtype = dtype
        self.latest = latest
        self.rows: ArrayRows = np.empty(0)
        self._copy = np.empty(0)
        self._unused = 0

    def bind(self, rows: ArrayRows) -> None:
        """Sets the rows to copy."""
        self.rows = rows
        if self._copy.shape != rows.shape[1:] or self._copy.dtype != rows.dtype:
            self._renew()
        if self.latest is not None:
            # The first row may have been changed since the environment returned it.
            self.latest.array = None

    def _renew(self) -> None:
        self._copy = np.empty(self.rows.shape[1:], self.rows.dtype)
        # Counted in the same way as in ``__getitem__``, because Python versions count differently.
        self._unused = getrefcount(self._copy)

    def __getitem__(self, t: int) -> Tensor:
        if self.latest is not None:
            own = self.latest.take(self._copy.dtype, self._copy.shape)
            if own is not None:
                return torch.from_numpy(own)
        if getrefcount(self._copy) != self._unused:
            self._renew()
        self._copy[...] = self.rows[t]
        tensor = torch.from_numpy(self._copy)
        return tensor if self._dtype in (None, tensor.dtype) else tensor.view(self._dtype)


class InputMemory:
    """Memory for copies of the rows that a policy reads, which outlasts batches.

    Args:
        latest: the environment's last observation; None if the steppers don't provide it.
    """

    def __init__(self, latest: LatestObservation | None = None) -> None:
        self._latest = latest
        self._copies: dict[Key, InputCopies] = {}

    def of(self, key: Key, rows: ArrayRows, dtype: torch.dtype | None) -> InputCopies:
        """Returns a copy for each of some rows.

        Args:
            key: key of the entry.
            rows: the rows.
            dtype: dtype of the entry; None for that of its arrays.
        """
        copies = self._copies.get(key)
        if copies is None:
            latest = self._latest if self._latest is not None and self._latest.key == key else None
            copies = self._copies[key] = InputCopies(dtype, latest)
        copies.bind(rows)
        return copies


def _local_references() -> int:
    """Returns the reference count of an object that only a local variable refers to."""
    array, _ = np.empty(0), None
    return getrefcount(array)


_ONLY_LOCAL = _local_references()
