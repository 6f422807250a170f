"""Schema of states: what each entry of a state may be.

A state may come from a stranger. It is plain data: numbers, texts, bytes, tensors, lists and
dictionaries. All of it is checked before anything is made of it, or changed by it: types, sizes,
ranges, and names, which must be in a table. The first entry that does not fit is named in a
:class:`~trawl.errors.StateError`.

A check is a function of a value, its place, and the value that the loading object has in this
place (``UNKNOWN`` if that can't be told). :mod:`trawl.schema.states` declares the entries of
all states; entries in ``optional`` may be missing, for example in states of earlier versions, and
entries that are not declared are ignored.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from trawl.errors import MissingEntryError, StateError

Check = Callable[[Any, str, Any], None]

#: Stands for a value that can't be told.
UNKNOWN: Any = type("Unknown", (), {"__repr__": lambda _: "UNKNOWN"})()
#: Number of dictionaries and lists inside each other that a state may have.
MOST_LEVELS = 200
#: Number of bits of the largest integer that torch.load(weights_only=True) reads.
MOST_BITS = 2039
_MOST = 2**63 - 1
# Number of places in which the containers of a state may stand on average.
_MOST_REPEATS = 100
MOST_DIMS = 32
PLAIN = (type(None), bool, int, float, str, bytes)
# Codes of numpy's dtypes without objects and fields: kind and number of bytes.
_NUMPY_DTYPE = re.compile(
    r"[<>|=]?(?:[biufc][0-9]{1,2}|[SUV][0-9]{1,9}|[mM]8(?:\[[0-9]*\w+\])?|\?)"
)
_TORCH_DTYPES: dict[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_DEVICE = re.compile(r"cpu|cuda(:[0-9]{1,3})?")
_BIT_GENERATORS: dict[str, Callable[[], Any]] = {
    "PCG64": np.random.PCG64,
    "PCG64DXSM": np.random.PCG64DXSM,
    "MT19937": np.random.MT19937,
    "Philox": np.random.Philox,
    "SFC64": np.random.SFC64,
}


# --- messages


def shown(value: Any) -> str:
    """Returns a short description of a value that may be of any size."""
    if isinstance(value, Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} of shape {[*value.shape]}"
    if isinstance(value, (Mapping, list, tuple)):
        return f"a {type(value).__name__} with {len(value):,} entries"
    if type(value) is int and value.bit_length() > 200:
        return f"an integer of {value.bit_length():,} bits"
    return reprlib.repr(value)


def refuse(place: str, wanted: str, value: Any) -> NoReturn:
    """Raises the error for an entry that does not fit."""
    raise StateError(f"{place} must be {wanted}, but it is {shown(value)}")


# --- names and pointers, which are never looked up in anything but a table


def numpy_dtype(name: Any, place: str) -> np.dtype[Any]:
    """Returns the numpy dtype with a name; it holds neither objects nor fields."""
    if type(name) is not str or not _NUMPY_DTYPE.fullmatch(name):
        refuse(place, "the name of a dtype without objects", name)
    try:
        found = np.dtype(name)
    except (TypeError, ValueError):
        refuse(place, "the name of a dtype", name)
    if found.hasobject or found.fields is not None:
        refuse(place, "the name of a dtype without objects", name)
    return found


def torch_dtype(name: Any, place: str) -> torch.dtype:
    """Returns the torch dtype with a name."""
    if type(name) is not str or name not in _TORCH_DTYPES:
        refuse(place, "the name of a dtype of torch", name)
    return _TORCH_DTYPES[name]


def torch_device(name: Any, place: str) -> torch.device:
    """Returns the device with a name, which this machine must have."""
    if type(name) is not str or not _DEVICE.fullmatch(name):
        refuse(place, "the name of a device, 'cpu' or 'cuda'", name)
    found = torch.device(name)
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        refuse(place, "a device of this machine", name)
    return found


def bit_generator(name: Any, place: str) -> Any:
    """Returns a new bit generator of numpy of the kind with a name."""
    if type(name) is not str or name not in _BIT_GENERATORS:
        refuse(place, f"one of {', '.join(_BIT_GENERATORS)}", name)
    return _BIT_GENERATORS[name]()


def sizes(value: Any, place: str) -> int:
    """Checks the shape of an array; returns its number of elements."""
    if type(value) not in (list, torch.Size) or len(value) > MOST_DIMS:
        refuse(place, f"a list of at most {MOST_DIMS} sizes", value)
    for index, size in enumerate(value):
        integer()(size, f"{place}[{index}]", UNKNOWN)
    if prod(max(1, size) for size in value) > _MOST:
        refuse(place, "the sizes of an array", value)
    return prod(value)


def check_extent(
    place: str, shape: Sequence[int], strides: Any, offset: Any, size: int, total: int
) -> None:
    """Checks that all elements of a view lie within its memory.

    Args:
        place: place of the view in the state.
        shape: shape of the view, which has been checked.
        strides: strides of the view, in the unit of ``total``.
        offset: offset of the first element, in the unit of ``total``.
        size: size of an element.
        total: size of the memory.
    """
    if type(strides) is not list or len(strides) != len(shape):
        refuse(f"{place}['strides']", f"a list of {len(shape)} numbers", strides)
    for index, stride in enumerate(strides):
        integer(-_MOST)(stride, f"{place}['strides'][{index}]", UNKNOWN)
    integer()(offset, f"{place}['offset']", UNKNOWN)
    reach = [(count - 1) * stride for count, stride in zip(shape, strides, strict=True)]
    first, last = (
        offset + sum(min(0, one) for one in reach),
        offset + sum(max(0, one) for one in reach),
    )
    if offset > total or (prod(shape) and (first < 0 or last + size > total)):
        raise StateError(
            f"{place} is a view that reaches from {first} to {last + size}, beyond its memory of "
            f"{total}"
        )


# --- checks of single values


def integer(least: int = 0, most: int = _MOST) -> Check:
    """Returns a check for an integer in a range."""

    def check(value: Any, place: str, own: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            refuse(place, f"an integer from {least} to {most}", value)

    return check


def number(value: Any, place: str, own: Any) -> None:
    """Checks that a value is a number that a float can hold."""
    if type(value) not in (bool, int, float) or (type(value) is int and value.bit_length() > 1023):
        refuse(place, "a number", value)


def flag(value: Any, place: str, own: Any) -> None:
    """Checks that a value is True or False."""
    if type(value) is not bool:
        refuse(place, "True or False", value)


def text(value: Any, place: str, own: Any) -> None:
    """Checks that a value is a text."""
    if type(value) is not str:
        refuse(place, "a text", value)


def data(value: Any, place: str, own: Any) -> None:
    """Checks that a value is bytes, as many as ``own`` has if it is known."""
    if type(value) is not bytes or (type(own) is bytes and len(own) != len(value)):
        refuse(place, f"{len(own)} bytes" if type(own) is bytes else "bytes", value)


def data_of_any_size(value: Any, place: str, own: Any) -> None:
    """Checks that a value is bytes."""
    data(value, place, UNKNOWN)


def anything(value: Any, place: str, own: Any) -> None:
    """Accepts data that the object to which it belongs checks itself."""


def one_of(*values: Any) -> Check:
    """Returns a check for one of several values."""

    def check(value: Any, place: str, own: Any) -> None:
        if not any(type(value) is type(one) and value == one for one in values):
            refuse(place, f"one of {values}" if len(values) > 1 else repr(values[0]), value)

    return check


def optional(check: Check) -> Check:
    """Returns a check for None, and for what another check accepts."""
    return lambda value, place, own: None if value is None else check(value, place, own)


def either(kinds: Mapping[type, Check], wanted: str) -> Check:
    """Returns a check that depends on the type of the value."""

    def check(value: Any, place: str, own: Any) -> None:
        if type(value) not in kinds:
            refuse(place, wanted, value)
        kinds[type(value)](value, place, own)

    return check


def like_own(value: Any, place: str, own: Any) -> None:
    """Checks that a tensor has the dtype and the shape of the object's own."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        refuse(place, "a tensor", value)
    if isinstance(own, Tensor) and (value.dtype, value.shape) != (own.dtype, own.shape):
        refuse(place, shown(own), value)


