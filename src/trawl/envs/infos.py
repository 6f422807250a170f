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
from typing_extensions import override

from trawl.envs.final_obs import FINAL_OBS
from trawl.memory import Array, Mask

INFO_KEY = "info"
InfoKeys = Sequence[str] | Mapping[str, Any]

_RESERVED = (*FINAL_OBS, "final_info")


class AnyValue(Space[Any]):
    """Space of values without a fixed layout, such as text, that are stored unchanged."""

    def __init__(self) -> None:
        super().__init__()

    @override
    def sample(self, mask: Any = None, probability: Any = None) -> None:
        return None

    @override
    def contains(self, x: Any) -> bool:
        return True

    @property
    @override
    def is_np_flattenable(self) -> bool:
        return False

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyValue)

    @override
    def __repr__(self) -> str:
        return "AnyValue()"


@dataclass(frozen=True, eq=False)
class InfoLeaf:
    """One value in the info.

    Attributes:
        path: names that lead to the value.
        shape: shape of the value.
        dtype: dtype of the value; None if the value is stored unchanged.
        blank: value for a step or a reset whose info lacks the entry.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any] | None
    blank: Any

    def read(self, value: Any) -> Any:
        """Returns a value in the leaf's shape and dtype; a value of None counts as missing.

        Raises:
            ValueError: if the value has another shape.
            TypeError: if the value can't be converted to the dtype without loss.
        """
        if self.dtype is None:
            return value
        if (
            value.__class__ is np.ndarray
            and value.dtype is self.dtype
            and value.shape == self.shape
        ):
            return value
        return self.blank if value is None else self.read_batch(value, ())

    def read_batch(self, values: Any, batch: tuple[int, ...]) -> Array:
        """Returns values of all environments in a batch as one array."""
        assert self.dtype is not None
        array, shape = as_array(values), (*batch, *self.shape)
        if array is None:
            raise TypeError(
                f"{self._name()} is {type(values).__name__} {values!r}, but info_keys says "
                f"{self.dtype} of shape {self.shape}. For a value that is not always a number or "
                f"an array, write info_keys={{{self.path[0]!r}: object}}"
            )
        if array.shape != shape:
            # A number may come as an array of one element, or the other way round.
            if array.size != np.prod(shape) or int(np.prod(self.shape)) != 1:
                raise ValueError(
                    f"{self._name()} has shape {array.shape[len(batch) :]}, but it had, or "
                    f"info_keys says, {self.shape}. For values of several shapes, write "
                    f"info_keys={{{self.path[0]!r}: object}}"
                )
            array = array.reshape(shape)
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise TypeError(
                f"{self._name()} is {array.dtype}, but it was, or info_keys says, {self.dtype}: "
                f"state its space, as in info_keys={{{self.path[0]!r}: gymnasium.spaces.Box(...)}}"
            )
        return array.astype(self.dtype, copy=False)

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

    def _name(self) -> str:
        return INFO_KEY + "".join(f"[{name!r}]" for name in self.path)


class InfoLayout:
    """Entries of an environment's info, with their layout.

    Args:
        entries: the space of each entry.
    """

    def __init__(self, entries: Mapping[str, Space[Any]]) -> None:
        self.space = spaces.Dict(dict(entries))
        self.leaves = list(_leaves(self.space, ()))
        self._single = [(leaf, leaf.path[0], leaf.path[1:]) for leaf in self.leaves]
        self._flat = all(len(leaf.path) == 1 for leaf in self.leaves)

    def sample(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the entries in the info of a single environment, nested as in ``space``."""
        if self._flat:
            return {name: leaf.read(info.get(name, leaf.blank)) for leaf, name, _ in self._single}
        values = []
        for leaf, name, rest in self._single:
            value = info.get(name)
            found = _at(value, rest) if rest else value
            values.append(leaf.blank if found is None else leaf.read(found))
        return self.nest(values)

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
            place = result
            for name in leaf.path[:-1]:
                place = place.setdefault(name, {})
            place[leaf.path[-1]] = value
        return result


