"""Conversion of the attributes of objects to plain data, and back.

Plain data consists of numbers, strings, bytes, lists and dictionaries. An :class:`Encoder` walks
through values, and through what they contain. How values of a type are converted is registered with
:func:`register` (see :mod:`trawl.envs.capture.kinds`). Values that refer to the same object still
do so afterwards, and so do views of one array, and tensors that share memory. Tensors that share
memory with arrays can't be captured. Objects of other classes are never made from data: their
attributes are written into the existing object in the same place.
"""

from __future__ import annotations

import gc
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Env, Space
from gymnasium.vector import VectorEnv
from torch import Tensor

from trawl.envs.capture.fixed import class_name, constant_names, is_fixed, is_simple, spaces_in
from trawl.foreign.environments import unseed
from trawl.schema.checks import MOST_BITS, PLAIN

_CONTAINERS = (list, tuple, deque, dict)
# Number of items of a container that are looked at, and of bytes of an array that count as an item.
_LOOKED_AT, _BYTES_PER_ITEM = 1000, 256


class NotPlain(Exception):
    """Raised with the reason why a value can't be captured as plain data."""


class Encoder:
    """Converts the attributes of objects to plain data.

    Args:
        members: objects that values may refer to, and that are not part of the data.
        fixed: for a graph of objects with tensors, additional classes whose instances do not
            change. References to objects that do not change are part of the data of such a graph.
            None for other environments.
        most: number of items above which containers and arrays can't be captured; None for no
            limit.
        looks_only: True to find out if values can be captured, without copying arrays. Only the
            first items of containers are looked at.
        in_blocks: True to capture the memory of tensors, which they may share, as in graphs. By
            default, each tensor is captured by itself, as all earlier versions read it.
    """

    def __init__(
        self,
        members: Sequence[Any] = (),
        *,
        fixed: tuple[type, ...] | None = None,
        most: int | None = None,
        looks_only: bool = False,
        in_blocks: bool = False,
    ) -> None:
        self.in_graph, self._fixed = fixed is not None, fixed or ()
        self._most = most
        self.looks_only = looks_only
        self.in_blocks = in_blocks or looks_only or self.in_graph
        # Whether values can't be captured because tensors share memory.
        self.needs_blocks = False
        self.members = {id(member): index for index, member in enumerate(members)}
        # Values that other values may refer to, by identity; kept alive so that ids stay unique.
        self._seen: dict[int, tuple[int, Any]] = {}
        # Where the memory of arrays and tensors begins and ends, in order. None of it overlaps.
        self._memory: list[tuple[int, int]] = []
        # For each block of memory of tensors: its number, and a tensor that keeps it alive.
        self.blocks: dict[tuple[str, int], tuple[int, Tensor]] = {}

    def attributes(
        self, owner: Any, skip: frozenset[str] = frozenset(), *, some: bool = False
    ) -> dict[str, Any]:
        """Returns the attributes of an object that may change.

        Args:
            owner: the object.
            skip: names of attributes to leave out.
            some: True to leave out attributes that can't be captured.

        Raises:
            NotPlain: if an attribute can't be captured.
        """
        if self.looks_only and not skip:
            for value in _values(owner):
                if not self.is_fixed(value):
                    self.encode(value, inside=False)
            return {}
        left_out = skip | constant_names(owner)
        changing = {
            name: one
            for name, one in _attributes(owner).items()
            if name not in left_out and (type(one) in PLAIN or not self.is_fixed(one))
        }
        return self.named(type(owner).__name__, changing, some)

    def named(self, owner: str, values: Mapping[str, Any], some: bool = False) -> dict[str, Any]:
        """Returns values with names as plain data.

        Args:
            owner: the name of the values' object.
            values: the values by name.
            some: True to leave out values that can't be captured.

        Raises:
            NotPlain: if a value can't be captured.
        """
        found = {}
        # Sorted, because environments may set attributes in different orders.
        for name, value in sorted(values.items()):
            if type(value) in PLAIN:
                found[name] = _as_readable(value)
                continue
            before = len(self._seen), [*self._memory] if some else [], len(self.blocks)
            try:
                found[name] = self.encode(value, inside=False)
            except NotPlain as error:
                if not some:
                    raise NotPlain(f"{owner}.{name}, {error}") from None
                # No other value may refer to parts of a value that was not captured.
                while len(self._seen) > before[0]:
                    self._seen.popitem()
                self._memory = before[1]
                while len(self.blocks) > before[2]:
                    self.blocks.popitem()
        return found

    def is_fixed(self, value: Any) -> bool:
        """Returns True for values that do not change while the environment is in use."""
        return is_fixed(value, self.members, self._fixed)

    def encode(self, value: Any, inside: bool = True) -> Any:
        """Returns a value as plain data; ``inside`` is True for values inside containers."""
        if type(value) in PLAIN or (self.looks_only and inside and self.is_fixed(value)):
            return _as_readable(value)
        if id(value) in self.members:
            return {"kind": "member", "number": self.members[id(value)]}
        if id(value) in self._seen:
            return {"kind": "same", "number": self._seen[id(value)][0]}
        if self.in_graph and self.is_fixed(value):
            return {"kind": "fixed"}
        number = len(self._seen)
        self._seen[id(value)] = number, value
        return {"number": number, **self._encoded(value, inside)}

    def _encoded(self, value: Any, inside: bool) -> dict[str, Any]:
        kind: Any = type(value)
        if self._most is not None and kind in _CONTAINERS and len(value) > self._most:
            raise NotPlain(f"which has more than {self._most} items")
        known = _kind_of(kind)
        if known is not None and (self.in_graph or not known.in_graphs):
            return {"kind": known.name, **known.encode(self, value)}
        # Lists of environments are made once, but lists of other objects may change.
        if (not inside or isinstance(value, (Env, VectorEnv))) and is_simple(kind):
            return {"kind": "object", "class": class_name(value), "vars": self.attributes(value)}
        raise NotPlain(f"which is a {class_name(value)}")

    def content(self, array: np.ndarray[Any, Any]) -> dict[str, Any]:
        """Returns the layout and the bytes of an array."""
        if self.looks_only:
            return {}
        self.check_size(array.nbytes)
        # None, because torch.load(weights_only=True) refuses empty bytes.
        data = array.tobytes() or None
        return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}

    def check_apart(self, array: np.ndarray[Any, Any], why: str) -> None:
        """Checks that no other value has parts of the memory of an array, which has no strides < 0.

        Raises:
            NotPlain: for the reason ``why`` if another value has.
        """
        if not array.size:
            return
        start = array.__array_interface__["data"][0]
        last = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
        end = start + last + array.itemsize
        index = bisect(self._memory, (start,))
        near = self._memory[max(index - 1, 0) : index + 1]
        if any(start < its_end and its_start < end for its_start, its_end in near):
            raise NotPlain(why)
        self._memory.insert(index, (start, end))

    def check_size(self, nbytes: int) -> None:
        """Checks that memory is not too large."""
        if self._most is not None and nbytes > self._most * _BYTES_PER_ITEM:
            raise NotPlain(f"which takes {nbytes:,} bytes")

    def items(self, values: Iterable[Any]) -> list[Any]:
        """Returns the items of a container as plain data."""
        return [self.encode(value) for value in self.looked_at(values)]

    def looked_at(self, values: Iterable[Any]) -> Iterable[Any]:
        """Returns the items of a container that are converted."""
        return islice(values, _LOOKED_AT) if self.looks_only else values


