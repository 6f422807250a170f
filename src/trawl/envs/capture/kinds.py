"""Conversion of values of each kind to plain data, and back (see the codec)."""

from __future__ import annotations

import multiprocessing.synchronize
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import GraphInstance
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
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from trawl.envs.capture.codec import Decoder, Encoder, NotPlain, register
from trawl.envs.capture.fixed import class_name, full_name, spaces_in
from trawl.envs.specs import Composite, Spec
from trawl.schema.checks import PLAIN, bit_generator, numpy_dtype, torch_device, torch_dtype
from trawl.stacked_frames import StackedFrames

_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_UNINITIALIZED = (UninitializedBuffer, UninitializedParameter)
_WHOLE = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)
_SETS = (set, frozenset)
_LOCKS = (
    multiprocessing.synchronize.Lock,
    multiprocessing.synchronize.RLock,
    type(threading.Lock()),
    type(threading.RLock()),
)
#: Classes whose instances do not change in a graph of objects with tensors.
FIXED_IN_GRAPHS = (Spec, Composite, weakref.ref, *_LOCKS)
#: Classes of generators of random numbers, by the name of their kind.
GENERATORS: dict[str, Any] = {
    "generator": np.random.Generator,
    "random_state": np.random.RandomState,
    "random": random.Random,
}

# --- arrays of numpy


def _encode_array(encoder: Encoder, value: Any) -> dict[str, Any]:
    array = np.asarray(value)
    if array.dtype.hasobject or array.dtype.fields is not None:
        raise NotPlain("which is an array of objects or records")
    if isinstance(value, np.generic):
        return {"kind": "scalar", **encoder.content(array)}
    if type(value) is not np.ndarray:
        raise NotPlain(f"which is a {class_name(value)}")
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner is not array:
        return {
            "kind": "view",
            "of": encoder.encode(owner),
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "strides": list(array.strides),
            "offset": _address(array) - _address(owner),
        }
    if not array.flags.c_contiguous:
        raise NotPlain("which is an array in another order than C's")
    return _own_content(encoder, array)