def _at(value: Any, path: Sequence[str]) -> Any:
    """Returns a nested value, or None if it is missing."""
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            return None
        value = value[name]
    return value


def _leaves(space: spaces.Dict, path: tuple[str, ...]) -> Iterable[InfoLeaf]:
    for name, child in space.spaces.items():
        place = (*path, name)
        if isinstance(child, spaces.Dict):
            yield from _leaves(child, place)
        elif isinstance(child, (spaces.Box, spaces.MultiBinary)):
            assert child.shape is not None
            yield InfoLeaf(place, child.shape, child.dtype, np.zeros(child.shape, child.dtype))
        elif isinstance(child, (spaces.Discrete, spaces.MultiDiscrete)):
            assert child.shape is not None
            blank = np.full(child.shape, child.start, child.dtype)
            yield InfoLeaf(place, child.shape, child.dtype, blank)
        else:
            blank_text = "" if isinstance(child, spaces.Text) else None
            yield InfoLeaf(place, (), None, blank_text)


def as_array(value: Any) -> Array | None:
    """Returns numbers as an array; None if a value is not a number or an array of numbers."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    return array if array.dtype.kind in "biuf" else None


def box(shape: Sequence[int], dtype: Any) -> spaces.Box:
    """Returns the space of all arrays of a shape and dtype; numbers become vectors of length 1."""
    kind = np.dtype(dtype)
    low: float = -np.inf
    high: float = np.inf
    if kind.kind == "b":
        low, high = 0, 1
    elif kind.kind in "iu":
        low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    return spaces.Box(low, high, tuple(shape) or (1,), kind.type)


def space_of(value: Any) -> Space[Any]:
    """Returns the space of values that have the same layout as ``value``."""
    if isinstance(value, Mapping) and value:
        return spaces.Dict({str(name): space_of(child) for name, child in value.items()})
    array = as_array(value)
    return AnyValue() if array is None else box(array.shape, array.dtype)


def given_spaces(info_keys: InfoKeys) -> dict[str, Space[Any] | None]:
    """Returns the names in ``info_keys`` with the given spaces; None where there is none.

    Raises:
        TypeError: if ``info_keys`` is neither a list of names nor a mapping from names to spaces.
        ValueError: if a name is repeated or reserved.
    """
    expected = (
        "info_keys must be a list of names, or a mapping from names to spaces, specs, object or "
        "None"
    )
    if isinstance(info_keys, (str, bytes)) or not isinstance(info_keys, (Sequence, Mapping)):
        raise TypeError(f"{expected}, but it is {info_keys!r}")
    for name in info_keys:
        if not isinstance(name, str):
            raise TypeError(f"{expected}, but it has a name {name!r}")
        if name in _RESERVED:
            raise ValueError(
                f"info_keys has {name!r}, which vector environments use for the end of episodes: "
                "batches have the last observations under 'next'"
            )
    if isinstance(info_keys, Mapping):
        return {name: _given(name, spec) for name, spec in info_keys.items()}
    if len(set(info_keys)) < len(info_keys):
        raise ValueError(f"info_keys has a name more than once: {list(info_keys)!r}")
    return dict.fromkeys(info_keys)


def _given(name: str, spec: Any) -> Space[Any] | None:
    if spec is None or isinstance(spec, Space):
        return spec
    if spec is object or spec is str:
        return AnyValue()
    if isinstance(spec, Mapping) or (hasattr(spec, "items") and hasattr(spec, "keys")):
        parts = {str(key): _given(name, part) for key, part in spec.items()}
        if None not in parts.values():
            return spaces.Dict(parts)  # type: ignore[arg-type]
    shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
    if shape is not None and isinstance(dtype, (torch.dtype, np.dtype)):
        kind = (
            torch.empty(0, dtype=dtype).numpy().dtype if isinstance(dtype, torch.dtype) else dtype
        )
        return box(shape, kind)
    raise TypeError(
        f"info_keys[{name!r}] must be a gymnasium space, a spec with a shape and a dtype, a "
        f"mapping of these, object (for text and other values without a layout) or None, but it "
        f"is {spec!r}"
    )
