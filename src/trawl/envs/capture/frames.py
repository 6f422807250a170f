"""TensorDicts as plain data, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
)
from torch import Tensor

from trawl.envs.capture.attributes import Decoder, Encoder


def to_plain(data: TensorDictBase) -> dict[str, Any]:
    """Returns a TensorDict as numbers, tensors, lists and dictionaries."""
    plain: dict[str, Any] = _plain(data)
    return plain


def from_plain(data: Mapping[str, Any]) -> TensorDictBase:
    """Returns the TensorDict that :func:`to_plain` converted."""
    made: TensorDictBase = _made(data)
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, NonTensorData):
        return {"object": Encoder([]).encode(value.data), "shape": list(value.batch_size)}
    if isinstance(value, LazyStackedTensorDict):
        parts = list(map(_plain, value.tensordicts))
        objects = isinstance(value, NonTensorStack)
        names = None if objects else value.names
        return {"parts": parts, "axis": value.stack_dim, "objects": objects, "names": names}
    entries = {key: _plain(entry) for key, entry in value.items()}
    return {"entries": entries, "shape": list(value.batch_size), "names": value.names}


def _made(data: Any) -> Any:
    if isinstance(data, Tensor):
        return data
    if "object" in data:
        return NonTensorData(Decoder([]).decode(data["object"]), data["shape"])
    if "parts" not in data:
        entries = {key: _made(entry) for key, entry in data["entries"].items()}
        return TensorDict(entries, data["shape"], names=data["names"])
    kind = NonTensorStack if data["objects"] else LazyStackedTensorDict
    made = kind(*map(_made, data["parts"]), stack_dim=data["axis"])
    if data["names"] is not None and any(data["names"]):
        made.names = data["names"]
    return made
