"""Conversion of the attributes of objects to plain data, and back.

Plain data consists of numbers, strings, bytes, tensors, lists and dictionaries. Objects of other
classes are never made from data: their attributes are written into the existing object in the same
place.
"""

from __future__ import annotations

import dis
import gc
import random
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from gymnasium import Env, Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import GraphInstance
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from trawl.schema.checks import MOST_BITS, bit_generator, numpy_dtype

_PLAIN = (type(None), bool, int, float, str, bytes)
_TENSORS = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)
_CONTAINERS = (list, tuple, deque, dict)
# Number of items of a container that are looked at, and of bytes of an array that count as an item.
_LOOKED_AT, _BYTES_PER_ITEM = 1000, 256
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {"list": list, "tuple": tuple}
_FIXED = (types.ModuleType, np.dtype, np.ufunc, type, EnvSpec, AutoresetMode)
# Windows and images of renderers, on which no step depends.
_SHOWN = frozenset({"pygame.surface.Surface", "pygame.time.Clock", "pygame.font.Font"})
# Attributes of Gymnasium that never change.
_CONSTANT = frozenset({"_saved_kwargs", "_cached_spec", "_metadata", "metadata", "spec"})
# Attributes of SyncVectorEnv that never change.
_FACTORIES = frozenset({"env_fns"})


class _Simple:
    """An empty class, with the smallest possible instances."""


class NotPlain(Exception):
    """Raised with the reason why a value can't be captured as plain data."""