class Decoder:
    """Writes attributes that an :class:`Encoder` returned into objects.

    Args:
        members: the objects in place of the encoder's members.
        in_graph: True if the encoder was one of a graph of objects.
        in_place: True to write all tensors in place, if their layout is unchanged. Otherwise, only
            shared memory is written in place, because other processes refer to it.
    """

    def __init__(
        self, members: Sequence[Any] = (), *, in_graph: bool = False, in_place: bool = False
    ) -> None:
        self.members = members
        self._in_graph = in_graph
        self.in_place = in_place
        self._made: dict[int, Any] = {}
        self.blocks: dict[int, torch.UntypedStorage] = {}
        self.written: set[int] = set()

    def write(self, owner: Any, attributes: Mapping[str, Any]) -> None:
        """Sets the attributes of an object.

        Raises:
            NotPlain: if a name is not one of an attribute that an encoder captures.
        """
        members = {id(member): index for index, member in enumerate(self.members)}
        for name, data in attributes.items():
            if not _is_captured(owner, name, data, members):
                raise NotPlain(f"{type(owner).__name__}.{name} is not a captured attribute")
        for name, data in attributes.items():
            vars(owner)[name] = self.decode(data, vars(owner).get(name))

    def replace(
        self, owner: Any, attributes: Mapping[str, Any], skip: frozenset[str] = frozenset()
    ) -> None:
        """Sets the attributes of an object, and deletes others that an encoder would capture.

        Args:
            owner: the object.
            attributes: all attributes that :meth:`Encoder.attributes` returned.
            skip: names of attributes that were left out.

        Raises:
            NotPlain: see :meth:`write`.
        """
        self.drop_others(owner, frozenset({*attributes, *skip}))
        self.write(owner, attributes)

    def drop_others(self, owner: Any, kept: frozenset[str]) -> None:
        """Deletes the attributes of an object that an encoder would capture, except some."""
        members = {id(member): index for index, member in enumerate(self.members)}
        for name in vars(owner).keys() - kept - constant_names(owner):
            value = vars(owner)[name]
            if isinstance(value, Space):
                # The state is one from before the space was seeded.
                for space in spaces_in(value):
                    unseed(space)
            elif not is_fixed(value, members):
                del vars(owner)[name]

    def decode(self, data: Any, present: Any = None) -> Any:
        """Returns the value that data describes; ``present`` is the present value in its place."""
        if type(data) in PLAIN:
            return data
        match data["kind"]:
            case "bytes":
                return b""
            case "integer":
                return int(data["hex"], 16)
            case "member":
                return self.members[data["number"]]
            case "same":
                return self._made[data["number"]]
            case "fixed":
                if present is None or not self._in_graph:
                    raise NotPlain("which holds an object that the environment doesn't have now")
                return present
        # Values inside an object may refer to the object.
        self._made[data["number"]] = present
        made = self._made[data["number"]] = self._decoded(data, present)
        return made

    def _decoded(self, data: Mapping[str, Any], present: Any) -> Any:
        known = _KINDS.get(data["kind"])
        if known is not None and (self._in_graph or not known.in_graphs):
            return known.decode(self, data, present)
        self.check_class(data, present)
        self.write(present, data["vars"])
        return present

    def check_class(self, data: Mapping[str, Any], present: Any) -> None:
        """Checks that the object in the place of a value is one of the value's class."""
        if class_name(present) != data.get("class"):
            raise NotPlain(f"which is a {class_name(present)} instead of a {data.get('class')}")


