"""Conversion of TensorDicts to plain data, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_leaf_nontensor,
    is_non_tensor,
    is_tensorclass,
)
from torch import Tensor

from trawl.envs.capture.codec import Decoder, Encoder, NotPlain, register
from trawl.envs.capture.fixed import class_name
from trawl.stacked_frames import StackedFrames

# Classes of what an environment may hold; others would lose their class.
_EXACT = (TensorDict, LazyStackedTensorDict, NonTensorData, NonTensorStack)
# Kind of a value that is not plain data.
_OBJECT = "whole"


def to_plain(data: TensorDictBase, encode: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Returns a TensorDict as numbers, tensors, lists and dictionaries.

    Args:
        data: the TensorDict, which may contain lazy stacks and non-tensor data.
        encode: function that converts tensors and non-tensor data. By default, tensors stay as
            they are, and so do objects that can't be converted.
    """
    return {"names": list(data.names), **_to_tree(data, encode or _encode)}


def _to_tree(value: Any, encode: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(value, LazyStackedTensorDict):
        kind = "stack" if isinstance(value, NonTensorStack) else "lazy"
        parts = [_to_tree(part, encode) for part in value.tensordicts]
        return {"kind": kind, "dim": value.stack_dim, "parts": parts}
    if isinstance(value, StackedFrames):
        small = value.compact()
        frames, positions = encode(small.frames), encode(small.positions)
        return {"kind": "stacked", "frames": frames, "positions": positions}
    if isinstance(value, Tensor):
        return {"kind": "leaf", "value": encode(value)}
    device = None if value.device is None else str(value.device)
    place = {"shape": list(value.batch_size), "device": device}
    if is_non_tensor(value):
        return {"kind": "data", **place, "value": encode(value.data)}
    if is_tensorclass(value):
        value = value.to_tensordict()
    entries = {key: _to_tree(entry, encode) for key, entry in value.items()}
    return {"kind": "tensordict", **place, "entries": entries}


def from_plain(
    data: Mapping[str, Any],
    decode: Callable[[Any, Any], Any] | None = None,
    present: Any = None,
) -> TensorDictBase:
    """Returns the TensorDict that :func:`to_plain` converted.

    Args:
        data: the converted TensorDict.
        decode: function that converts a value back; None if ``encode`` was None. Its arguments are
            the converted value, and the value at the same place in ``present``, or None.
        present: the TensorDict that the result replaces, or None.
    """
    made: TensorDictBase = _from_tree(data, decode or _decode, present)
    if any(name is not None for name in data["names"]):
        made.names = data["names"]
    return made


def _from_tree(data: Mapping[str, Any], decode: Callable[[Any, Any], Any], present: Any) -> Any:
    kind = data["kind"]
    if kind == "leaf":
        return decode(data["value"], present if isinstance(present, Tensor) else None)
    if kind == "stacked":
        return StackedFrames(decode(data["frames"], None), decode(data["positions"], None))
    if kind == "data":
        value = decode(data["value"], getattr(present, "data", None))
        return NonTensorData(value, data["shape"], device=data["device"])
    if kind in ("stack", "lazy"):
        found = list(getattr(present, "tensordicts", ()))
        count = len(data["parts"])
        before = found if len(found) == count else [None] * count
        parts = [_from_tree(data["parts"][i], decode, before[i]) for i in range(count)]
        stack = NonTensorStack if kind == "stack" else LazyStackedTensorDict
        return stack(*parts, stack_dim=data["dim"])
    old = present if isinstance(present, TensorDict) else {}
    entries = {
        key: _from_tree(entry, decode, old.get(key, None)) for key, entry in data["entries"].items()
    }
    return TensorDict(entries, data["shape"], device=data["device"])


def copy_or_encode(value: Any) -> Any:
    """Returns a copy of a tensor; converts other values to plain data.

    Raises:
        NotPlain: if a value can't be converted.
    """
    return value.detach().clone() if isinstance(value, Tensor) else Encoder().encode(value)


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    try:
        return Encoder().encode(value)
    except NotPlain:
        return {"kind": _OBJECT, "value": value}


def _decode(value: Any, present: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    whole = isinstance(value, dict) and value["kind"] == _OBJECT
    return value["value"] if whole else Decoder().decode(value)


def _encode_tensordict(encoder: Encoder, value: Any) -> dict[str, Any]:
    _check_classes(value)
    return {"tree": to_plain(value, encoder.encode), "locked": bool(value.is_locked)}


def _check_classes(value: Any) -> None:
    """Checks that a TensorDict has the same class, also inside, when it is made from plain data."""
    if isinstance(value, Tensor):
        return
    if type(value) not in _EXACT:
        raise NotPlain(f"which is a {class_name(value)}")
    if isinstance(value, LazyStackedTensorDict):
        inside = value.tensordicts
    else:
        inside = [] if is_non_tensor(value) else [*value.values()]
    for one in inside:
        _check_classes(one)


def _decode_tensordict(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Any:
    made = from_plain(data["tree"], decoder.decode, present)
    if isinstance(present, TensorDictBase) and type(present) is type(made):
        old, new = (
            dict(one.items(True, True, is_leaf=is_leaf_nontensor)) for one in (present, made)
        )
        if old.keys() == new.keys() and all(old[key] is new[key] for key in new):
            return present
    return made.lock_() if data["locked"] else made


def _is_tensordict(kind: type) -> bool:
    non_tensor = is_leaf_nontensor(kind) and not issubclass(kind, Tensor)
    return issubclass(kind, TensorDictBase) or non_tensor


register("tensordict", _is_tensordict, _encode_tensordict, _decode_tensordict)
