"""Schema of values that an encoder has converted, and of generators of random numbers."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trawl.errors import StateError
from trawl.schema.checks import (
    MOST_DIMS,
    PLAIN,
    UNKNOWN,
    Check,
    anything,
    bit_generator,
    check_extent,
    data,
    entries,
    flag,
    integer,
    like_own,
    listed,
    number,
    numpy_dtype,
    one_of,
    optional,
    refuse,
    row,
    shown,
    sizes,
    table,
    text,
    torch_device,
    torch_dtype,
)

# --- values that an encoder has converted (see trawl.envs.capture.codec)


class Encoded:
    """Check of values that an :class:`~trawl.envs.capture.codec.Encoder` has converted.

    The values must be checked in the order in which they are decoded, because later values may
    refer to earlier ones.

    Args:
        members: number of objects that values may refer to.
        strict: whether values must have the types and the sizes of the object's own, unless one of
            them is None.
    """

    def __init__(self, members: int = 0, strict: bool = False) -> None:
        self._members, self.strict = members, strict
        # For each number of a value: its kind, and the bytes of an array.
        self._known: dict[int, tuple[str, int]] = {}
        # Numbered values of the state, and of the object's own.
        self._values: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self._blocks: dict[int, int] = {}

    def attributes(self, value: Any, place: str, own: Any) -> None:
        """Checks the attributes of an object, which are not objects that never change."""
        table(self.__call__, attribute_name)(value, place, own)
        for name, one in value.items():
            if type(one) is dict and one["kind"] in ("member", "fixed"):
                refuse(f"{place}[{name!r}]['kind']", "one of a captured attribute", one["kind"])

    def __call__(self, value: Any, place: str, own: Any) -> None:
        """Checks one value."""
        if self.strict:
            self._check_alike(value, place, own)
        mine = own.get("kind") if isinstance(own, Mapping) else own
        if mine in ("space", "object"):
            found = kind_of(value)
            if found == "same" and type(value.get("number")) is int:
                found = self._known.get(value["number"], ("",))[0]
            if found == "NoneType" and mine == "space":
                # Without its space, the environment might fail in a later step.
                raise StateError(
                    f"{place} is None, but the environment has a space there by now: load the "
                    "state into an environment that was just made"
                )
            # Spaces, unlike other objects, do not come and go.
            if found != mine and (mine == "space" or found != "NoneType"):
                raise StateError(f"{place} must be the state of an object ({mine})")
        if type(value) in PLAIN:
            return
        if type(value) is not dict or type(value.get("kind")) is not str:
            refuse(place, "a value that was captured", value)
        kind = value["kind"]
        if kind not in self._CHECKS:
            refuse(f"{place}['kind']", "the kind of a captured value", kind)
        if kind in _IN_PLACE and mine not in (kind, "same", UNKNOWN):
            raise StateError(
                f"{place} is the state of an object ({kind}), but the environment has none there"
            )
        entries(_FIELDS.get(kind, {}))(value, place, UNKNOWN)
        if kind not in _UNNUMBERED:
            integer()(value.get("number"), f"{place}['number']", UNKNOWN)
            self._known[value["number"]] = kind, 0
        self._CHECKS[kind](self, value, place, own if mine == kind else UNKNOWN)

    def _check_alike(self, value: Any, place: str, own: Any) -> None:
        """Checks that a value, or what it refers to, is like the object's own."""
        found = [
            _referred(one, known) for one, known in zip((value, own), self._values, strict=True)
        ]
        if not any(one is UNKNOWN or one is None for one in found):
            check_same_kind(found[0], place, found[1])

    def _simple(self, value: dict[str, Any], place: str, own: Any) -> None:
        """Accepts a value whose fields have been checked."""

    def _large(self, value: dict[str, Any], place: str, own: Any) -> None:
        if not re.fullmatch(r"-?0x[0-9a-f]{1,1000000}", value["hex"]):
            refuse(f"{place}['hex']", "a hexadecimal number", value["hex"])

    def _member(self, value: dict[str, Any], place: str, own: Any) -> None:
        integer(0, self._members - 1)(value.get("number"), f"{place}['number']", UNKNOWN)

    def _same(self, value: dict[str, Any], place: str, own: Any) -> None:
        number = value.get("number")
        if type(number) is not int or number not in self._known:
            refuse(f"{place}['number']", "the number of an earlier value", number)

    def _array(self, value: dict[str, Any], place: str, own: Any) -> None:
        if value["kind"] == "tensor" and "block" in value:
            self._tensor(value, place)
            return
        entries({"dtype": text, "shape": anything, "data": optional(data)})(value, place, UNKNOWN)
        dtype = numpy_dtype(value["dtype"], f"{place}['dtype']")
        count = sizes(value["shape"], f"{place}['shape']")
        if value["kind"] == "scalar" and value["shape"]:
            refuse(f"{place}['shape']", "empty, because the value is a scalar", value["shape"])
        found = value["data"] or b""
        if len(found) != count * dtype.itemsize or not (dtype.itemsize or not count):
            raise StateError(
                f"{place}['data'] must have {count * dtype.itemsize:,} bytes, but it has "
                f"{len(found):,}"
            )
        if dtype.kind == "U" and found:
            letters = np.frombuffer(found, dtype.newbyteorder(dtype.byteorder).str[0] + "u4")
            if letters.max() > _LARGEST_CHARACTER:
                raise StateError(f"{place}['data'] has a number that is no character")
        if value["kind"] == "tensor" and dtype.kind not in "biufc":
            refuse(f"{place}['dtype']", "the dtype of a tensor", value["dtype"])
        self._known[value["number"]] = value["kind"], len(found)

    def _view(self, value: dict[str, Any], place: str, own: Any) -> None:
        self(value["of"], f"{place}['of']", UNKNOWN)
        kind, total = self._known.get(_number_of(value["of"]), ("", 0))
        if kind != "array":
            refuse(f"{place}['of']", "an array", value["of"])
        dtype = numpy_dtype(value["dtype"], f"{place}['dtype']")
        if dtype.kind == "U":
            refuse(f"{place}['dtype']", "a dtype other than text", value["dtype"])
        sizes(value["shape"], f"{place}['shape']")
        check_extent(
            place, value["shape"], value["strides"], value["offset"], dtype.itemsize, total
        )
        self._known[value["number"]] = "view", 0

    def _tensor(self, value: dict[str, Any], place: str) -> None:
        entries({"block": integer(), "gradient": flag})(value, place, UNKNOWN)
        dtype = torch_dtype(value.get("dtype"), f"{place}['dtype']")
        torch_device(value.get("device"), f"{place}['device']")
        sizes(value.get("shape"), f"{place}['shape']")
        if value["block"] not in self._blocks:
            entries({"data": optional(data)})(value, place, UNKNOWN)
            self._blocks[value["block"]] = len(value["data"] or b"")
        total, strides = self._blocks[value["block"]] // dtype.itemsize, value.get("strides")
        check_extent(place, value["shape"], strides, value.get("offset"), 1, total)
        if any(stride < 0 for stride in value["strides"]):
            refuse(f"{place}['strides']", "numbers from 0", value["strides"])
        if value["gradient"] and not (dtype.is_floating_point or dtype.is_complex):
            refuse(f"{place}['gradient']", f"False, because the dtype is {value['dtype']}", True)

    def _items(self, value: dict[str, Any], place: str, own: Any) -> None:
        kind, items = value["kind"], value["items"]
        known = own["items"] if isinstance(own, Mapping) else UNKNOWN
        listed(self.__call__)(items, f"{place}['items']", known)
        if kind == "graph" and len(items) != 3:
            refuse(f"{place}['items']", "a list of 3", items)
        if kind == "deque":
            optional(integer(len(items)))(value.get("maxlen"), f"{place}['maxlen']", UNKNOWN)

    def _dict(self, value: dict[str, Any], place: str, own: Any) -> None:
        known = {}
        if isinstance(own, Mapping):
            known = {key: item for key, item in own["items"] if type(key) in PLAIN}
        listed(row(anything, anything))(value["items"], f"{place}['items']", UNKNOWN)
        for index, (key, item) in enumerate(value["items"]):
            at = f"{place}['items'][{index}]"
            self(key, f"{at}[0]", UNKNOWN)
            self._check_key(key, f"{at}[0]")
            mine = known.get(key, UNKNOWN) if type(key) in PLAIN else UNKNOWN
            self(item, f"{place}[{shown(key)}]", mine)
        plain = {key: item for key, item in value["items"] if type(key) is str}
        if type(plain.get("bit_generator")) is str:
            self._check_bit_generator(value, place)

    def _check_key(self, key: Any, place: str) -> None:
        """Checks that a value can be a key of a dictionary."""
        if type(key) in PLAIN:
            return
        kind = key["kind"] if key["kind"] != "same" else self._known[key["number"]][0]
        if kind not in _KEYS:
            refuse(place, "a key of a dictionary", key)
        if key["kind"] == "tuple":
            for index, item in enumerate(key["items"]):
                self._check_key(item, f"{place}[{index}]")

    def _generator(self, value: dict[str, Any], place: str, own: Any) -> None:
        kind, state = value["kind"], value["state"]
        self(state, f"{place}['state']", UNKNOWN)
        if kind == "random":
            check_python_generator(_decoded(state), place)
        else:
            self._check_bit_generator(state, place, legacy=kind == "random_state")

    def _space(self, value: dict[str, Any], place: str, own: Any) -> None:
        self(value["states"], f"{place}['states']", UNKNOWN)
        states = _decoded(value["states"])
        listed(anything)(states, f"{place}['states']", UNKNOWN)
        for index, state in enumerate(states):
            check_bit_generator(state, f"{place}['states'][{index}]")

    def _check_bit_generator(self, state: Any, place: str, legacy: bool = False) -> None:
        check_bit_generator(_decoded(state), place, legacy)

    def _object(self, value: dict[str, Any], place: str, own: Any) -> None:
        if isinstance(own, Mapping) and own["class"] != value["class"]:
            refuse(f"{place}['class']", repr(own["class"]), value["class"])
        self.attributes(value["vars"], place, own["vars"] if isinstance(own, Mapping) else UNKNOWN)

    def _torch_generator(self, value: dict[str, Any], place: str, own: Any) -> None:
        device = torch_device(value["device"], f"{place}['device']")
        state = torch.from_numpy(np.frombuffer(value["state"], np.uint8).copy())
        check_torch_generator(state, place, device)

    def _tree(self, value: dict[str, Any], place: str, own: Any) -> None:
        known = own["tree"] if isinstance(own, Mapping) else UNKNOWN
        check_tree(value["tree"], f"{place}['tree']", known, self)

    def _size(self, value: dict[str, Any], place: str, own: Any) -> None:
        sizes(value["items"], f"{place}['items']")

    def _name(self, value: dict[str, Any], place: str, own: Any) -> None:
        check = torch_dtype if value["kind"] == "dtype" else torch_device
        check(value["name"], f"{place}['name']")

    def _enum(self, value: dict[str, Any], place: str, own: Any) -> None:
        if isinstance(own, Mapping) and own["class"] != value["class"]:
            refuse(f"{place}['class']", repr(own["class"]), value["class"])

    def _shared(self, value: dict[str, Any], place: str, own: Any) -> None:
        known = own["value"] if isinstance(own, Mapping) else UNKNOWN
        if type(known) in PLAIN and type(value["value"]) is not type(known):
            refuse(f"{place}['value']", f"of type {type(known).__name__}", value["value"])
        self(value["value"], f"{place}['value']", known)

    def _set(self, value: dict[str, Any], place: str, own: Any) -> None:
        self._set_items(value["items"], f"{place}['items']")

    def _set_items(self, items: list[Any], place: str) -> None:
        for index, item in enumerate(items):
            at = f"{place}[{index}]"
            row(one_of("object", "class", "constant", "tuple"), anything)(item, at, UNKNOWN)
            kind, found = item
            if kind == "object":
                integer(0, self._members - 1)(found, f"{at}[1]", UNKNOWN)
            elif kind == "class":
                text(found, f"{at}[1]", UNKNOWN)
            elif kind == "tuple":
                listed(anything)(found, f"{at}[1]", UNKNOWN)
                self._set_items(found, f"{at}[1]")
            elif type(found) not in PLAIN:
                refuse(f"{at}[1]", "a constant", found)

    _CHECKS: ClassVar[dict[str, Callable[..., None]]] = {
        **dict.fromkeys(("bytes", "fixed", "uninitialized", "default_generator"), _simple),
        **dict.fromkeys(("array", "scalar", "tensor"), _array),
        **dict.fromkeys(("list", "tuple", "deque", "graph"), _items),
        **dict.fromkeys(("generator", "random_state", "random"), _generator),
        **dict.fromkeys(("dtype", "device"), _name),
        "integer": _large,
        "member": _member,
        "same": _same,
        "view": _view,
        "dict": _dict,
        "space": _space,
        "object": _object,
        "tensordict": _tree,
        "size": _size,
        "torch_generator": _torch_generator,
        "enum": _enum,
        "synchronized": _shared,
        "set": _set,
    }


