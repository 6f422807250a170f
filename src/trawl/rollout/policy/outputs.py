"""Rule for the outputs of a policy: all of them have the dtype and the shape of the first ones.

An output of another dtype is converted if the conversion keeps its values. A float may be rounded;
nothing else may change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trawl.keys import Key, show_key
from trawl.memory import Array
from trawl.rollout.layout import as_array
from trawl.rollout.policy.plan import unwrap


class PolicyOutputs:
    """Brings the outputs of a policy to the dtypes and the shapes of the first ones.

    Args:
        dtypes: dtype of the first output, by key. The first value of another entry adds its dtype.
        batch: number of dimensions in front, which number the environments.
        at_once: True to check converted values at once; False to check them in :meth:`check`,
            because their device would have to be waited for.
        hint: text for the error that the number of environments is wrong.
        remote: True if outputs are usually on another device than the CPU.
    """

    def __init__(
        self,
        dtypes: Mapping[Key, torch.dtype],
        batch: int,
        at_once: bool = True,
        hint: str = "",
        remote: bool = False,
    ) -> None:
        self._dtypes = dict(dtypes)
        self._batch, self._at_once, self._hint, self._remote = batch, at_once, hint, remote
        # The conversions that were not checked yet: the beginning and the end of an error, the key,
        # the dtype, and a mark that is True if values have changed.
        self._unchecked: list[tuple[str, str, Key, torch.dtype, Tensor]] = []

    def converted(self, key: Key, value: Any, row: int, who: str = "policy wrote") -> Tensor:
        """Returns an output as a tensor of the right dtype, without gradients.

        Args:
            key: key of the entry.
            value: the output: a tensor, or an object that contains one.
            row: row of the batch, for a later error.
            who: beginning of an error.

        Raises:
            TypeError: if the output contains no tensor, or values that the dtype can't hold.
        """
        tensor = value if isinstance(value, Tensor) else unwrap(value, key)
        if tensor.requires_grad:
            tensor = tensor.detach()
        dtype = self._dtypes.get(key)
        if dtype is None:
            self._dtypes[key] = tensor.dtype
        elif tensor.dtype is not dtype:
            given, (tensor, lost) = tensor.dtype, _cast(tensor, dtype)
            if not self._at_once:
                where = f" in step {row} of this batch"
                self._unchecked.append((who, where, key, given, lost))
            elif lost:
                raise _wrong_dtype(who, "", key, given, dtype)
        return tensor

    def fitting(self, key: Key, value: Any, shape: Sequence[int] | None, row: int) -> Tensor:
        """Returns an output as a tensor of the right dtype and shape, without gradients.

        Args:
            key: key of the entry.
            value: the output.
            shape: shape that it must have; None for any shape.
            row: row of the batch, for a later error.

        Raises:
            TypeError: see :meth:`converted`.
            ValueError: if the output has another shape.
        """
        tensor = self.converted(key, value, row)
        if shape is not None and tensor.shape != shape:
            raise self._wrong_shape(key, tensor.shape, shape)
        return tensor

    def array_of(self, key: Key) -> Callable[[Any, Sequence[int]], Array]:
        """Returns a function that converts an output to an array.

        The function's arguments are the value and the shape that it must have. It raises the errors
        of :meth:`fitting`.
        """
        expected = as_array(torch.empty(0, dtype=self._dtypes[key])).dtype
        quick: Callable[[Any], Any] = Tensor.numpy
        if self._remote:
            quick = _moved_array
        if self._dtypes[key] is torch.bfloat16:
            # An array of int16 may have been a tensor of either dtype.
            quick = _nothing

        def checked(value: Any, shape: Sequence[int]) -> Array:
            array: Array | None
            try:
                array = quick(value)
            except (TypeError, RuntimeError):
                array = None
            if array is None or array.dtype is not expected or array.shape != shape:
                array = host_array(self.fitting(key, value, shape, 0))
            return array

        return checked

    def writer(
        self, key: Key, rows: Sequence[Any], also: Sequence[Any] | None, start: int
    ) -> Callable[[int, Any], None]:
        """Returns a function that writes an output to row ``t`` of a chunk.

        Args:
            key: key of the entry.
            rows: the rows, which are arrays or tensors.
            also: further rows that get the same values; None if there are none.
            start: number of the chunk's first row in the batch.
        """
        shape, dtype, fitting = rows[0].shape, rows[0].dtype, self.fitting
        more: Sequence[Any] = () if also is None else also
        if not isinstance(rows[0], Tensor):
            array_of = self.array_of(key)

            def write(t: int, value: Any) -> None:
                rows[t][...] = array_of(value, shape)

            def write_both(t: int, value: Any) -> None:
                rows[t][...] = more[t][...] = array_of(value, shape)

            return write if also is None else write_both

        def copy(t: int, value: Any) -> None:
            if (
                value.__class__ is not Tensor
                or value.dtype is not dtype
                or value.requires_grad
                or value.shape != shape
            ):
                value = fitting(key, value, shape, start + t)
            rows[t].copy_(value)
            if also is not None:
                more[t].copy_(value)

        return copy

    def begin(self) -> None:
        """Begins a batch; an error may have ended the one before without a check."""
        self._unchecked = []

    def check(self) -> None:
        """Checks the conversions since the last call; called once per batch.

        Raises:
            TypeError: if values have changed; the message names the first row.
        """
        unchecked, self._unchecked = self._unchecked, []
        if not unchecked:
            return
        place = unchecked[0][-1].device
        marks = torch.stack([lost.to(place) for *_, lost in unchecked]).tolist()
        for (who, where, key, given, _), lost in zip(unchecked, marks, strict=True):
            if lost:
                raise _wrong_dtype(who, where, key, given, self._dtypes[key])

    def _wrong_shape(self, key: Key, got: Sequence[int], expected: Sequence[int]) -> ValueError:
        """Returns the error for an output that has another shape than the first one."""
        got, expected, batch = tuple(got), tuple(expected), self._batch
        if got[batch:] == expected[batch:] and len(got) == len(expected):
            return ValueError(
                f"policy wrote {show_key(key)} with shape {got}, but it was called with inputs "
                f"of batch size {expected[:batch]}, so the shape must be {expected}. {self._hint}"
                "Take the batch size from the inputs, as in torch.zeros(len(observation))"
            )
        return ValueError(
            f"policy wrote {show_key(key)} with shape {got}, but at first with shape {expected}: "
            "the shape must not change"
        )


def _moved_array(value: Any) -> Array:
    array: Array = value.detach().cpu().numpy()
    return array


def _nothing(_: Any) -> None:
    return None


def host_array(tensor: Tensor) -> Array:
    """Returns the values of a tensor on any device as an array (int16 for bfloat16)."""
    return as_array(tensor.cpu().resolve_conj().resolve_neg())


def _wrong_dtype(
    who: str, where: str, key: Key, given: torch.dtype, dtype: torch.dtype
) -> TypeError:
    return TypeError(
        f"{who} {show_key(key)} as {given}{where}, with values that {dtype} can't hold, but the "
        f"policy wrote it at first as {dtype}: the dtype must not change. Write it as {given} from "
        "the first call on"
    )


def _cast(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns a tensor of another dtype, and a mark that is True if values have changed."""
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
        if not dtype.is_complex:
            real, lost = _cast(tensor.real, dtype)
            return real, lost | (tensor.imag != 0).any()
    cast = tensor.to(dtype)
    if not dtype.is_complex:
        given, kept = tensor, cast
    elif tensor.is_complex():
        given, kept = torch.view_as_real(tensor), torch.view_as_real(cast)
    else:
        given, kept = tensor, cast.real
    return cast, ~_equal(given, kept).all()


def _equal(given: Tensor, kept: Tensor) -> Tensor:
    """Returns a mask of the values that a cast between real dtypes has kept."""
    from_float, to_float = given.is_floating_point(), kept.is_floating_point()
    if from_float and to_float:
        before, after = given.double(), kept.double()
        finite = before.isfinite() & after.isfinite()
        return finite | (before == after) | (before.isnan() & after.isnan())
    if from_float or to_float:
        floats, integers = (given, kept) if from_float else (kept, given)
        floats = floats.double()
        # Beyond this range, the integer of a float is undefined.
        inside = floats.abs() < _END
        return inside & (floats == floats.trunc()) & (floats.long() == integers.long())
    equal = given.long() == kept.long()
    if torch.uint64 in (given.dtype, kept.dtype):
        # Half of these values have the bits of a negative integer.
        equal &= given.long() >= 0
    return equal


_END = float(np.iinfo(np.int64).max)