class Encoder:
    """Converts the attributes of objects to plain data.

    Args:
        members: objects that values may refer to, and that are not part of the data.
        most: number of items above which containers and arrays can't be captured; None for no
            limit.
        looks_only: True to find out if values can be captured, without copying arrays. Only the
            first items of containers are looked at.

    Attributes:
        fixed: additional classes whose instances do not change.
    """

    fixed: tuple[type, ...] = ()

    def __init__(
        self, members: Sequence[Any], *, most: int | None = None, looks_only: bool = False
    ) -> None:
        self._most = most
        self.looks_only = looks_only
        self._members = {id(member): index for index, member in enumerate(members)}
        # Values that other values may refer to, by identity; kept alive so that ids stay unique.
        self._seen: dict[int, tuple[int, Any]] = {}
        self._arrays: list[np.ndarray[Any, Any]] = []

    def attributes(self, owner: Any, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Returns the attributes of an object that may change.

        Args:
            owner: the object.
            skip: names of attributes to leave out.

        Raises:
            NotPlain: if an attribute can't be captured.
        """
        if self.looks_only and not skip:
            self._look_at(owner)
            return {}
        found = {}
        constant = constant_names(owner)
        # Sorted, because environments may set attributes in different orders.
        for name, value in sorted(_attributes(owner).items()):
            if name in skip or name in constant or self.is_fixed(value):
                continue
            try:
                found[name] = self.encode(value, inside=False)
            except NotPlain as error:
                raise NotPlain(f"{type(owner).__name__}.{name}, {error}") from None
        return found

    def _look_at(self, owner: Any) -> None:
        """Finds out if the attributes of an object can be captured, by their values alone."""
        for value in _values(owner):
            if not self.is_fixed(value):
                self.encode(value, inside=False)

    def some_attributes(self, owner: Any) -> dict[str, Any]:
        """Returns the attributes of an object that may change and can be captured."""
        found: dict[str, Any] = {}
        for name, value in sorted(_attributes(owner).items()):
            if name in _CONSTANT:
                continue
            if type(value) in _PLAIN:
                found[name] = value
                continue
            if self.is_fixed(value):
                continue
            before = len(self._seen), len(self._arrays)
            try:
                found[name] = self.encode(value, inside=False)
            except NotPlain:
                # No other value may refer to parts of a value that was not captured.
                while len(self._seen) > before[0]:
                    self._seen.popitem()
                del self._arrays[before[1] :]
        return found

    def is_fixed(self, value: Any) -> bool:
        """Returns True for values that do not change while the environment is in use."""
        return is_fixed(value, self._members, self.fixed)

    def encode(self, value: Any, inside: bool = True) -> Any:
        """Returns a value as plain data; ``inside`` is True for values inside containers."""
        if type(value) in _PLAIN or (self.looks_only and inside and self.is_fixed(value)):
            return as_readable(value)
        if id(value) in self._members:
            return {"kind": "member", "number": self._members[id(value)]}
        if id(value) in self._seen:
            return {"kind": "same", "number": self._seen[id(value)][0]}
        number = len(self._seen)
        self._seen[id(value)] = number, value
        return {"number": number, **self._encoded(value, inside)}

    def _encoded(self, value: Any, inside: bool) -> dict[str, Any]:
        kind = type(value)
        if isinstance(value, (np.ndarray, np.generic)):
            return self._array(value)
        if self._most is not None and kind in _CONTAINERS and len(value) > self._most:
            raise NotPlain(f"which has more than {self._most} items")
        if kind is torch.Tensor and value.device.type == "cpu" and value.dtype in _TENSORS:
            return {"kind": "tensor", **self._content(value.detach().numpy())}
        if kind.__name__ in _SEQUENCES and kind.__module__ == "builtins":
            return {"kind": kind.__name__, "items": self._items(value)}
        if kind is deque:
            return {"kind": "deque", "items": self._items(value), "maxlen": value.maxlen}
        if kind is dict:
            pairs = [list(map(self.encode, pair)) for pair in self._looked_at(value.items())]
            return {"kind": "dict", "items": pairs}
        if kind is GraphInstance:
            return {"kind": "graph", "items": [self.encode(item) for item in value]}
        if kind is np.random.Generator:
            if has_children(value):
                raise NotPlain("which is a generator that has spawned others")
            return {"kind": "generator", "state": self.encode(value.bit_generator.state)}
        if kind is np.random.RandomState:
            return {"kind": "random_state", "state": self.encode(value.get_state(legacy=False))}
        if kind is random.Random:
            return {"kind": "random", "state": self.encode(value.getstate())}
        if isinstance(value, Space):
            states = [space.np_random.bit_generator.state for space in _spaces(value)]
            return {"kind": "space", "states": self.encode(states)}
        # Lists of environments are made once, but lists of other objects may change.
        if (not inside or isinstance(value, (Env, VectorEnv))) and is_simple(kind):
            return {"kind": "object", "class": class_name(value), "vars": self.attributes(value)}
        raise NotPlain(f"which is a {class_name(value)}")

    def _array(self, value: Any) -> dict[str, Any]:
        array = np.asarray(value)
        if array.dtype.hasobject or array.dtype.fields is not None:
            raise NotPlain("which is an array of objects or records")
        if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
            raise NotPlain(f"which is a {class_name(value)}")
        if isinstance(value, np.generic):
            return {"kind": "scalar", **self._content(array)}
        owner = _owner(array)
        if owner is not array:
            return {
                "kind": "view",
                "of": self.encode(owner),
                "dtype": array.dtype.str,
                "shape": list(array.shape),
                "strides": list(array.strides),
                "offset": _address(array) - _address(owner),
            }
        if any(np.may_share_memory(array, other) for other in self._arrays):
            raise NotPlain("which is an array that shares its memory with another one")
        if not array.flags.c_contiguous:
            raise NotPlain("which is an array in another order than C's")
        self._arrays.append(array)
        return {"kind": "array", **self._content(array)}

    def _content(self, array: np.ndarray[Any, Any]) -> dict[str, Any]:
        if self.looks_only:
            return {}
        if self._most is not None and array.nbytes > self._most * _BYTES_PER_ITEM:
            raise NotPlain(f"which takes {array.nbytes:,} bytes")
        # None, because torch.load(weights_only=True) refuses empty bytes.
        data = array.tobytes() or None
        return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}

    def _items(self, values: Iterable[Any]) -> list[Any]:
        return [self.encode(value) for value in self._looked_at(values)]

    def _looked_at(self, values: Iterable[Any]) -> Iterable[Any]:
        return islice(values, _LOOKED_AT) if self.looks_only else values


def constant_names(owner: Any) -> frozenset[str]:
    """Returns the names of the attributes of an object that never change."""
    return _CONSTANT | _FACTORIES if isinstance(owner, SyncVectorEnv) else _CONSTANT


def has_children(generator: np.random.Generator) -> bool:
    """Returns True if a generator has spawned others; its state does not include their number."""
    return bool(getattr(generator.bit_generator.seed_seq, "n_children_spawned", 0))


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


def _owner(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the array that owns the memory of a view, or the array itself."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def as_readable(value: Any) -> Any:
    """Returns a number, text or bytes in a form that torch.load(weights_only=True) reads."""
    if value == b"" and type(value) is bytes:
        return {"kind": "bytes"}
    if type(value) is int and value.bit_length() > MOST_BITS:
        return {"kind": "integer", "hex": hex(value)}
    return value


class Decoder:
    """Writes attributes that an :class:`Encoder` returned into objects.

    Args:
        members: the objects in place of the encoder's members.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        self._members = members
        self._made: dict[int, Any] = {}

    def write(self, owner: Any, attributes: Mapping[str, Any]) -> None:
        """Sets the attributes of an object.

        Raises:
            NotPlain: if a name is not one of an attribute that an encoder captures.
        """
        members = {id(member): index for index, member in enumerate(self._members)}
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
        members = {id(member): index for index, member in enumerate(self._members)}
        for name in vars(owner).keys() - kept - constant_names(owner):
            value = vars(owner)[name]
            if isinstance(value, Space):
                # The state is one from before the space was seeded.
                for space in _spaces(value):
                    vars(space)["_np_random"] = None
            elif not is_fixed(value, members):
                del vars(owner)[name]

    def decode(self, data: Any, present: Any = None) -> Any:
        """Returns the value that data describes; ``present`` is the present value in its place."""
        if type(data) in _PLAIN:
            return data
        if data["kind"] == "bytes":
            return b""
        if data["kind"] == "integer":
            return int(data["hex"], 16)
        if data["kind"] == "member":
            return self._members[data["number"]]
        if data["kind"] == "same":
            return self._made[data["number"]]
        # Values inside an object may refer to the object.
        self._made[data["number"]] = present
        made = self._made[data["number"]] = self._decoded(data, present)
        return made

    def _decoded(self, data: Mapping[str, Any], present: Any) -> Any:
        kind = data["kind"]
        if kind in _SEQUENCES:
            items = data["items"]
            alike = type(present).__name__ == kind and len(present) == len(items)
            before = present if alike else [None] * len(items)
            return _SEQUENCES[kind](map(self.decode, items, before))
        match kind:
            case "array" | "scalar" | "tensor":
                array = array_of(data)
                if kind == "tensor":
                    return torch.from_numpy(array)
                return array if kind == "array" else array[()]
            case "view":
                shape, strides = data["shape"], data["strides"]
                dtype, of = (
                    numpy_dtype(data["dtype"], "the dtype of a view"),
                    self.decode(data["of"]),
                )
                return np.ndarray(shape, dtype, of, data["offset"], strides)
            case "deque":
                return deque(map(self.decode, data["items"]), data["maxlen"])
            case "dict":
                inside = present if type(present) is dict else {}
                pairs: dict[Any, Any] = {}
                for name, item in data["items"]:
                    key = self.decode(name)
                    pairs[key] = self.decode(item, inside.get(key))
                return pairs
            case "graph":
                return GraphInstance(*map(self.decode, data["items"]))
            case "generator":
                return _generator(present, self.decode(data["state"]))
            case "random_state":
                known = type(present) is np.random.RandomState
                legacy = present if known else np.random.RandomState()
                legacy.set_state(self.decode(data["state"]))
                return legacy
            case "random":
                source = present if type(present) is random.Random else random.Random()
                source.setstate(self.decode(data["state"]))
                return source
            case "space":
                states = self.decode(data["states"])
                for space, state in zip(_spaces(present), states, strict=True):
                    space.np_random.bit_generator.state = state
                return present
        if kind != "object" or class_name(present) != data["class"]:
            raise NotPlain(f"which is a {class_name(present)} instead of a {data.get('class')}")
        self.write(present, data["vars"])
        return present


def array_of(data: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Returns the array whose content an :class:`Encoder` has converted."""
    dtype = numpy_dtype(data["dtype"], "the dtype of an array")
    content = data["data"]
    flat = np.frombuffer(content, dtype) if content else np.empty(0, dtype)
    return flat.reshape(data["shape"]).copy()


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


def _generator(present: Any, state: dict[str, Any]) -> np.random.Generator:
    """Returns a generator with a state; this is ``present`` if it has the same kind."""
    name = state["bit_generator"]
    found = present if type(present) is np.random.Generator else None
    if found is None or type(found.bit_generator).__name__ != name:
        found = np.random.Generator(bit_generator(name, "the kind of a generator"))
    found.bit_generator.state = state
    return found


def is_fixed(value: Any, members: Mapping[int, int], kinds: tuple[type, ...] = ()) -> bool:
    """Returns True for values that do not change while the environment is in use.

    Args:
        value: the value of an attribute.
        members: numbers of the environments of a wrapper chain, by identity.
        kinds: additional classes whose instances do not change.
    """
    if id(value) in members:
        return True
    if isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        return all(_is_constant(part, members, kinds) for part in parts)
    if isinstance(value, types.FunctionType):
        return _is_fixed_function(value, members, kinds)
    if isinstance(value, types.MethodType):
        return id(value.__self__) in members or isinstance(value.__self__, type)
    if isinstance(value, types.BuiltinFunctionType):
        # A method of an object may change the object.
        return value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    return (
        isinstance(value, (*_FIXED, *kinds))
        or (isinstance(value, Space) and not _draws(value))
        or class_name(value) in _SHOWN
    )


def _is_fixed_function(
    function: types.FunctionType, members: Mapping[int, int], kinds: tuple[type, ...]
) -> bool:
    """Returns True for a function that remembers nothing between two calls."""
    stores = {"STORE_DEREF", "STORE_GLOBAL"}
    if vars(function) or any(one.opname in stores for one in dis.get_instructions(function)):
        return False
    used = [cell.cell_contents for cell in function.__closure__ or ()]
    used += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    # A function may refer to itself.
    known = {**members, id(function): -1}
    return all(_is_constant(value, known, kinds) for value in used)


def _spaces(space: Any) -> list[Any]:
    """Returns a space and the spaces in it."""
    inner = getattr(space, "spaces", ())
    parts = inner.values() if isinstance(inner, Mapping) else inner
    return [space, *(found for part in parts for found in _spaces(part))]


def _draws(space: Any) -> bool:
    """Returns True if a space was seeded, or samples were drawn from it."""
    return any(vars(one).get("_np_random") is not None for one in _spaces(space))


def _is_constant(value: Any, members: Mapping[int, int], kinds: tuple[type, ...]) -> bool:
    """Returns True for values that a function uses but does not change, such as limits."""
    plain = type(value) in _PLAIN or isinstance(value, (np.ndarray, np.generic))
    return plain or is_fixed(value, members, kinds)


def same_data(one: Any, other: Any) -> bool:
    """Returns True if plain data without tensors are equal; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_data(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_data, one, other))
    return bool(one == other or (one != one and other != other))


def is_simple(kind: type) -> bool:
    """Returns True for a class whose instances have only the attributes in ``vars()``."""
    return _is_simple(kind)


@lru_cache(maxsize=1024)
def _is_simple(kind: Any) -> bool:
    classes = kind.__mro__[:-1]
    heap = all(one.__flags__ & 1 << 9 for one in classes)
    slots = any(vars(one).get("__slots__") for one in classes)
    # Instances of C++ classes are larger than instances of Python classes.
    own = kind.__basicsize__ <= _Simple.__basicsize__
    return heap and own and not slots and "__dict__" in dir(kind)


def class_name(value: Any) -> str:
    """Returns the full name of a value's class."""
    # Some extension types have no module.
    return f"{getattr(type(value), '__module__', '')}.{type(value).__qualname__}"
