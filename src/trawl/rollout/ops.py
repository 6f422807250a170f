"""Operations that differ between arrays of numpy and tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Operations(NamedTuple):
    """The operations on arrays, or on tensors.

    Attributes:
        add: adds values, into a third argument; if that is None, returns the sum.
        multiply: multiplies values, also into ``out``.
        limit: limits values in place, from a smallest to a largest one, which have their dtype.
            None for arrays: numpy is faster with ``maximum`` and ``minimum``.
        full: returns an array or a tensor like another one, of a shape, filled with a number.
        clear: writes zeros where a mask is True.
        cast: returns a copy of another dtype.
        finfo: returns the limits of a floating-point dtype.
        float64: the dtype.
    """

    add: Callable[[Any, Any, Any], Any]
    multiply: Callable[..., Any]
    limit: Callable[[Any, Any, Any], Any] | None
    full: Callable[[Any, Sequence[int], float], Any]
    clear: Callable[[Any, Any], Any]
    cast: Callable[[Any, Any], Any]
    finfo: Callable[[Any], Any]
    float64: Any

    def clear_absent(self, values: Any, absent: Any) -> None:
        """Writes zeros where the flags of absent agents, ``(*size, agents, 1)``, are True."""
        self.clear(values, column(absent[..., 0], values))


def operations(like: Any) -> Operations:
    """Returns the operations on values of the kind of ``like``."""
    return _OF_TENSORS if isinstance(like, Tensor) else _OF_ARRAYS


def column(rows: Any, like: Any) -> Any:
    """Returns values of rows in a shape that broadcasts to that of other values."""
    return rows.reshape(*rows.shape, *[1] * (like.ndim - rows.ndim))


def write(rows: Any, value: Any) -> None:
    """Writes rows, or a number, into rows."""
    if not isinstance(rows, Tensor):
        rows[...] = value
    # Several times as fast as an assignment to an index.
    elif isinstance(value, Tensor):
        rows.copy_(value)
    else:
        rows.fill_(value)


def _add_tensors(one: Tensor, other: Tensor, out: Tensor | None) -> Tensor:
    return torch.add(one, other, out=out)


_OF_ARRAYS = Operations(
    np.add,
    np.multiply,
    None,
    lambda like, shape, value: np.full(shape, value, like.dtype),
    lambda values, mask: np.copyto(values, 0, where=mask),
    lambda values, dtype: values.astype(dtype),
    np.finfo,
    np.float64,
)
_OF_TENSORS = Operations(
    _add_tensors,
    torch.mul,
    torch.Tensor.clamp_,
    lambda like, shape, value: like.new_full(shape, value),
    lambda values, mask: values.masked_fill_(mask, 0),
    lambda values, dtype: values.to(dtype, copy=True),
    torch.finfo,
    torch.float64,
)
