"""Pickles of attributes that may share memory, and may refer to objects of an environment."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch
from gymnasium.utils import EzPickle
from torch import Tensor, nn
from typing_extensions import override

from trawl.envs.capture.attributes import NotPlain


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


class AttributePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles attributes, except objects of the environment that they refer to.

    Tensors and arrays that share memory still do so when they are unpickled.

    Args:
        file: the file to write to.
        members: objects that are not pickled.
        closed: additional classes whose objects would lose their state in a pickle.
    """

    def __init__(self, file: io.BytesIO, members: Sequence[Any], closed: tuple[type, ...]) -> None:
        super().__init__(file)
        self._numbers = {id(member): index for index, member in enumerate(members)}
        self._closed = (EzPickle, *closed)
        self._blocks: dict[int, _Block] = {}

    @override
    def persistent_id(self, obj: Any) -> int | None:
        return self._numbers.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        """Returns how to pickle an object."""
        if isinstance(obj, self._closed):
            raise NotPlain(f"with {type(obj).__name__}, which would lose its state in a pickle")
        if type(obj) in (Tensor, nn.Parameter) and obj.layout is torch.strided:
            return _tensor, self._layout(obj)
        if type(obj) is np.ndarray and isinstance(obj.base, np.ndarray):
            owner = obj.base
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            offset = obj.__array_interface__["data"][0] - owner.__array_interface__["data"][0]
            return _view, (owner, obj.dtype, obj.shape, obj.strides, offset)
        return super().reducer_override(obj)

    def _layout(self, tensor: Tensor) -> tuple[Any, ...]:
        if tensor.grad_fn is not None:
            raise NotPlain("with a tensor that has a graph of gradients")
        memory = tensor.detach().untyped_storage()
        block = self._blocks.setdefault(memory.data_ptr(), _Block(memory))
        if not memory.nbytes():
            # Blocks without memory have the same address, but share nothing.
            block = _Block(memory)
        place = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        return block, *place, tensor.requires_grad, type(tensor) is nn.Parameter


def _tensor(
    block: _Block,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    gradient: bool,
    parameter: bool,
) -> Tensor:
    made = torch.empty(0, dtype=dtype, device=block.memory.device)
    made.set_(block.memory, offset, shape, strides)
    return nn.Parameter(made, gradient) if parameter else made.requires_grad_(gradient)


def _view(
    owner: Any, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> np.ndarray[Any, Any]:
    return np.ndarray(shape, dtype, owner, offset, strides)


class AttributeUnpickler(pickle.Unpickler):
    """Unpickles attributes that an :class:`AttributePickler` wrote.

    Args:
        file: the file to read from.
        members: the objects in place of the pickler's members.
    """

    def __init__(self, file: io.BytesIO, members: Sequence[Any]) -> None:
        super().__init__(file)
        self._members = members

    @override
    def persistent_load(self, pid: Any) -> Any:
        return self._members[pid]
