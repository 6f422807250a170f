"""Conversion of attributes that hold tensors and TensorDicts to plain data, and back.

Tensors that share memory still do so after restoring. Parameters, buffers and shared memory are
written in place, because objects outside the environment may refer to them.
"""

from __future__ import annotations

import multiprocessing.synchronize
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_leaf_nontensor, is_non_tensor
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from typing_extensions import override

from trawl.envs.capture.attributes import Decoder, Encoder, NotPlain, class_name
from trawl.envs.capture.frames import from_plain, to_plain
from trawl.envs.specs import Composite, Spec
from trawl.schema.checks import torch_device, torch_dtype

_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_UNINITIALIZED = (UninitializedBuffer, UninitializedParameter)
_LOCKS = (
    multiprocessing.synchronize.Lock,
    multiprocessing.synchronize.RLock,
    type(threading.Lock()),
    type(threading.RLock()),
)
_SYNCHRONIZED = "multiprocessing.sharedctypes.Synchronized"


class TensorEncoder(Encoder):
    """Converts attributes that may hold tensors and TensorDicts to plain data.

    Args:
        members: objects that values may refer to, and that are not part of the data.
        fixed: additional classes whose instances do not change.
    """

    def __init__(self, members: Sequence[Any], fixed: tuple[type, ...] = ()) -> None:
        super().__init__(members)
        self.fixed = (Spec, Composite, weakref.ref, *_LOCKS, *fixed)
        # For each block of memory: its number, and a tensor that keeps it alive.
        self._blocks: dict[tuple[str, int], tuple[int, Tensor]] = {}

    @override
    def encode(self, value: Any, inside: bool = True) -> Any:
        plain = super().is_fixed(value) and id(value) not in self._members
        return {"kind": "fixed"} if plain else super().encode(value, inside)

    @override
    def _encoded(self, value: Any, inside: bool) -> dict[str, Any]:
        if type(value) in _UNINITIALIZED:
            return {"kind": "uninitialized"}
        if type(value) in _PLAIN_TENSORS:
            return self._tensor(value)
        if isinstance(value, TensorDictBase) or is_non_tensor(value):
            return {
                "kind": "tensordict",
                "tree": to_plain(value, self.encode),
                "locked": bool(value.is_locked),
            }
        if isinstance(value, torch.Size):
            return {"kind": "size", "items": list(value)}
        if isinstance(value, (torch.dtype, torch.device)):
            return {"kind": type(value).__name__, "name": str(value).removeprefix("torch.")}
        if isinstance(value, torch.Generator):
            if value is torch.default_generator:
                # Its state is part of the collector's stream of random numbers.
                return {"kind": "default_generator"}
            state = value.get_state().numpy().tobytes()
            return {"kind": "torch_generator", "device": str(value.device), "state": state}
        if isinstance(value, Enum):
            return {"kind": "enum", "class": class_name(value), "name": value.name}
        if class_name(value) == _SYNCHRONIZED:
            return {"kind": "synchronized", "value": self.encode(value.value)}
        return super()._encoded(value, inside)

    def _tensor(self, value: Tensor) -> dict[str, Any]:
        if value.layout is not torch.strided or value.is_quantized or value.is_conj():
            raise NotPlain("which is a tensor without strides")
        if value.grad_fn is not None:
            raise NotPlain("which is a tensor with a graph of gradients")
        plain = value.detach()
        memory = plain.untyped_storage()
        key = str(plain.device), memory.data_ptr()
        number, known = self._blocks.get(key, (len(self._blocks), None))
        data = {
            "kind": "tensor",
            "block": number,
            "device": str(plain.device),
            "dtype": str(plain.dtype).removeprefix("torch."),
            "shape": list(plain.shape),
            "strides": list(plain.stride()),
            "offset": int(plain.storage_offset()),
            "gradient": bool(value.requires_grad),
        }
        if known is None:
            # Blocks without memory have the same address, but share nothing.
            key = key if memory.nbytes() else ("empty", number)
            self._blocks[key] = number, plain
            # None, because torch.load(weights_only=True) refuses empty bytes.
            data["data"] = _bytes_of(memory, plain.device).cpu().numpy().tobytes() or None
        return data