def alike(value: Any, place: str, own: Any) -> None:
    """Checks that a value has the types and the sizes of the object's own."""
    if isinstance(own, Tensor):
        like_own(value, place, own)
        return
    if own is UNKNOWN:
        return
    if type(value) is not type(own):
        refuse(place, f"of type {type(own).__name__}", value)
    if type(own) in (list, tuple):
        if len(value) != len(own):
            refuse(place, f"a list of {len(own)}", value)
        for index, (one, mine) in enumerate(zip(value, own, strict=True)):
            alike(one, f"{place}[{index}]", mine)
    elif isinstance(own, Mapping):
        entries(dict.fromkeys(own, alike))(value, place, own)


# --- checks of containers


def listed(check: Check, *, same_length: bool = False) -> Check:
    """Returns a check for a list whose items another check accepts."""

    def check_all(value: Any, place: str, own: Any) -> None:
        if type(value) not in (list, tuple):
            refuse(place, "a list", value)
        known = own if type(own) in (list, tuple) else ()
        if same_length and type(own) in (list, tuple) and len(value) != len(own):
            refuse(place, f"a list of {len(own)}", value)
        for index, item in enumerate(value):
            check(item, f"{place}[{index}]", known[index] if index < len(known) else UNKNOWN)

    return check_all


