"""Entries that a batch takes from the infos of an environment.

An :class:`InfoLayout` is made once for each environment, from the argument ``info_keys``. Its
leaves read infos of every kind: of single environments and agents, and of batches of arrays and
tensors. They reject values that don't fit. A value that is missing from an info becomes zeros or,
if it is not a number or an array, None.

The entries become leaves of the observations. :class:`InfoCodec` encodes them for a single
environment, and an :class:`InfoReader` for a batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor
from typing_extensions import override

from trawl.envs.entries.info_keys import INFO_KEY, as_array
from trawl.envs.entries.spaces import SpaceCodec, SpaceLeaf, SpaceOps
from trawl.envs.outcomes import Outcome
from trawl.keys import Key, show_key
from trawl.memory import Array, Mask

_FINAL_INFO = "final_info"


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
                f"{self._keys('object')}"
            )
        return value

    def read_batch(self, values: Any, batch: tuple[int, ...]) -> Array:
        """Returns values of all environments in a batch as one array."""
        assert self.dtype is not None
        given = as_array(values)
        if given is None:
            raise TypeError(
                f"{self.name} is {type(values).__name__} {values!r}, but its layout is "
                f"{self.dtype} of shape {self.shape}. For a value that is not always a number or "
                f"an array, write {self._keys('object')}"
            )
        array: Array = self.fitted(given, batch)
        if np.can_cast(array.dtype, self.dtype, "safe"):
            return array.astype(self.dtype, copy=False)
        return self._narrowed(array)

    def fitted(self, array: Any, batch: tuple[int, ...] = ()) -> Any:
        """Returns numbers, in an array of numpy or JAX, in the shape of the leaf.

        Raises:
            ValueError: if they have another shape.
            TypeError: if the leaf's dtype is of another kind.
        """
        shape = (*batch, *self.shape)
        if array.shape != shape:
            # A number may come as an array of one element, or the other way round.
            if array.size != math.prod(shape) or math.prod(self.shape) != 1:
                # JAX has no values of several shapes.
                several = f". For values of several shapes, write {self._keys('object')}"
                raise ValueError(
                    f"{self.name} has shape {array.shape[len(batch) :]}, but its layout, as first "
                    f"seen or as stated in info_keys, has shape {self.shape}"
                    f"{several if isinstance(array, np.ndarray) else ''}"
                )
            array = array.reshape(shape)
        assert self.dtype is not None
        if not np.can_cast(array.dtype, self.dtype, "same_kind"):
            raise TypeError(
                f"{self.name} is {array.dtype}, but its layout, as first seen or as stated in "
                f"info_keys, is {self.dtype}: state its space, as in "
                f"{self._keys('gymnasium.spaces.Box(...)')}"
            )
        return array

    def _keys(self, layout: str) -> str:
        """Returns an argument that states a layout, for messages."""
        return f"info_keys={{{self.path[0]!r}: {layout}}}"

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
                f"space, as in {self._keys('gymnasium.spaces.Box(...)')}"
            )
        return narrow

    def column(self, num_envs: int) -> Any:
        """Returns blank values for a batch of environments."""
        if self.dtype is None:
            return [self.blank] * num_envs
        column = np.empty((num_envs, *self.shape), self.dtype)
        column[...] = self.blank
        return column

    def _walk(self, info: Any) -> tuple[Any, list[Any], list[str]]:
        """Walks along the path in the info of a batch.

        Returns:
            The value, or None; the masks ``"_name"`` of the rows that have a value ``"name"``; and
            the rest of the path if each row has a dictionary of its own.
        """
        value, marks, rest = info, [], list(self.path)
        while rest and isinstance(value, Mapping):
            name = rest.pop(0)
            if value.get(f"_{name}") is not None:
                marks.append(value[f"_{name}"])
            value = value.get(name)
        return value, marks, rest

    def fill(self, column: Any, info: Any, rows: Mask | None) -> None:
        """Writes the values that the info of a batch has for the leaf.

        Args:
            column: the values of all environments.
            info: the info: a dict of merged values, or a list of dicts.
            rows: mask of the environments to write; None for all.
        """
        value, marks, rest = self._walk(info)
        if value is None:
            return
        mask = np.ones(len(column), np.bool_) if rows is None else rows
        for marked in marks:
            mask = mask & marked
        chosen = np.flatnonzero(mask)
        if not len(chosen):
            return
        whole = self.dtype is not None and not rest
        if whole and isinstance(value, (np.ndarray, Tensor)) and value.dtype != object:
            column[chosen] = self.read_batch(value, (len(column),))[chosen]
            return
        for row in map(int, chosen):
            found = value_at(value[row], rest)
            if found is not None:
                column[row] = self.read(found)

    def tensor(self, info: Any, blank: Tensor) -> Tensor:
        """Returns the values that the info of a batch of tensors has for the leaf.

        Args:
            info: the info: a dict of tensors with a row for each environment.
            blank: the values of rows that the info lacks.
        """
        value, marks, rest = self._walk(info)
        if value is None or rest:
            # A copy, because a state that is loaded is written into what was shown last.
            return blank.clone()
        shown = self._checked_tensor(value, blank)
        for marked in marks:
            shown = rows_of(marked, shown, blank)
        return shown

    def _checked_tensor(self, value: Any, blank: Tensor) -> Tensor:
        name = self.name
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch tensor, but it is {type(value).__name__}")
        if value.device != blank.device:
            raise ValueError(
                f"{name} is on {value.device}, but the environment's data are on {blank.device}"
            )
        if value.shape == blank.shape[:1] and self.shape == (1,):
            value = value.unsqueeze(-1)
        if value.shape != blank.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, but it had, or info_keys says, "
                f"{tuple(blank.shape)}: one row for each environment"
            )
        if not torch.can_cast(value.dtype, blank.dtype):
            raise TypeError(
                f"{name} is {value.dtype}, but it was, or info_keys says, {blank.dtype}"
            )
        shown: Tensor = value.to(blank.dtype)
        return shown

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

    def check_fixed(self, why: str) -> None:
        """Raises a ``ValueError`` if an entry has no fixed layout; ``why`` says what it must be."""
        for leaf in self.leaves:
            if leaf.dtype is None:
                raise ValueError(
                    f"info_keys says that {show_key(leaf.path)} has no fixed layout, but {why}: "
                    "state a space, or leave the name out"
                )

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


def value_at(value: Any, path: Sequence[str]) -> Any:
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


def rows_of(mask: Any, one: Any, other: Any) -> Any:
    """Returns the rows of ``one`` where ``mask`` is True, and those of ``other`` elsewhere."""
    if isinstance(one, Tensor):
        return torch.where(mask.view(-1, *[1] * (one.ndim - 1)), one, other)
    if isinstance(one, np.ndarray):
        return np.where(mask.reshape(-1, *[1] * (one.ndim - 1)), one, other)
    return [a if chosen else b for chosen, a, b in zip(mask, one, other, strict=True)]


# --- observations with entries of the info


class InfoMerger:
    """Adds entries of the info to observations.

    Args:
        observed: the observation space of one environment.
        layout: layout of the entries.

    Attributes:
        space: the observation space with the entries.
        layout: layout of the entries.

    Raises:
        ValueError: if an observation has the name of an entry.
    """

    def __init__(self, observed: Space[Any], layout: InfoLayout) -> None:
        self.layout = layout
        # The copy has a random generator of its own.
        observed = copy.deepcopy(observed)
        self._nested = isinstance(observed, spaces.Dict)
        parts = dict(observed.spaces) if isinstance(observed, spaces.Dict) else {}
        if not self._nested:
            parts["observation"] = observed
        for name in layout.space.spaces:
            if name in parts:
                raise ValueError(
                    f"info_keys adds an entry {name!r} to the observation, which already has one: "
                    "pass another key, as in InfoKey(..., key=...), or rename the observation "
                    "with a wrapper"
                )
        self.space = spaces.Dict({**parts, **layout.space.spaces})

    def __call__(self, obs: Any, values: Iterable[Any]) -> dict[str, Any]:
        """Returns an observation with the values of all leaves of the info."""
        infos = self.layout.nest(values)
        return {**obs, **infos} if self._nested else {"observation": obs, **infos}

    def path(self, path: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the path of a merged observation in the observation without the info."""
        return path if self._nested else path[1:]

    def places(self, leaves: Sequence[SpaceLeaf]) -> list[int]:
        """Returns which leaves of the merged observations come from the info."""
        own = [leaf.key for leaf in self.layout.leaves]
        return [
            index
            for index, leaf in enumerate(leaves)
            if any(leaf.path[: len(key)] == key for key in own)
        ]


