"""Layout of the entries that a batch takes from an environment's info.

An :class:`InfoLayout` is made once for each environment, from the argument ``info_keys`` of
:class:`~trawl.envs.GymEnv`. It reads the info of single environments and of vector environments,
and rejects values that don't fit. A value that is missing from an info becomes zeros or, if it is
not a number or an array, None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces

from trawl.envs.info_keys import INFO_KEY, as_array
from trawl.keys import Key
from trawl.memory import Array, Mask


@dataclass(frozen=True, eq=False)
class InfoLeaf:
    """One value in the info.

    Attributes:
        path: names that lead to the value in the info.
        key: names that lead to the value in the observation.
        shape: shape of the value.
        dtype: dtype of the value; None if the value is stored unchanged.
        blank: value for a step or a reset whose info lacks the entry.
    """

    path: Key
    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    blank: Any

    def find(self, info: Mapping[str, Any]) -> Any:
        """Returns the value in the info of a single environment; a blank value if it is missing."""
        value: Any = info
        for name in self.path:
            if not isinstance(value, Mapping) or name not in value:
                return self.blank
            value = value[name]
        return value

    def read(self, value: Any) -> Any:
        """Returns a value in the leaf's shape and dtype; a value of None counts as missing.

        Raises:
            ValueError: if the value has another shape.
            TypeError: if the value can't be converted to the dtype without loss.
        """
        if self.dtype is None:
            return self.blank if value is None else self._checked(value)
        if (
            value.__class__ is np.ndarray
            and value.dtype is self.dtype
            and value.shape == self.shape
        ):
            return value
        return self.blank if value is None else self.read_batch(value, ())

    def _checked(self, value: Any) -> Any:
        """Returns a value that is stored unchanged; text must be text."""
        if self.blank is not None and not isinstance(value, str):
            raise TypeError(
                f"{self.name} is {type(value).__name__} {value!r}, but its layout, as first seen "
                "or as stated in info_keys, is text. For a value that is not always text, write "
                f"info_keys={{{self.path[0]!r}: object}}"
            )
        return value

    def read_batch(self, values: Any, batch: tuple[int, ...]) -> Array:
        """Returns values of all environments in a batch as one array."""
        assert self.dtype is not None
        array, shape = as_array(values), (*batch, *self.shape)
        if array is None:
            raise TypeError(
                f"{self.name} is {type(values).__name__} {values!r}, but its layout is "
                f"{self.dtype} of shape {self.shape}. For a value that is not always a number or "
                f"an array, write info_keys={{{self.path[0]!r}: object}}"
            )
        if array.shape != shape:
            # A number may come as an array of one element, or the other way round.
            if array.size != np.prod(shape) or int(np.prod(self.shape)) != 1:
                raise ValueError(
                    f"{self.name} has shape {array.shape[len(batch) :]}, but its "
                    f"layout, as first seen or as stated in info_keys, has shape {self.shape}. For "
                    f"values of several shapes, write info_keys={{{self.path[0]!r}: object}}"
                )
            array = array.reshape(shape)
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise TypeError(
                f"{self.name} is {array.dtype}, but its layout, as first seen or as stated in "
                f"info_keys, is {self.dtype}: state its space, as in "
                f"info_keys={{{self.path[0]!r}: gymnasium.spaces.Box(...)}}"
            )
        if np.can_cast(array.dtype, self.dtype, "safe"):
            return array.astype(self.dtype, copy=False)
        return self._narrowed(array)

    def _narrowed(self, array: Array) -> Array:
        """Returns an array in a dtype that may not hold all its values.

        Raises:
            TypeError: if the dtype is one of integers, and an integer is beyond its range.
        """
        assert self.dtype is not None
        # A float is rounded, which may make it infinite.
        with np.errstate(over="ignore"):
            narrow = array.astype(self.dtype)
        if self.dtype.kind != "f" and not (same := narrow == array).all():
            raise TypeError(
                f"{self.name} is {array[~same][0]}, but its layout, as first seen or as "
                f"stated in info_keys, is {self.dtype}, which can't hold this number: state its "
                f"space, as in info_keys={{{self.path[0]!r}: gymnasium.spaces.Box(...)}}"
            )
        return narrow

    def column(self, num_envs: int) -> Any:
        """Returns blank values for a batch of environments."""
        if self.dtype is None:
            return [self.blank] * num_envs
        column = np.empty((num_envs, *self.shape), self.dtype)
        column[...] = self.blank
        return column

    def fill(self, column: Any, info: Any, rows: Mask | None) -> None:
        """Writes the values that the info of a vector environment has for the leaf.

        Args:
            column: the values of all sub-environments.
            info: the info: a dict of merged values, where ``"_name"`` is a mask of the
                sub-environments that have a value ``"name"``, or a list of dicts.
            rows: mask of the sub-environments to write; None for all.
        """
        value, rest = info, list(self.path)
        while rest and isinstance(value, Mapping):
            name = rest.pop(0)
            if name not in value:
                return
            marked = value.get(f"_{name}")
            if marked is not None:
                rows = marked if rows is None else rows & marked
            value = value[name]
        chosen = np.arange(len(column)) if rows is None else np.flatnonzero(rows)
        if not len(chosen):
            return
        whole = self.dtype is not None and not rest
        if whole and isinstance(value, (np.ndarray, torch.Tensor)) and value.dtype != object:
            column[chosen] = self.read_batch(value, (len(column),))[chosen]
            return
        for row in map(int, chosen):
            found = _at(value[row], rest)
            if found is not None:
                column[row] = self.read(found)

    @property
    def name(self) -> str:
        """Name of the value in the info, for messages."""
        return INFO_KEY + "".join(f"[{name!r}]" for name in self.path)


class InfoLayout:
    """Entries of an environment's info, with their layout.

    Args:
        entries: the path, the key and the space of each entry.
    """

    def __init__(self, entries: Iterable[tuple[Key, Key, Space[Any]]]) -> None:
        nest: dict[str, Any] = {}
        self.leaves: list[InfoLeaf] = []
        for path, key, space in entries:
            _place(nest, key, space)
            self.leaves.extend(_leaves(space, path, key))
        self.space = _dict_space(nest)

    def sample(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries in the info of a single environment, nested as in ``space``."""
        return self.nest(leaf.read(leaf.find(info)) for leaf in self.leaves)

    def columns(self, num_envs: int) -> list[Any]:
        """Returns blank values of each leaf for a batch of environments."""
        return [leaf.column(num_envs) for leaf in self.leaves]

    def fill(
        self, columns: Sequence[Any], info: Any, rows: Mask | None = None, names: Any = None
    ) -> None:
        """Writes values from the info of a vector environment.

        Args:
            columns: a column for each leaf.
            info: the info of a step or a reset.
            rows: mask of the sub-environments to write; None for all.
            names: the entries to write; None for all.
        """
        for leaf, column in zip(self.leaves, columns, strict=True):
            if names is None or leaf.path[0] in names:
                leaf.fill(column, info, rows)

    def clear(self, columns: Sequence[Any], rows: Mask, names: Any = None) -> None:
        """Makes some rows blank; ``names`` are the entries to clear, None for all."""
        for leaf, column in zip(self.leaves, columns, strict=True):
            if names is None or leaf.path[0] in names:
                for row in np.flatnonzero(rows):
                    column[row] = leaf.blank

    def nest(self, values: Iterable[Any]) -> dict[str, Any]:
        """Returns values of the leaves, nested as in ``space``."""
        result: dict[str, Any] = {}
        for leaf, value in zip(self.leaves, values, strict=True):
            _place(result, leaf.key, value)
        return result


def _place(nest: dict[str, Any], key: Key, value: Any) -> None:
    for name in key[:-1]:
        nest = nest.setdefault(name, {})
    nest[key[-1]] = value


def _dict_space(nest: Mapping[str, Any]) -> spaces.Dict:
    parts = {name: _dict_space(v) if isinstance(v, dict) else v for name, v in nest.items()}
    return spaces.Dict(parts)


def _at(value: Any, path: Sequence[str]) -> Any:
    """Returns a nested value, or None if it is missing."""
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _leaves(space: Space[Any], path: Key, key: Key) -> Iterable[InfoLeaf]:
    if isinstance(space, spaces.Dict):
        for name, child in space.spaces.items():
            yield from _leaves(child, (*path, name), (*key, name))
    elif isinstance(space, (spaces.Box, spaces.MultiBinary)):
        assert space.shape is not None
        yield InfoLeaf(path, key, space.shape, space.dtype, np.zeros(space.shape, space.dtype))
    elif isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        assert space.shape is not None
        blank = np.full(space.shape, space.start, space.dtype)
        yield InfoLeaf(path, key, space.shape, space.dtype, blank)
    else:
        yield InfoLeaf(path, key, (), None, "" if isinstance(space, spaces.Text) else None)
