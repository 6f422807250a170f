"""Pickles with the memory of large tensors in separate buffers, which need not be copied."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Buffers of fewer bytes stay in the pickle.
_LEAST = 4096

Bytes = NDArray[np.uint8]


def fold(content: Any) -> tuple[bytes, list[Bytes]]:
    """Returns a pickle of ``content``, and the memory of the large tensors in it.

    Contiguous memory is not copied. ``pickle.loads`` needs the memory as its argument ``buffers``.
    The unpickled tensors use the memory of these buffers.
    """
    beside: list[Bytes] = []
    file = io.BytesIO()
    _Pickler(file, beside).dump(content)
    return file.getvalue(), beside


def reduced(tensor: Tensor) -> tuple[Any, ...] | None:
    """Returns a pickle reduction with a tensor's memory in its own buffer; None if impossible."""
    if type(tensor) is not Tensor or not _is_plain(tensor):
        return None
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _tensor, (flat, tensor.dtype, tensor.shape)


def _is_plain(tensor: Tensor) -> bool:
    """Returns True if a tensor is not empty and consists only of numbers in CPU memory."""
    return bool(
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.numel()
    )


def _tensor(flat: Bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, beside: list[Bytes]) -> None:
        super().__init__(file, protocol=5, buffer_callback=self._is_small)
        self._beside = beside

    def _is_small(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _LEAST:
            self._beside.append(np.frombuffer(raw, dtype=np.uint8))
        return raw.nbytes < _LEAST

    def reducer_override(self, obj: Any) -> Any:
        made = reduced(obj) if isinstance(obj, Tensor) else None
        return super().reducer_override(obj) if made is None else made