class InfoCodec(SpaceCodec):
    """Codec of observations that have entries of the info.

    Args:
        merge: adds the entries to the observations.
        categorical: True to keep discrete values as indices instead of one-hot vectors.
        ops: operations on the arrays; by default, those of numpy.

    Attributes:
        merge: the argument.
        direct: the leaves that come from the info, by their index, if no leaf has to be encoded. A
            caller may then read these leaves from the info itself, and the others from the
            observation. Otherwise, None.
    """

    def __init__(
        self, merge: InfoMerger, categorical: bool = False, ops: SpaceOps | None = None
    ) -> None:
        super().__init__(merge.space, "observation", categorical, ops)
        self.merge = merge
        own = {leaf.key: leaf for leaf in merge.layout.leaves}
        found = {i: own.get(self.leaves[i].path) for i in merge.places(self.leaves)}
        self.direct: dict[int, InfoLeaf] | None = None
        if self.verbatim and None not in found.values():
            self.direct = found  # type: ignore[assignment]

    @override
    def encode(self, sample: Any, info: Any = None) -> list[Any]:
        found: Mapping[str, Any] = {} if info is None else info
        values = (leaf.read(leaf.find(found)) for leaf in self.merge.layout.leaves)
        return self.encode_merged(self.merge(sample, values))

    def encode_merged(self, sample: Any) -> list[Any]:
        """Returns the arrays of an observation to which the entries were added."""
        return super().encode(sample)