_LARGEST_CHARACTER = 0x10FFFF
_ITEMS = {"items": listed(anything)}
_FIELDS: dict[str, dict[str, Check]] = {
    **dict.fromkeys(("list", "tuple", "deque", "graph", "size"), _ITEMS),
    **{kind: {"name": text} for kind in ("dtype", "device")},
    **{kind: {"state": anything} for kind in ("generator", "random_state", "random")},
    "integer": {"hex": text},
    "view": dict.fromkeys(("of", "dtype", "shape", "strides", "offset"), anything),
    "dict": {"items": listed(row(anything, anything))},
    "space": {"states": anything},
    "object": {"class": text, "vars": anything},
    "tensordict": {"tree": anything, "locked": flag},
    "torch_generator": {"device": text, "state": data},
    "enum": {"class": text, "name": text},
    "synchronized": {"value": anything},
    "set": {"frozen": flag, "items": listed(anything)},
}
_UNNUMBERED = frozenset({"bytes", "integer", "fixed", "member", "same"})
# Kinds of objects that are never made from data.
_IN_PLACE = frozenset({"space", "object", "enum", "synchronized", "fixed"})
# Kinds of values that may be keys of dictionaries.
_KEYS = frozenset({"tuple", "scalar", "member", "bytes", "integer", "enum", "dtype", "device"})