def _bytes_of(memory: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(memory)


class TensorDecoder(Decoder):
    """Writes attributes that a :class:`TensorEncoder` returned into objects.

    Args:
        members: the objects in place of the encoder's members.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        super().__init__(members)
        self._blocks: dict[int, torch.UntypedStorage] = {}
        self._written: set[int] = set()
        self._everywhere = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Writes tensors in place within a ``with`` block, if their layout is unchanged."""
        self._everywhere = True
        try:
            yield
        finally:
            self._everywhere = False

    @override
    def decode(self, data: Any, present: Any = None) -> Any:
        if isinstance(data, Mapping) and data["kind"] == "fixed":
            if present is None:
                raise NotPlain("which holds an object that the environment doesn't have now")
            return present
        return super().decode(data, present)

    @override
    def _decoded(self, data: Mapping[str, Any], present: Any) -> Any:
        match data["kind"]:
            case "list" | "tuple" as kind:
                items = data["items"]
                alike = type(present) in (list, tuple) and len(present) == len(items)
                found = map(self.decode, items, present if alike else [None] * len(items))
                return list(found) if kind == "list" else tuple(found)
            case "dict":
                old = present if type(present) is dict else {}
                pairs = ((self.decode(key), item) for key, item in data["items"])
                return {key: self.decode(item, old.get(key)) for key, item in pairs}
            case "tensor":
                return self._tensor(data, present)
            case "uninitialized":
                return present if type(present) in _UNINITIALIZED else UninitializedBuffer()
            case "tensordict":
                return self._tensordict(data, present)
            case "size":
                return torch.Size(data["items"])
            case "dtype":
                return torch_dtype(data["name"], "a dtype")
            case "device":
                return torch_device(data["name"], "a device")
            case "default_generator":
                return torch.default_generator
            case "torch_generator":
                return _generator(data, present)
            case "enum":
                return _enum(data, present)
            case "synchronized":
                if class_name(present) != _SYNCHRONIZED:
                    raise NotPlain(f"which is a {class_name(present)} instead of a shared number")
                present.value = self.decode(data["value"])
                return present
        return super()._decoded(data, present)

    def _tensordict(self, data: Mapping[str, Any], present: Any) -> Any:
        made = from_plain(data["tree"], self.decode, present)
        if isinstance(present, TensorDictBase) and type(present) is type(made):
            old, new = (_leaves(one) for one in (present, made))
            if old.keys() == new.keys() and all(old[key] is new[key] for key in new):
                return present
        return made.lock_() if data["locked"] else made

    def _tensor(self, data: Mapping[str, Any], present: Any) -> Tensor:
        memory = self._blocks.get(data["block"])
        if memory is None:
            memory = self._block(data, present)
            self._blocks[data["block"]] = memory
        if _lies_alike(data, present) and present.untyped_storage().data_ptr() == memory.data_ptr():
            found: Tensor = present
            return found
        dtype = torch_dtype(data["dtype"], "the dtype of a tensor")
        made = torch.empty(0, dtype=dtype, device=data["device"])
        made.set_(memory, data["offset"], tuple(data["shape"]), tuple(data["strides"]))
        return made.requires_grad_() if data["gradient"] else made

    def _block(self, data: Mapping[str, Any], present: Any) -> torch.UntypedStorage:
        """Returns memory with the data of a tensor; the memory of ``present`` if it is reused."""
        content = torch.from_numpy(np.frombuffer(bytearray(data["data"] or b"\0"), np.uint8))
        content = content if data["data"] else content[:0].clone()
        if _lies_alike(data, present) and (self._everywhere or present.is_shared()):
            memory: torch.UntypedStorage = present.untyped_storage()
            # Tensors that share memory in the new environment may differ in the state.
            if memory.nbytes() == len(content) and memory.data_ptr() not in self._written:
                self._written.add(memory.data_ptr())
                _bytes_of(memory, present.device).copy_(content)
                return memory
        return content.to(data["device"]).untyped_storage()


def _leaves(values: TensorDictBase) -> dict[Any, Any]:
    return dict(values.items(True, True, is_leaf=is_leaf_nontensor))


def _lies_alike(data: Mapping[str, Any], present: Any) -> bool:
    """Returns True if ``present`` is a tensor with the layout of encoded data."""
    return type(present) in _PLAIN_TENSORS and (
        str(present.device),
        str(present.dtype).removeprefix("torch."),
        list(present.shape),
        list(present.stride()),
        int(present.storage_offset()),
    ) == (data["device"], data["dtype"], data["shape"], data["strides"], data["offset"])


def _generator(data: Mapping[str, Any], present: Any) -> torch.Generator:
    found = present if isinstance(present, torch.Generator) else torch.default_generator
    if found is torch.default_generator or str(found.device) != data["device"]:
        found = torch.Generator(data["device"])
    found.set_state(torch.from_numpy(np.frombuffer(data["state"], np.uint8).copy()))
    return found


def _enum(data: Mapping[str, Any], present: Any) -> Any:
    if class_name(present) != data["class"]:
        raise NotPlain(f"which is a {class_name(present)} instead of a {data['class']}")
    return type(present)[data["name"]]