class BatchReader:
    """Reads the leaves of the observations of a batch of environments.

    Args:
        codec: codec of the observations.
    """

    def __init__(self, codec: SpaceCodec) -> None:
        self._encode: Callable[[Any], list[Any]] = codec.encode

    def read(self, obs: Any, info: Any, rows: Any = None) -> list[Any]:
        """Returns the leaves of an observation, and of the info that was returned with it.

        Args:
            obs: the observations.
            info: the info.
            rows: mask of the rows whose entries the info has; None for all.
        """
        return self._encode(obs)

    def read_step(self, obs: Any, info: Any, outcome: Outcome | None = None) -> list[Any]:
        """Returns the leaves of a step, whose outcome says which episodes have ended."""
        return self._encode(obs)

    def read_reset(self, obs: Any, info: Any, mask: Any, shown: list[Any]) -> list[Any]:
        """Returns the leaves after a reset of some rows.

        Args:
            obs: the observations of all rows.
            info: the info.
            mask: True in the rows that were reset.
            shown: the leaves before the reset; empty if there are none.
        """
        return self._encode(obs)

    def read_last(self, obs: Any, rows: Any = ...) -> list[Any]:
        """Returns the leaves of last observations that the last step has returned in its info.

        Args:
            obs: the observations.
            rows: index of the rows that they belong to.
        """
        return self._encode(obs)