def attribute_name(name: Any, place: str, own: Any) -> None:
    """Checks that a value may be the name of an attribute."""
    if type(name) is not str or (name.startswith("__") and name.endswith("__")):
        refuse(place, "the name of an attribute", name)


def _referred(value: Any, known: dict[int, Any]) -> Any:
    """Returns the value to which another one refers, and remembers all that are numbered."""
    if type(value) is not dict or type(value.get("number")) is not int:
        return value
    if value.get("kind") == "same":
        return known.get(value["number"], UNKNOWN)
    if value.get("kind") not in _UNNUMBERED:
        known[value["number"]] = value
    return value


def _number_of(value: Any) -> int:
    return value.get("number", -1) if isinstance(value, dict) else -1


def _decoded(value: Any) -> Any:
    """Returns numbers, texts, arrays and containers of these; UNKNOWN for other values."""
    if type(value) in PLAIN:
        return value
    match value["kind"]:
        case "list" | "tuple" as kind:
            items = map(_decoded, value["items"])
            return list(items) if kind == "list" else tuple(items)
        case "dict":
            return {_decoded(key): _decoded(item) for key, item in value["items"]}
        case "array" | "scalar":
            found = np.frombuffer(value["data"] or b"", np.dtype(value["dtype"]))
            array = found.reshape(value["shape"])
            return array if value["kind"] == "array" else array[()]
    return UNKNOWN


