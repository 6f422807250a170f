"""Pickles whose large tensors lie beside them, so that what carries them need not copy those."""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Fewer bytes are as well off in the pickle itself.
_LEAST = 4096

Bytes = NDArray[np.uint8]


def fold(content: Any) -> tuple[bytes, list[Bytes]]:
    """A pickle, and the memory of the large tensors in it, which is that of ``content``.

    ``pickle.loads`` takes both, the latter as ``buffers``: what it makes refers to those.
    """
    beside: list[Bytes] = []
    file = io.BytesIO()
    _Pickler(file, beside).dump(content)
    return file.getvalue(), beside


def reduced(tensor: Tensor) -> tuple[Any, ...] | None:
    """How a tensor is pickled so that its memory can lie beside; None if that can't be."""
    if type(tensor) is not Tensor or not _is_plain(tensor):
        return None
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _tensor, (flat, tensor.dtype, tensor.shape)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but numbers in this process's memory."""
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
