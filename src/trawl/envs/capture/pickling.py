"""Pickles of environments and of their attributes, which a program signs.

A program opens only pickles that its own processes made, unless the user trusts others. Tensors
that share memory, views of the memory of a tensor (``tensor.numpy()``), and views of an array still
do so when they are unpickled. A tensor that was made of an array (``torch.from_numpy``) gets memory
of its own, as does a tensor with attributes.
"""

from __future__ import annotations

import hmac
import io
import pickle
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from gymnasium.utils import EzPickle
from torch import Tensor, nn
from typing_extensions import override

from trawl.envs.capture.codec import NotPlain
from trawl.errors import EnvStateError

# A process that another process of the program starts gets the key of the other process.
_keys = [secrets.token_bytes(32)]


def signing_key() -> bytes:
    """Returns the key of this process, which must be passed to the processes that it starts."""
    return _keys[0]


def use_signing_key(key: bytes) -> None:
    """Makes this process sign with the key of the process that started it."""
    _keys[0] = key


def _signature(data: bytes) -> bytes:
    return hmac.digest(_keys[0], data, "sha256")


def pickled(
    value: Any, members: Sequence[Any] = (), closed: tuple[type, ...] = ()
) -> dict[str, Any]:
    """Returns the pickle of a value, and its signature.

    Args:
        value: the value.
        members: objects that the value may refer to, and that are not pickled.
        closed: additional classes whose objects would lose their state in a pickle.

    Raises:
        NotPlain: if the value can't be pickled.
    """
    file = io.BytesIO()
    try:
        _Pickler(file, members, closed).dump(value)
    except NotPlain:
        raise
    except Exception as error:
        raise NotPlain(f"which can't be pickled: {error}") from error
    data = file.getvalue()
    return {"pickle": data, "signature": _signature(data)}


def unpickled(state: Mapping[str, Any], members: Sequence[Any] = ()) -> Any:
    """Returns the value that :func:`pickled` pickled, with ``members`` in place of its members."""
    return _Unpickler(io.BytesIO(state["pickle"]), members).load()


def is_own(state: Mapping[str, Any]) -> bool:
    """Returns True if a process of this program made the pickle in a state."""
    return hmac.compare_digest(state["signature"], _signature(state["pickle"]))


def check_trust(state: Mapping[str, Any], trust: bool, owner: Any) -> None:
    """Checks that a pickle may be opened.

    Raises:
        EnvStateError: if another program made the pickle, and the user does not trust it.
    """
    if not (trust or is_own(state)):
        raise EnvStateError(
            f"{owner} was pickled by another program, and a pickle can run any code: if you know "
            "where the state comes from, load it with trust=True"
        )


class _Block:
    """Memory of one or several tensors, which is pickled once."""

    def __init__(self, memory: torch.UntypedStorage) -> None:
        self.memory = memory

    def __reduce__(self) -> Any:
        flat = torch.empty(0, dtype=torch.uint8, device=self.memory.device).set_(self.memory)
        return _block, (flat.cpu().numpy().tobytes(), str(self.memory.device))


def _block(data: bytes, device: str) -> _Block:
    flat = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    return _Block(flat.to(device).untyped_storage())


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, members: Sequence[Any], closed: tuple[type, ...]) -> None:
        super().__init__(file)
        self._numbers = {id(member): index for index, member in enumerate(members)}
        self._closed = (EzPickle, *closed)
        self._blocks: dict[int, _Block] = {}

    @override
    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, self._closed):
            raise NotPlain(f"with {type(obj).__name__}, which would lose its state in a pickle")
        if type(obj) in (Tensor, nn.Parameter) and obj.layout is torch.strided:
            if self._numbers or _is_plain(obj):
                return _tensor, self._layout(obj)
            # A whole environment, whose tensors can be pickled in torch's own way.
            return super().reducer_override(obj)
        if type(obj) is np.ndarray and obj.size and not obj.dtype.hasobject:
            owner: Any = obj
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            if type(owner.base) is Tensor and _is_plain(owner.base):
                block = self._block(owner.base.untyped_storage())
                offset = obj.__array_interface__["data"][0] - block.memory.data_ptr()
                return _view_of_block, (block, obj.dtype, obj.shape, obj.strides, offset)
            if owner is obj or not owner.flags.c_contiguous or owner.dtype.hasobject:
                return super().reducer_override(obj)
            offset = obj.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
            return _view, (owner, obj.dtype, obj.shape, obj.strides, offset)
        return super().reducer_override(obj)

    def _layout(self, tensor: Tensor) -> tuple[Any, ...]:
        if tensor.grad_fn is not None:
            raise NotPlain("with a tensor that has a graph of gradients")
        block = self._block(tensor.detach().untyped_storage())
        place = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return block, *place, tensor.requires_grad, type(tensor) is nn.Parameter, tensor.grad

    def _block(self, memory: torch.UntypedStorage) -> _Block:
        if not memory.nbytes():
            # Blocks without memory have the same address, but share nothing.
            return _Block(memory)
        return self._blocks.setdefault(memory.data_ptr(), _Block(memory))


def _is_plain(tensor: Tensor) -> bool:
    """Returns True if a tensor has nothing but its layout, its memory and its gradient."""
    return not (
        tensor.grad_fn is not None
        or tensor.is_meta
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or vars(tensor)
    )


def _tensor(
    block: _Block,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    gradient: bool,
    parameter: bool,
    grad: Tensor | None = None,
) -> Tensor:
    made = torch.empty(0, dtype=dtype, device=block.memory.device)
    made.set_(block.memory, offset, shape, strides)
    made = nn.Parameter(made, gradient) if parameter else made.requires_grad_(gradient)
    made.grad = grad
    return made


def _view_of_block(
    block: _Block,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
) -> np.ndarray[Any, Any]:
    flat = torch.empty(0, dtype=torch.uint8).set_(block.memory).numpy()
    return np.ndarray(shape, dtype, flat, offset, strides)


def _view(
    owner: Any, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> np.ndarray[Any, Any]:
    return np.ndarray(shape, dtype, owner, offset, strides)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, members: Sequence[Any]) -> None:
        super().__init__(file)
        self._members = members

    @override
    def persistent_load(self, pid: Any) -> Any:
        return self._members[pid]