def kind_of(value: Any) -> str:
    """Returns the type of a captured value."""
    return str(value.get("kind")) if type(value) is dict else type(value).__name__


def check_same_kind(value: Any, place: str, own: Any) -> None:
    """Checks that a captured value has the type and the size of the object's own."""
    if type(value) is not type(own):
        refuse(place, f"of type {type(own).__name__}", value)
    for name in ("kind", "dtype", "shape", "class") if type(own) is dict else ():
        if value.get(name) != own.get(name) and not (
            name == "dtype" and _are_numbers(value.get(name), own.get(name))
        ):
            refuse(f"{place}[{name!r}]", repr(own.get(name)), value.get(name))
    items = value.get("items") if kind_of(own) in ("list", "tuple") else None
    # An empty list may be one that has not been filled yet, but not a list of names.
    if type(items) is not list:
        return
    if len(items) == len(own["items"]):
        for index, (one, mine) in enumerate(zip(items, own["items"], strict=True)):
            # The names of entries follow from the arguments.
            if type(mine) is str and one != mine and "_keys'" in place:
                refuse(f"{place}['items'][{index}]", repr(mine), one)
        return
    if (items and own["items"]) or any(map(_is_name, [*items, *own["items"]])):
        refuse(f"{place}['items']", f"a list of {len(own['items'])}", items)


