"""Writers of observations into the rows of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from trawl.envs.entries.infos import InfoLeaf
from trawl.envs.entries.spaces import SpaceCodec, picker
from trawl.keys import next_of
from trawl.memory import Array
from trawl.rollout.episodes import StepArrays

#: Writes encoded leaves into the row of step ``t``.
Writer = Callable[[int, list[Any]], None]

# Classes of numbers that a memoryview of each kind of dtype stores as numpy would.
_NUMBERS: dict[str, frozenset[type]] = {
    "f": frozenset({float, int, np.float64, np.float32}),
    "i": frozenset({int, np.int64, np.int32}),
    "u": frozenset({np.uint8, np.uint64}),
    "b": frozenset({bool, np.bool_}),
}


class ObservationRows:
    """Writes observations into rows, and rejects those of the wrong shape.

    Args:
        codec: codec of the observations.
        batch: shape of the batch of environments.
        infos: the leaves that come from an info, by their index. They are the first leaves here.

    Attributes:
        keys: keys of the leaves.
        shapes: shape of each leaf, with the batch.
        dtypes: dtype of each leaf.
        is_array: True if an observation is a single array that is written without encoding.
    """

    def __init__(
        self,
        codec: SpaceCodec,
        batch: tuple[int, ...],
        infos: Mapping[int, InfoLeaf] | None = None,
    ) -> None:
        infos = infos or {}
        self._converters: dict[int, Callable[[Any], Array]] = {
            place: leaf.read for place, leaf in enumerate(infos.values())
        }
        order = [*infos, *(i for i in range(len(codec.leaves)) if i not in infos)]
        self._batch, self._leaves = batch, [codec.leaves[i] for i in order]
        self._order = order if infos else None
        self.is_array = codec.plain and not codec.leaves[0].path
        self.keys = [leaf.key for leaf in self._leaves]
        self.shapes = [(*batch, *leaf.spec.shape) for leaf in self._leaves]
        self.dtypes = [leaf.dtype for leaf in self._leaves if codec.fixed]
        # True until an observation has another layout than its space.
        self._exact = not batch and all(len(shape) == 1 for shape in self.shapes)

    def ordered(self, leaves: list[Any]) -> list[Any]:
        """Returns leaves in the order of ``keys``, given those in the order of the codec."""
        return leaves if self._order is None else [leaves[index] for index in self._order]

    def checked(self, index: int, value: Any) -> Array:
        """Returns the value as an array; raises an error if it does not fit the leaf."""
        if index in self._converters:
            return self._converters[index](value)
        array = np.asarray(value)
        self._leaves[index].check(array, self._batch)
        return array

    def bind(self, view: StepArrays, start: int, stop: int) -> tuple[Writer, Writer, Writer]:
        """Returns functions that write the leaves of a step in the chunk.

        The first one writes the observations after the step, under ``"next"``. The second one
        writes the observations that begin the next step, and the third one does both.

        Args:
            view: the arrays of the environments.
            start: the first row of the chunk.
            stop: the row after the last row.
        """
        if self._exact:
            after = [view.arrays[next_of(key)][start:stop] for key in self.keys]
            begin = [view.arrays[key][start + 1 : stop + 1] for key in self.keys]
            if all(map(_regular, after, begin)):
                return self._bind_exact(after, begin, [view.next_obs[key] for key in self.keys])
        rows = [view.rows(next_of(key), start, stop) for key in self.keys]
        following = [view.following(key, start, stop) for key in self.keys]
        return self.writer(rows), self.writer(following), self.writer(rows, following)

    def writer(self, rows: list[list[Array]], more: list[list[Array]] | None = None) -> Writer:
        """Returns a function that writes encoded leaves into row ``t``.

        Args:
            rows: rows of each leaf.
            more: further rows of each leaf, into which the function writes as well.
        """
        checked, dtypes = self.checked, list(self.dtypes)
        others: Sequence[Any] = more or [None] * len(rows)
        targets = list(zip(range(len(rows)), rows, others, self.shapes, strict=True))

        def write(t: int, leaves: list[Any]) -> None:
            for (index, target, other, shape), value in zip(targets, leaves, strict=True):
                known = value.__class__ is np.ndarray and value.dtype is dtypes[index]
                if not known or value.shape != shape:
                    value = checked(index, value)
                    dtypes[index] = value.dtype
                target[t][...] = value
                if other is not None:
                    other[t][...] = value

        return write

    def _bind_exact(
        self, after: list[Array], begin: list[Array], ends: list[Array]
    ) -> tuple[Writer, Writer, Writer]:
        """Returns the functions of :meth:`bind`, for leaves that are vectors.

        They assign to memoryviews, which is faster than assigning to arrays, and raises an error
        if a value is not of the expected shape and dtype.

        Args:
            after: rows of each leaf under ``"next"``.
            begin: rows of each leaf for the next step.
            ends: the leaves after the batch's last step.
        """
        checked, last = self.checked, len(begin[0])

        def slow(index: int, t: int, value: Any, both: tuple[bool, bool]) -> None:
            """Writes a value of another layout, or one that follows the last row of the batch."""
            array = checked(index, value)
            if t < last and value is not None:
                self._exact = False  # from the next chunk on
            if both[0]:
                after[index][t] = array
            if both[1]:
                (ends[index] if t == last else begin[index][t])[...] = array

        # In an info, a number may stand for an array of one element.
        numbers = [index in self._converters for index in range(len(after))]
        after_targets = list(map(_target, after, numbers))
        begin_targets = list(map(_target, begin, numbers))
        both = _write_both if any(target[3] for target in after_targets) else _write_vectors
        return (
            _write_one(after_targets, slow, (True, False)),
            _write_one(begin_targets, slow, (False, True)),
            both(after_targets, begin_targets, slow),
        )


# The memory of a leaf's rows; for each row, its place in the memory, and the place of its first
# element; and the classes of numbers that may be assigned to one element.
_Target = tuple[memoryview, Sequence[slice], Sequence[int], frozenset[type]]
_Slow = Callable[[int, int, Any, tuple[bool, bool]], None]
_UNFIT = (TypeError, ValueError, IndexError)
_NONE: frozenset[type] = frozenset()


def _write_one(targets: list[_Target], slow: _Slow, both: tuple[bool, bool]) -> Writer:
    own = [(index, *target) for index, target in enumerate(targets)]

    def write(t: int, leaves: list[Any]) -> None:
        for (index, memory, slices, firsts, numbers), value in zip(own, leaves, strict=True):
            try:
                memory[firsts[t] if value.__class__ in numbers else slices[t]] = value
            except _UNFIT:
                pass
            else:
                continue
            slow(index, t, value, both)

    return write


def _write_both(after: list[_Target], begin: list[_Target], slow: _Slow) -> Writer:
    own = [
        (index, *one, other[0]) for index, (one, other) in enumerate(zip(after, begin, strict=True))
    ]

    def write(t: int, leaves: list[Any]) -> None:
        for (index, memory, slices, firsts, numbers, other), value in zip(own, leaves, strict=True):
            place: Any = firsts[t] if value.__class__ in numbers else slices[t]
            try:
                memory[place] = value
                other[place] = value
            except _UNFIT:
                pass
            else:
                continue
            slow(index, t, value, (True, True))

    return write


def _write_vectors(after: list[_Target], begin: list[_Target], slow: _Slow) -> Writer:
    """Returns a function that writes both rows, if no leaf may be a number."""
    own = [
        (index, slices, memory, other[0])
        for index, ((memory, slices, *_), other) in enumerate(zip(after, begin, strict=True))
    ]

    def write(t: int, leaves: list[Any]) -> None:
        for (index, slices, memory, other), value in zip(own, leaves, strict=True):
            place = slices[t]
            try:
                memory[place] = value
                other[place] = value
            except _UNFIT:
                pass
            else:
                continue
            slow(index, t, value, (True, True))

    return write


def _target(rows: Array, takes_numbers: bool) -> _Target:
    count, width = rows.shape
    stride = rows.strides[0] // rows.itemsize
    if rows.flags.c_contiguous:
        flat: Any = rows.reshape(-1)
    else:
        # Rows of other environments lie between these rows.
        length = (count - 1) * stride + width if count else 0
        flat = as_strided(rows, (length,), (rows.itemsize,))
    # A memoryview can't store numbers as float16.
    takes_numbers = takes_numbers and width == 1 and rows.dtype != np.float16
    numbers = _NUMBERS.get(rows.dtype.kind, _NONE) if takes_numbers else _NONE
    return memoryview(flat), *_places(width, stride, count), numbers


@lru_cache(maxsize=64)
def _places(width: int, stride: int, count: int) -> tuple[Sequence[slice], Sequence[int]]:
    firsts = range(0, count * stride, stride)
    return [slice(first, first + width) for first in firsts], firsts


def _regular(after: Array, begin: Array) -> bool:
    """Returns True if two arrays have rows of contiguous elements, at the same distances."""
    inner, item = after.strides[1], after.itemsize
    return inner == item and after.strides == begin.strides and after.strides[0] % item == 0


def leaf_reader(
    infos: Sequence[InfoLeaf], paths: Sequence[tuple[Any, ...]]
) -> Callable[[Any, Mapping[str, Any]], list[Any]]:
    """Returns a function that reads leaves from an observation and an info.

    Args:
        infos: the leaves in the info, which come first.
        paths: paths of the other leaves in the observation.
    """
    pick = picker(paths)
    if any(len(leaf.path) > 1 for leaf in infos):
        finders = [leaf.find for leaf in infos]
        return lambda obs, info: [*(find(info) for find in finders), *pick(obs)]
    names, blanks = [leaf.path[0] for leaf in infos], [leaf.blank for leaf in infos]
    if list(paths) != [()] or len(names) < 2:
        return lambda obs, info: [*map(info.get, names, blanks), *pick(obs)]
    get = itemgetter(*names)

    def read(obs: Any, info: Mapping[str, Any]) -> list[Any]:
        try:
            return [*get(info), obs]
        except KeyError:
            return [*map(info.get, names, blanks), obs]

    return read