def _attributes(owner: Any) -> dict[str, Any]:
    if not is_simple(type(owner)):
        raise NotPlain(f"{type(owner).__name__} has more than the attributes in vars()")
    attributes: dict[str, Any] = vars(owner)
    return attributes


def _values(owner: Any) -> list[Any]:
    """Returns the values of an object's attributes, without asking for its ``vars()``.

    In Python 3.11 and 3.12, all attributes of an object take longer once its ``vars()`` exists.
    """
    if not is_simple(type(owner)):
        raise NotPlain(f"{type(owner).__name__} has more than the attributes in vars()")
    found = [value for value in gc.get_referents(owner) if value is not type(owner)]
    # If it exists, the object refers to it instead of the values.
    return list(vars(owner).values()) if [*map(type, found)] == [dict] else found


def _is_captured(owner: Any, name: str, data: Any, members: Mapping[int, int]) -> bool:
    """Returns True if an attribute with this name and value may be one that was captured."""
    if name in constant_names(owner):
        return False
    if name not in vars(owner):
        # An attribute would hide what the class defines under this name.
        found = getattr(type(owner), name, None)
        return not (callable(found) or hasattr(type(found), "__get__"))
    present = vars(owner)[name]
    kind = data["kind"] if isinstance(data, dict) else None
    return kind in ("space", "member", "fixed") or not is_fixed(present, members)


def _as_readable(value: Any) -> Any:
    """Returns a number, text or bytes in a form that torch.load(weights_only=True) reads."""
    if value == b"" and type(value) is bytes:
        return {"kind": "bytes"}
    if type(value) is int and value.bit_length() > MOST_BITS:
        return {"kind": "integer", "hex": hex(value)}
    return value


def difference(one: Any, other: Any, place: str = "") -> str | None:
    """Returns the place of the first difference between plain data without tensors, or None.

    NaN equals NaN.
    """
    pairs: Iterable[Any]
    if type(one) is type(other) is dict and one.keys() == other.keys():
        pairs = ((f"{place}[{key!r}]", one[key], other[key]) for key in one)
    elif type(one) is type(other) is list and len(one) == len(other):
        pairs = ((f"{place}[{i}]", *pair) for i, pair in enumerate(zip(one, other, strict=True)))
    else:
        same = type(one) is type(other) and (one == other or (one != one and other != other))
        return None if same else place or "everything"
    found = (difference(mine, its, at) for at, mine, its in pairs)
    return next(filter(None, found), None)


class _Kind(NamedTuple):
    name: str
    encode: Callable[[Encoder, Any], dict[str, Any]]
    decode: Callable[[Decoder, Mapping[str, Any], Any], Any]
    in_graphs: bool


_KINDS: dict[str, _Kind] = {}
_TYPES: dict[type, _Kind] = {}
_TESTS: list[tuple[Callable[[type], bool], _Kind]] = []


@lru_cache(maxsize=1024)
def _kind_of(kind: Any) -> _Kind | None:
    """Returns how values of a class are converted; None if nothing is registered for it."""
    return _TYPES.get(kind) or next((one for test, one in _TESTS if test(kind)), None)


def register(
    name: str,
    suits: type | tuple[type, ...] | Callable[[type], bool],
    encode: Callable[[Encoder, Any], dict[str, Any]],
    decode: Callable[[Decoder, Mapping[str, Any], Any], Any],
    *,
    in_graphs: bool = False,
) -> None:
    """Registers how values of a kind are converted.

    Args:
        name: the name of the kind in the data.
        suits: the class or the classes of the values, or a function that returns True for them; an
            empty tuple if another kind's ``encode`` returns this one.
        encode: function that returns the entries of the data for a value. They may include another
            ``"kind"``.
        decode: function that returns the value for the data, and for the present value in its
            place.
        in_graphs: True if only values in a graph of objects with tensors are converted. Those in
            other environments, which are often restored before their first reset, may have no
            object to restore the value in.
    """
    known = _KINDS[name] = _Kind(name, encode, decode, in_graphs)
    if isinstance(suits, (type, tuple)):
        _TYPES.update(dict.fromkeys([suits] if isinstance(suits, type) else suits, known))
    else:
        _TESTS.append((suits, known))
    _kind_of.cache_clear()