def _are_numbers(found: Any, own: Any) -> bool:
    """Returns True for dtypes of the same kind of numbers, whose size an environment may change."""
    # Such as "<f8". The check of the whole array says whether there is such a dtype.
    return type(found) is type(own) is str and found[:2] == own[:2] in ("<f", "<i", "<u")


def _is_name(value: Any) -> bool:
    """Returns True for the name of an entry of a TensorDict."""
    return type(value) is str or kind_of(value) == "tuple"


# --- generators of random numbers

WORD = integer(0, 2**32 - 1)
_LONG = integer(0, 2**128 - 1)
_BUFFERED = {"has_uint32": integer(0, 1), "uinteger": WORD}


def words(dtype: str, count: int) -> Check:
    """Returns a check for an array of numbers without a sign."""

    def check(value: Any, place: str, own: Any) -> None:
        if not isinstance(value, np.ndarray) or (value.dtype, value.shape) != (
            np.dtype(dtype),
            (count,),
        ):
            refuse(place, f"an array of {count} {dtype}", value)

    return check


_PCG = {"state": entries({"state": _LONG, "inc": _LONG}), **_BUFFERED}
_STATES: dict[str, dict[str, Check]] = {
    "PCG64": _PCG,
    "PCG64DXSM": _PCG,
    # Numpy itself does not check the positions, and would read beyond its memory.
    "MT19937": {"state": entries({"key": words("uint32", 624), "pos": integer(0, 624)})},
    "Philox": {
        "state": entries({"counter": words("uint64", 4), "key": words("uint64", 2)}),
        "buffer": words("uint64", 4),
        "buffer_pos": integer(0, 4),
        **_BUFFERED,
    },
    "SFC64": {"state": entries({"state": words("uint64", 4)}), **_BUFFERED},
}


def check_bit_generator(state: Any, place: str, legacy: bool = False) -> None:
    """Checks the state of a bit generator of numpy, or of a ``RandomState``."""
    entries({"bit_generator": text})(state, place, UNKNOWN)
    name = state["bit_generator"]
    fresh = bit_generator(name, f"{place}['bit_generator']")
    entries(_STATES[name])(state, place, UNKNOWN)
    if legacy:
        entries({"has_gauss": integer(0, 1), "gauss": number})(state, place, UNKNOWN)
        one_of("MT19937")(name, f"{place}['bit_generator']", UNKNOWN)
    try:
        fresh.state = state
    except Exception as error:
        raise StateError(f"{place} is not the state of a generator: {error}") from None


def check_python_generator(state: Any, place: str) -> None:
    """Checks the state of a generator of Python's ``random``."""
    row(integer(3, 3), anything, optional(number))(state, place, UNKNOWN)
    try:
        random.Random().setstate(state)
    except Exception as error:
        raise StateError(f"{place} is not the state of a generator: {error}") from None


def check_torch_generator(state: Any, place: str, device: torch.device | None = None) -> None:
    """Checks the state of a generator of torch."""
    fresh = torch.Generator(device or "cpu")
    like_own(state, place, fresh.get_state())
    try:
        fresh.set_state(state.cpu())
    except RuntimeError as error:
        raise StateError(f"{place} is not the state of a generator: {error}") from None


def _torch_state(value: Any, place: str, own: Any) -> None:
    check_torch_generator(value, place)


def _numpy_state(value: Any, place: str, own: Any) -> None:
    rest = row(integer(0, 624), integer(0, 1), number)
    entries({"name": one_of("MT19937"), "keys": data, "rest": rest})(value, place, UNKNOWN)
    data(value["keys"], f"{place}['keys']", bytes(4 * 624))


def _python_state(value: Any, place: str, own: Any) -> None:
    fields = {"version": integer(3, 3), "inner": data, "gauss": optional(number)}
    entries(fields)(value, place, UNKNOWN)
    data(value["inner"], f"{place}['inner']", bytes(4 * 625))
    inner = np.frombuffer(value["inner"], "<u4").tolist()
    check_python_generator((value["version"], tuple(inner), value["gauss"]), place)


#: States of the global generators (see :mod:`trawl.envs.generators`).
GENERATORS = entries(
    {"torch": _torch_state, "numpy": _numpy_state, "python": _python_state},
    {"cuda": like_own},
)