def row(*checks: Check) -> Check:
    """Returns a check for a list with one item for each of several checks."""

    def check_all(value: Any, place: str, own: Any) -> None:
        if type(value) not in (list, tuple) or len(value) != len(checks):
            refuse(place, f"a list of {len(checks)}", value)
        for index, (item, check) in enumerate(zip(value, checks, strict=True)):
            check(item, f"{place}[{index}]", UNKNOWN)

    return check_all


def table(check: Check, keys: Check = text) -> Check:
    """Returns a check for a dictionary of any names whose values another check accepts."""

    def check_all(value: Any, place: str, own: Any) -> None:
        if not isinstance(value, Mapping):
            refuse(place, "a dictionary", value)
        for name, item in value.items():
            keys(name, f"a key of {place}", UNKNOWN)
            check(item, f"{place}[{name!r}]", entry_of(own, name))

    return check_all


def entries(needed: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Returns a check for a dictionary with these entries; others are ignored.

    Args:
        needed: checks of the entries that must be there.
        optional: checks of entries that may be missing.
    """

    def check_all(value: Any, place: str, own: Any) -> None:
        if not isinstance(value, Mapping):
            refuse(place, "a dictionary", value)
        for name in needed:
            if name not in value:
                raise MissingEntryError(
                    f"{place} has no {name!r}; it has {sorted(map(str, value))}"
                )
        for name, check in {**needed, **(optional or {})}.items():
            if name in value:
                check(value[name], f"{place}[{name!r}]", entry_of(own, name))

    return check_all


def entry_of(own: Any, name: Any) -> Any:
    """Returns an entry of the object's own value; UNKNOWN if it has none."""
    return own.get(name, UNKNOWN) if isinstance(own, Mapping) else UNKNOWN


def check_size(value: Any, place: str) -> None:
    """Checks that containers are not nested too deeply, and that none contains itself.

    A container may stand in several places, but not in so many that a small file takes very long.
    """
    known: dict[int, int] = {}
    expanded = _expanded(value, place, 0, known)
    if expanded > _MOST_REPEATS * len(known) + _MOST_REPEATS**2:
        raise StateError(f"{place} repeats its entries too often")


def _expanded(value: Any, place: str, level: int, known: dict[int, int]) -> int:
    """Returns the number of containers in a container, counted wherever they stand."""
    if level > MOST_LEVELS:
        raise StateError(
            f"{place} is nested more than {MOST_LEVELS} levels deep, or contains itself"
        )
    if id(value) not in known:
        inner: Iterable[Any] = ()
        if isinstance(value, Mapping):
            inner = chain(value.keys(), value.values())
        elif isinstance(value, (list, tuple)):
            inner = value
        below = (one for one in inner if isinstance(one, (Mapping, list, tuple)))
        known[id(value)] = 1 + sum(_expanded(one, place, level + 1, known) for one in below)
    return known[id(value)]