def _own_content(encoder: Encoder, array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Returns the layout and the bytes of an array whose memory belongs to no other value."""
    encoder.check_apart(array, "which is an array that shares its memory with another one")
    return encoder.content(array)


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _decode_array(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Any:
    dtype = numpy_dtype(data["dtype"], "the dtype of an array")
    if data["kind"] == "view":
        of = decoder.decode(data["of"])
        return np.ndarray(data["shape"], dtype, of, data["offset"], data["strides"])
    content = data["data"]
    flat = np.frombuffer(content, dtype) if content else np.empty(0, dtype)
    array = flat.reshape(data["shape"]).copy()
    return array[()] if data["kind"] == "scalar" else array


register(
    "array", lambda kind: issubclass(kind, (np.ndarray, np.generic)), _encode_array, _decode_array
)
register("scalar", (), _encode_array, _decode_array)
register("view", (), _encode_array, _decode_array)

# --- tensors


def _encode_tensor(encoder: Encoder, value: Tensor) -> dict[str, Any]:
    if type(value) in _UNINITIALIZED:
        return {}
    if not encoder.in_graph and type(value) is not Tensor:
        # Objects outside the environment may refer to it, so it would have to be restored in place.
        raise NotPlain(f"which is a {class_name(value)}")
    if value.layout is not torch.strided or value.is_quantized or value.is_conj():
        raise NotPlain("which is a tensor without strides")
    if value.grad_fn is not None:
        raise NotPlain("which is a tensor with a graph of gradients")
    if not encoder.in_graph and value.grad is not None:
        raise NotPlain("which is a tensor with a gradient")
    plain = value.detach()
    memory = plain.untyped_storage()
    # Blocks without memory have the same address, but share nothing.
    address = memory.data_ptr() if memory.nbytes() else -len(encoder.blocks)
    key = str(plain.device), address
    number, known = encoder.blocks.setdefault(key, (len(encoder.blocks), plain))
    is_new = known is plain
    if not encoder.in_blocks:
        if not is_new:
            encoder.needs_blocks = True
            raise NotPlain("which is a tensor that shares its memory with another one")
        if key[0] == "cpu" and value.dtype in _WHOLE and not value.requires_grad:
            return _own_content(encoder, plain.numpy())
    data = {**_layout(plain), "block": number, "gradient": bool(value.requires_grad)}
    if is_new and key[0] == "cpu":
        flat = _bytes_of(memory, plain.device).numpy()
        encoder.check_apart(flat, "which is a tensor that shares its memory with an array")
    if is_new and not encoder.looks_only:
        encoder.check_size(memory.nbytes())
        # None, because torch.load(weights_only=True) refuses empty bytes.
        data["data"] = _bytes_of(memory, plain.device).cpu().numpy().tobytes() or None
    return data


def _layout(tensor: Tensor) -> dict[str, Any]:
    return {
        "device": str(tensor.device),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "offset": int(tensor.storage_offset()),
    }


def _bytes_of(memory: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(memory)


def _decode_tensor(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Tensor:
    if data["kind"] == "uninitialized":
        return present if type(present) in _UNINITIALIZED else UninitializedBuffer()
    if "block" not in data:
        whole = torch.from_numpy(_decode_array(decoder, data, present))
        return present if _write_shared(decoder, whole, present) else whole
    alike = type(present) in _TENSORS and _layout(present).items() <= data.items()
    memory = decoder.blocks.get(data["block"])
    if memory is None:
        memory = _block(decoder, data, present if alike else None)
        decoder.blocks[data["block"]] = memory
    if alike and present.untyped_storage().data_ptr() == memory.data_ptr():
        found: Tensor = present
        return found
    dtype = torch_dtype(data["dtype"], "the dtype of a tensor")
    made = torch.empty(0, dtype=dtype, device=data["device"])
    made.set_(memory, data["offset"], tuple(data["shape"]), tuple(data["strides"]))
    return made.requires_grad_() if data["gradient"] else made


def _write_shared(decoder: Decoder, value: Tensor, present: Any) -> bool:
    """Writes a tensor into the present one, if other processes refer to that one's memory."""
    alike = type(present) is Tensor and (present.dtype, present.shape) == (value.dtype, value.shape)
    if not alike or present.device.type != "cpu" or not present.is_shared():
        return False
    address = present.untyped_storage().data_ptr()
    if present.requires_grad or address in decoder.written:
        return False
    decoder.written.add(address)
    present.copy_(value)
    return True


def _block(decoder: Decoder, data: Mapping[str, Any], alike: Tensor | None) -> torch.UntypedStorage:
    """Returns memory with the data of a tensor; the memory of ``alike`` if it is reused."""
    content = torch.from_numpy(np.frombuffer(bytearray(data["data"] or b"\0"), np.uint8))
    content = content if data["data"] else content[:0].clone()
    if alike is not None and (decoder.in_place or alike.is_shared()):
        memory: torch.UntypedStorage = alike.untyped_storage()
        # Tensors that share memory in the new environment may differ in the state.
        if memory.nbytes() == len(content) and memory.data_ptr() not in decoder.written:
            decoder.written.add(memory.data_ptr())
            _bytes_of(memory, alike.device).copy_(content)
            return memory
    return content.to(data["device"]).untyped_storage()


register("tensor", _TENSORS, _encode_tensor, _decode_tensor)
register("uninitialized", _UNINITIALIZED, _encode_tensor, _decode_tensor, in_graphs=True)

# --- containers


def _encode_items(encoder: Encoder, value: Any) -> dict[str, Any]:
    more = {"maxlen": value.maxlen} if type(value) is deque else {}
    return {"items": encoder.items(value), **more}


def _encode_dict(encoder: Encoder, value: Any) -> dict[str, Any]:
    return {"items": [encoder.items(pair) for pair in encoder.looked_at(value.items())]}


def _decode_items(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Any:
    items = data["items"]
    alike = type(present) in (list, tuple) and len(present) == len(items)
    found = map(decoder.decode, items, present if alike else [None] * len(items))
    match data["kind"]:
        case "deque":
            return deque(found, data["maxlen"])
        case "graph":
            return GraphInstance(*found)
        case "size":
            return torch.Size(found)
    return list(found) if data["kind"] == "list" else tuple(found)


def _decode_dict(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Any:
    old = present if type(present) is dict else {}
    pairs = ((decoder.decode(key), item) for key, item in data["items"])
    return {key: decoder.decode(item, old.get(key)) for key, item in pairs}


def _encode_set(encoder: Encoder, value: Any) -> dict[str, Any]:
    def encoded(item: Any) -> list[Any]:
        if id(item) in encoder.members:
            return ["object", encoder.members[id(item)]]
        if isinstance(item, type):
            return ["class", full_name(item)]
        if isinstance(item, PLAIN):
            return ["constant", item]
        if type(item) is tuple:
            return ["tuple", list(map(encoded, item))]
        raise NotPlain(f"which is a set with a {class_name(item)}")

    # The order of a set differs between processes.
    return {"frozen": type(value) is frozenset, "items": sorted(map(encoded, value), key=repr)}


def _decode_set(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Any:
    known = present if type(present) in _SETS else ()
    classes = {full_name(one): one for one in known if isinstance(one, type)}

    def decoded(kind: str, value: Any) -> Any:
        match kind:
            case "class" if value not in classes:
                raise NotPlain(f"which has the class {value}, but the environment has no such set")
            case "class":
                return classes[value]
            case "object":
                return decoder.members[value]
            case "tuple":
                return tuple(decoded(*item) for item in value)
        return value

    found = (decoded(*item) for item in data["items"])
    return frozenset(found) if data["frozen"] else set(found)


register("list", list, _encode_items, _decode_items)
register("tuple", tuple, _encode_items, _decode_items)
register("graph", GraphInstance, _encode_items, _decode_items)
register("size", torch.Size, _encode_items, _decode_items)
register("deque", deque, _encode_items, _decode_items)
register("dict", dict, _encode_dict, _decode_dict)
register("set", _SETS, _encode_set, _decode_set, in_graphs=True)

# --- generators of random numbers


def generator_state(value: Any) -> Any:
    """Returns the state of a generator of numpy or of Python's ``random``.

    Raises:
        NotPlain: if the state is incomplete.
    """
    if type(value) is random.Random:
        return value.getstate()
    if type(value) is np.random.RandomState:
        return value.get_state(legacy=False)
    # The state does not include the number of generators that were spawned.
    if getattr(value.bit_generator.seed_seq, "n_children_spawned", 0):
        raise NotPlain("which is a generator that has spawned others")
    return value.bit_generator.state


def _encode_generator(encoder: Encoder, value: Any) -> dict[str, Any]:
    return {"state": encoder.encode(generator_state(value))}


def _decode_generator(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Any:
    state = decoder.decode(data["state"])
    kind = GENERATORS[data["kind"]]
    found = present if type(present) is kind else None
    if kind is np.random.Generator:
        name = state["bit_generator"]
        if found is None or type(found.bit_generator).__name__ != name:
            found = np.random.Generator(bit_generator(name, "the kind of a generator"))
        found.bit_generator.state = state
        return found
    found = kind() if found is None else found
    found.setstate(state) if kind is random.Random else found.set_state(state)
    return found


def _encode_space(encoder: Encoder, value: Any) -> dict[str, Any]:
    states = [space.np_random.bit_generator.state for space in spaces_in(value)]
    return {"states": encoder.encode(states)}


def _decode_space(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Any:
    for space, state in zip(spaces_in(present), decoder.decode(data["states"]), strict=True):
        space.np_random.bit_generator.state = state
    return present


def _encode_torch_generator(encoder: Encoder, value: torch.Generator) -> dict[str, Any]:
    if value is torch.default_generator:
        # Its state is part of the collector's stream of random numbers.
        return {"kind": "default_generator"}
    return {"device": str(value.device), "state": value.get_state().numpy().tobytes()}


def _decode_torch_generator(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Any:
    if data["kind"] == "default_generator":
        return torch.default_generator
    found = present if isinstance(present, torch.Generator) else torch.default_generator
    if found is torch.default_generator or str(found.device) != data["device"]:
        found = torch.Generator(data["device"])
    found.set_state(torch.from_numpy(np.frombuffer(data["state"], np.uint8).copy()))
    return found


for _name, _type in GENERATORS.items():
    register(_name, _type, _encode_generator, _decode_generator)
register("space", lambda kind: issubclass(kind, Space), _encode_space, _decode_space)
register(
    "torch_generator",
    torch.Generator,
    _encode_torch_generator,
    _decode_torch_generator,
)
register("default_generator", (), _encode_torch_generator, _decode_torch_generator)

# --- other values


def _encode_name(encoder: Encoder, value: Any) -> dict[str, Any]:
    return {"name": str(value).removeprefix("torch.")}


def _decode_name(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Any:
    named: Any = torch_dtype if data["kind"] == "dtype" else torch_device
    return named(data["name"], f"a {data['kind']}")


def _encode_enum(encoder: Encoder, value: Enum) -> dict[str, Any]:
    return {"class": class_name(value), "name": value.name}


def _decode_enum(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Any:
    decoder.check_class(data, present)
    return type(present)[data["name"]]


def _is_synchronized(kind: type) -> bool:
    return full_name(kind) == "multiprocessing.sharedctypes.Synchronized"


def _encode_synchronized(encoder: Encoder, value: Any) -> dict[str, Any]:
    return {"value": encoder.encode(value.value)}


def _decode_synchronized(decoder: Decoder, data: Mapping[str, Any], present: Any) -> Any:
    if not _is_synchronized(type(present)):
        raise NotPlain(f"which is a {class_name(present)} instead of a shared number")
    present.value = decoder.decode(data["value"])
    return present


register("dtype", torch.dtype, _encode_name, _decode_name)
register("device", torch.device, _encode_name, _decode_name)
register("enum", lambda kind: issubclass(kind, Enum), _encode_enum, _decode_enum, in_graphs=True)
register(
    "synchronized", _is_synchronized, _encode_synchronized, _decode_synchronized, in_graphs=True
)

# --- TensorDicts

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