# --- TensorDicts (see trawl.envs.capture.kinds)


def _frame_leaf(value: Any, place: str, own: Any) -> None:
    if isinstance(value, Tensor):
        like_own(value, place, UNKNOWN)
    elif not (isinstance(value, dict) and value.get("kind") == "whole" and "value" in value):
        Encoded()(value, place, UNKNOWN)


def check_tree(value: Any, place: str, own: Any, leaf: Check = _frame_leaf) -> None:
    """Checks a TensorDict as plain data, whose leaves another check accepts."""
    entries({"names": listed(optional(text))})(value, place, UNKNOWN)
    _check_branch(value, place, leaf)


def _check_branch(value: Any, place: str, leaf: Check) -> None:
    entries({"kind": one_of(*_BRANCHES)})(value, place, UNKNOWN)
    kind = value["kind"]
    entries(_BRANCHES[kind])(value, place, UNKNOWN)
    for name in ("value", "frames", "positions"):
        if name in _BRANCHES[kind]:
            leaf(value[name], f"{place}[{name!r}]", UNKNOWN)
    if "shape" in _BRANCHES[kind] and value["device"] is not None:
        torch_device(value["device"], f"{place}['device']")
    for index, part in enumerate(value["parts"] if "parts" in _BRANCHES[kind] else ()):
        _check_branch(part, f"{place}['parts'][{index}]", leaf)
    for name, entry in value["entries"].items() if kind == "tensordict" else ():
        _check_branch(entry, f"{place}[{name!r}]", leaf)


def _parts(value: Any, place: str, own: Any) -> None:
    listed(anything)(value, place, UNKNOWN)
    if not value:
        refuse(place, "a list of at least one part", value)


def _shape(value: Any, place: str, own: Any) -> None:
    sizes(value, place)


_PLACED: dict[str, Check] = {"shape": _shape, "device": optional(text)}
_STACKED: dict[str, Check] = {"dim": integer(0, MOST_DIMS), "parts": _parts}
_BRANCHES: dict[str, dict[str, Check]] = {
    "leaf": {"value": anything},
    "stacked": {"frames": anything, "positions": anything},
    "data": {**_PLACED, "value": anything},
    "stack": _STACKED,
    "lazy": _STACKED,
    "tensordict": {**_PLACED, "entries": table(anything)},
}


def layout_of(tree: Mapping[str, Any], place: str) -> dict[tuple[str, ...], Any]:
    """Returns the layout of frames as plain data, which :func:`check_tree` has checked.

    The layout has the dtype of each tensor, and its shape in one frame; other entries have None.

    Raises:
        StateError: if a tensor does not have the frames' batch size.
    """
    found: dict[tuple[str, ...], Any] = {}
    batch = list(tree.get("shape", ()))

    def visit(branch: Mapping[str, Any], key: tuple[str, ...]) -> None:
        if branch["kind"] == "tensordict":
            for name, entry in branch["entries"].items():
                visit(entry, (*key, name))
            return
        value = branch.get("value") if branch["kind"] == "leaf" else None
        if isinstance(value, Tensor):
            if list(value.shape[: len(batch)]) != batch:
                refuse(f"{place}[{', '.join(key)}]", f"of batch size {batch}", value)
            found[key] = value.dtype, tuple(value.shape[len(batch) :])
        else:
            # The layout of stacks and of lazy parts is not compared.
            found[key] = "no tensor" if branch["kind"] == "leaf" else None

    visit(tree, ())
    return found


def check_layouts(trees: Mapping[str, Any], like: Any = UNKNOWN) -> None:
    """Checks that frames have the same entries, dtypes and shapes.

    Args:
        trees: the frames as plain data, by their place.
        like: frames whose layout they must have; by default, the layout of the first.
    """
    known = None if like is UNKNOWN else layout_of(like, "the frames of the collector")
    for place, tree in trees.items():
        mine = layout_of(tree, place)
        known = mine if known is None else known
        for key in sorted({*mine, *known}):
            if key not in known or key not in mine:
                has = "has no" if key not in mine else "has an unknown"
                raise StateError(f"{place} {has} entry {'/'.join(key)}")
            if None not in (mine[key], known[key]) and mine[key] != known[key]:
                raise StateError(
                    f"{place} has {mine[key]} in {'/'.join(key)}, but must have {known[key]}"
                )