class InfoReader(BatchReader):
    """Reads the leaves of a vector environment whose observations have entries of the info.

    Args:
        codec: codec of the observations with the entries.
        merge: adds the entries to the observations.
        num_envs: number of environments; None if an info has the entry ``"env_id"``, because it is
            only that of environments that are ready.
        same_step: True if the step that ends an episode begins the next one. The other entries of
            its info belong to the next episode, if it has ``"final_info"``.
        statistics: names of entries that wrappers around the vector environment add at the end of
            an episode, outside ``"final_info"``.
    """

    def __init__(
        self,
        codec: SpaceCodec,
        merge: InfoMerger,
        num_envs: int | None,
        same_step: bool = False,
        statistics: Sequence[str] = (),
    ) -> None:
        self._encode = codec.encode_merged if isinstance(codec, InfoCodec) else codec.encode
        self._merge, self._leaves = merge, merge.layout.leaves
        self._places = merge.places(codec.leaves)
        self._num_envs, self._same_step, self._statistics = num_envs, same_step, statistics
        # The entries of the last observations of the episodes that the last step ended.
        self._last: list[Any] = []

    @override
    def read(self, obs: Any, info: Any, rows: Any = None) -> list[Any]:
        return self._encode(self._merge(obs, self._columns(info, rows)))

    @override
    def read_step(self, obs: Any, info: Any, outcome: Outcome | None = None) -> list[Any]:
        columns = self._columns(info, None)
        self._last = self._ending(columns, info, outcome)
        return self._encode(self._merge(obs, columns))

    @override
    def read_reset(self, obs: Any, info: Any, mask: Any, shown: list[Any]) -> list[Any]:
        leaves = self.read(obs, info, mask)
        for index in self._places if shown else []:
            leaves[index] = rows_of(mask, leaves[index], shown[index])
        return leaves

    @override
    def read_last(self, obs: Any, rows: Any = ...) -> list[Any]:
        last = self._last if rows is ... else [column[rows] for column in self._last]
        return self._encode(self._merge(obs, last))

    def _columns(self, info: Any, rows: Any) -> list[Any]:
        """Returns the values of each leaf of the info, with a row for each environment."""
        count = len(info["env_id"]) if self._num_envs is None else self._num_envs
        columns = [leaf.column(count) for leaf in self._leaves]
        self._fill(columns, info, rows)
        return columns

    def _fill(self, columns: list[Any], info: Any, rows: Mask | None, names: Any = None) -> None:
        for leaf, column in zip(self._leaves, columns, strict=True):
            if names is None or leaf.path[0] in names:
                leaf.fill(column, info, rows)

    def _clear(self, columns: list[Any], rows: Mask, names: Any = None) -> None:
        for leaf, column in zip(self._leaves, columns, strict=True):
            if names is None or leaf.path[0] in names:
                for row in np.flatnonzero(rows):
                    column[row] = leaf.blank

    def _ending(self, columns: list[Any], info: Any, outcome: Outcome | None) -> list[Any]:
        """Returns the entries of last observations, given those of a step.

        It clears those entries of the step in ``columns`` that belong to the last observations.
        """
        ended = None
        if self._same_step and outcome is not None:
            ended = outcome.terminated | outcome.truncated
        if ended is None or not ended.any():
            return columns
        last = [column.copy() for column in columns]
        if isinstance(info, Mapping):
            final = info.get(_FINAL_INFO)
            marked = ended & info.get(f"_{_FINAL_INFO}", ended)
        else:
            final = [one.get(_FINAL_INFO, {}) for one in info]
            marked = np.array([_FINAL_INFO in one for one in info]) & ended
        if final is not None and marked.any():
            self._clear(last, marked)
            self._fill(last, final, marked)
        if self._statistics:
            self._fill(last, info, ended, self._statistics)
            self._clear(columns, ended, self._statistics)
        return last


class TensorInfoReader(InfoReader):
    """Reads the leaves of a vector environment, which are tensors; it never waits for the device.

    Args:
        codec: codec of the observations with the entries.
        merge: adds the entries to the observations.
        num_envs: number of environments.
        device: device of the environment's data.
    """

    def __init__(
        self, codec: SpaceCodec, merge: InfoMerger, num_envs: int, device: torch.device
    ) -> None:
        super().__init__(codec, merge, num_envs)
        self._blanks = [
            torch.as_tensor(leaf.column(num_envs), device=device) for leaf in self._leaves
        ]

    @override
    def _columns(self, info: Any, rows: Any) -> list[Any]:
        pairs = zip(self._leaves, self._blanks, strict=True)
        return [leaf.tensor(info, blank) for leaf, blank in pairs]

    @override
    def _ending(self, columns: list[Any], info: Any, outcome: Outcome | None) -> list[Any]:
        final = info.get(_FINAL_INFO)
        if final is None:
            return columns
        last, marked = self._columns(final, None), info.get(f"_{_FINAL_INFO}")
        if marked is None:
            return last
        return [rows_of(marked, *pair) for pair in zip(last, columns, strict=True)]
