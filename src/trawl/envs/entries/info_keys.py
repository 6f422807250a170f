"""The argument ``info_keys``: entries of ``info`` that a batch holds, their keys and layouts.

A layout that is not stated is found in the infos of a reset and of random steps. Each kind of
environment yields such infos, and :func:`seen_values` says when it has seen enough.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from typing_extensions import override

from trawl.envs.outcomes import FINAL_OBS, marks_presence
from trawl.keys import Key, as_key, show_key
from trawl.memory import Array

INFO_KEY = "info"
_RESERVED = (*FINAL_OBS, "final_info")
# Random steps that are taken to see values, at most and in any case: a reset may return an integer
# where steps return a float.
_MOST_STEPS, _LEAST_STEPS = 1000, 3


@dataclass(frozen=True, eq=False)
class InfoKey:
    """Entry of ``info`` that becomes an entry of batches.

    Args:
        name: name of the entry in ``info``. The name of an entry in a nested dictionary is a tuple,
            such as ``("episode", "r")``.
        spec: layout of the entry: a Gymnasium space, a spec, a mapping of these, ``str``,
            ``object``, or None to find the layout in the first values.
        key: key of the entry in a batch, at the root and under ``"next"``; by default,
            ``("info", *name)``.

    Raises:
        TypeError: if ``name`` or ``key`` is neither a string nor a tuple of strings, or if ``spec``
            has the wrong type.
        ValueError: if ``name`` is reserved, if ``key`` begins with ``"next"``, or if it ends with
            ``"is_init"``.

    Examples:
        >>> from trawl.envs import GymEnv, InfoKey
        >>> env = GymEnv("FrozenLake-v1", info_keys=[InfoKey("prob", key="probability")])
        >>> env.reset()["probability"].shape
        torch.Size([1])
        >>> env.close()
    """

    name: str | Sequence[str]
    spec: Any = None
    key: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        for what, value in (("name", self.name), ("key", self.key)):
            if value is not None or what == "name":
                _check_names(f"the {what} of an InfoKey", value)
        _given(self.name, self.spec)
        if self.path[0] in _RESERVED:
            raise ValueError(
                f"info_keys has {self.path[0]!r}, but vector environments use this name at the end "
                "of an episode: leave it out, because batches have the last observations under "
                "'next'"
            )
        if self.key is not None and as_key(self.key)[-1] == "is_init":
            raise ValueError(
                f"the key of an InfoKey is {self.key!r}, but a collector writes 'is_init' itself "
                "if a policy reads it: choose another key"
            )
        if self.key is not None and as_key(self.key)[0] == "next":
            raise ValueError(
                f"the key of an InfoKey is {self.key!r}, but the entry is both at the root of a "
                "batch and under 'next': leave 'next' out"
            )

    @property
    def path(self) -> Key:
        """Names that lead to the entry in ``info``."""
        return as_key(self.name)


InfoKeys = Sequence[str | Sequence[str] | InfoKey] | Mapping[Any, Any]


def _check_names(what: str, value: Any) -> None:
    if isinstance(value, str) and value:
        return
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not (is_list and len(value) and all(isinstance(part, str) for part in value)):
        raise TypeError(f"{what} must be a string or a tuple of strings, but it is {value!r}")


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


class AnyText(spaces.Text):
    """Space of all texts."""

    def __init__(self) -> None:
        super().__init__(2**31 - 1, min_length=0)

    @override
    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return ""

    @override
    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


@dataclass(frozen=True)
class InfoEntry:
    """Entry of ``info`` with everything that ``info_keys`` says about it.

    Attributes:
        path: names that lead to the entry in ``info``.
        space: the entry's space; None if it is not known yet.
        key: key in the batch; None if it follows from ``path``.
    """

    path: Key
    space: Space[Any] | None
    key: Key | None

    def paths(self) -> Iterator[Key]:
        """Yields the places in ``info`` where the entry may be.

        A name may itself have a slash; otherwise, a slash separates the names of nested entries.
        """
        yield self.path
        if len(self.path) == 1 and "/" in self.path[0] and self.space is None:
            yield tuple(self.path[0].split("/"))

    def located(self, known: Mapping[str, Any]) -> tuple[Key, Any] | None:
        """Returns the path of the entry, and its space or an example of its value.

        Args:
            known: spaces or examples of all entries, nested as in ``info``.

        Returns:
            The path and the space or value; None if there is no such entry.
        """
        if self.space is not None:
            return self.path, self.space
        for path in self.paths():
            value: Any = known
            for name in path:
                inner = value.spaces if isinstance(value, spaces.Dict) else value
                value = inner.get(name) if isinstance(inner, Mapping) else None
            if value is not None:
                return path, value
        return None


def given_entries(info_keys: InfoKeys) -> list[InfoEntry]:
    """Returns the entries that ``info_keys`` names.

    Raises:
        TypeError: if ``info_keys`` is neither a list of names nor a mapping from names to spaces.
        ValueError: if a name is reserved.
    """
    expected = (
        "info_keys must be a list of names and InfoKeys, or a mapping from names to spaces, specs, "
        "str, object or None"
    )
    if isinstance(info_keys, (str, bytes)) or not isinstance(info_keys, (Sequence, Mapping)):
        raise TypeError(f"{expected}, but it is {info_keys!r}")
    specs: Mapping[Any, Any] = info_keys if isinstance(info_keys, Mapping) else {}
    found = []
    for name in info_keys:
        if isinstance(name, InfoKey):
            entry = name
        else:
            _check_names(f"{expected}; a name", name)
            entry = InfoKey(name, specs.get(name))
        key = None if entry.key is None else as_key(entry.key)
        found.append(InfoEntry(entry.path, _given(entry.name, entry.spec), key))
    return found


def names_of(known: Mapping[str, Any]) -> list[str]:
    """Returns the names of all entries; those of nested entries are joined with slashes.

    Args:
        known: spaces or examples of all entries, nested as in ``info``.
    """
    names = []
    for name, value in known.items():
        names.append(name)
        inner = value.spaces if isinstance(value, spaces.Dict) else value
        if isinstance(inner, Mapping):
            names += [f"{name}/{one}" for one in names_of(inner)]
    return sorted(names)


def kept_values(
    info: Mapping[str, Any], keep: Callable[[Any], Any], merged: bool = False
) -> dict[str, Any]:
    """Returns the values of an info, nested as in it, that a function returns for its values.

    Args:
        info: the info.
        keep: function that returns None for values to leave out.
        merged: True to leave out the masks ``"_name"`` of the infos of a batch.
    """
    found: dict[str, Any] = {}
    for name, value in info.items():
        if isinstance(value, Mapping):
            kept = kept_values(value, keep, merged) or None
        else:
            kept = keep(value)
        if kept is not None and not (merged and marks_presence(name, dict(info))):
            found[name] = kept
    return found


def seen_values(
    takes: Generator[Iterable[tuple[str, Mapping[str, Any]]]],
    wanted: Mapping[str, Sequence[InfoEntry]],
    least: int = _LEAST_STEPS,
    promote: Callable[[Any, Any], Any] = np.result_type,
) -> dict[str, dict[str, Any]]:
    """Returns examples of all entries in infos, by group of agents.

    Args:
        takes: yields the infos of a reset, and then of each of many random steps, each with the
            name of its group.
        wanted: the entries whose layouts have to be found, by group. Steps are taken until each
            has been seen, or 1000 times.
        least: number of steps that are taken in any case.
        promote: function that returns a dtype that holds the values of two others.
    """
    seen: dict[str, dict[str, Any]] = {group: {} for group in wanted}
    with closing(takes):
        for step, infos in enumerate(takes):
            for group, info in infos:
                shown = {name: info[name] for name in info if name not in _RESERVED}
                seen[group] = _merged(seen[group], shown, promote)
            found = (one.located(seen[group]) for group in wanted for one in wanted[group])
            if (step >= least and all(found)) or step == _MOST_STEPS:
                break
    return seen


def _merged(old: Any, new: Any, promote: Callable[[Any, Any], Any]) -> Any:
    """Returns a value with a layout that fits both values."""
    if old is None or new is None:
        return new if old is None else old
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        every = {**old, **new}
        return {name: _merged(old.get(name), new.get(name), promote) for name in every}
    one, other = as_array(old), as_array(new)
    if one is None or other is None:
        return old if one is None or isinstance(new, Mapping) else new
    if one.shape == other.shape and one.dtype != other.dtype:
        return one.astype(promote(one.dtype, other.dtype))
    return old


def placed_entries(
    given: Sequence[InfoEntry], known: Mapping[str, Any], describe: Callable[[], str]
) -> list[tuple[Key, Key, Space[Any]]]:
    """Returns the path, the key and the space of each entry.

    Args:
        given: the entries.
        known: spaces or examples of all entries, nested as in ``info``.
        describe: function that returns, for an error message, which entries there are, such as
            "the info of env has only ['lives']".

    Raises:
        ValueError: if there is no such entry, or if two keys clash.
    """
    found = []
    for entry in given:
        located = entry.located(known)
        if located is None:
            name = show_key(entry.path)
            raise ValueError(
                f"info_keys has {name}, but {describe()}. If the entry appears later than "
                f"the first episodes, state its space, or str for a text: "
                f"info_keys={{{name}: gymnasium.spaces.Box(...)}}"
            )
        path, value = located
        space = value if isinstance(value, Space) else space_of(value)
        found.append((path, entry.key or (INFO_KEY, *path), space))
    _check_keys_differ([key for _, key, _ in found])
    return found


def _check_keys_differ(keys: Sequence[Key]) -> None:
    """Raises a ``ValueError`` if two entries have the same key, or one is inside the other."""
    for index, key in enumerate(keys):
        for other in keys[:index]:
            if key == other:
                raise ValueError(f"info_keys has {show_key(key)} more than once")
            short = min(len(key), len(other))
            if key[:short] == other[:short]:
                raise ValueError(
                    f"info_keys has {show_key(other)} and {show_key(key)}, but one contains "
                    "the other: leave one out, or give it another key with InfoKey(..., key=...)"
                )


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
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
        return spaces.Dict({str(name): space_of(child) for name, child in value.items()})
    if isinstance(value, str):
        return AnyText()
    array = as_array(value)
    return AnyValue() if array is None else box(array.shape, array.dtype)


def _given(name: Any, spec: Any) -> Space[Any] | None:
    if spec is None or isinstance(spec, Space):
        return spec
    if spec is object:
        return AnyValue()
    if spec is str:
        return AnyText()
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
        f"mapping of these, str (for text), object (for other values without a layout) or None, "
        f"but it is {spec!r}"
    )
