"""TensorDicts of frames as plain data, with text and other objects of Gymnasium's spaces."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from trawl.envs.capture.attributes import Decoder, Encoder, NotPlain
from trawl.errors import EnvStateError
from trawl.tensordicts import from_plain, to_plain

_OBJECT = "whole"


def plain_frames(frames: TensorDictBase, strict: bool = False) -> dict[str, Any]:
    """Returns a copy of frames as numbers, tensors, lists and dictionaries.

    Args:
        frames: the frames.
        strict: True to refuse other objects than those of Gymnasium's spaces; False to leave them
            as they are.

    Raises:
        EnvStateError: if an entry holds another object, and ``strict`` is True.
    """
    try:
        return to_plain(frames, partial(_plain, strict))
    except NotPlain as error:
        raise EnvStateError(f"an entry of the frames holds data, {error}") from error


def frames_from(data: Mapping[str, Any]) -> TensorDictBase:
    """Returns the frames that :func:`plain_frames` converted."""
    return from_plain(data, _unplain)


def _plain(strict: bool, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    try:
        return Encoder([]).encode(value)
    except NotPlain:
        if strict:
            raise
        return {"kind": _OBJECT, "value": value}


def _unplain(value: Any, present: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    whole = isinstance(value, dict) and value["kind"] == _OBJECT
    return value["value"] if whole else Decoder([]).decode(value)
