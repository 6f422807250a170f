"""Weights of a model by name, converted from any form in which a user may pass them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

#: Key of a model's extra state among its weights. The value is a dict keyed by submodule path.
EXTRA = "__extra_state__"
# Suffix of the keys of extra state in ``nn.Module.state_dict``.
_EXTRA_SUFFIX = "_extra_state"


@dataclass(frozen=True)
class Weights:
    """Weights in the internal form, to which all other forms are converted.

    Attributes:
        tensors: parameters and buffers by dotted name; tied tensors under each of their names.
        extra: extra state (``nn.Module.get_extra_state``) by the path of its module.
    """

    tensors: dict[str, Tensor]
    extra: dict[str, Any] = field(default_factory=dict)


def weights_of(source: Any) -> Weights:
    """Converts weights from any form in which a user may pass them.

    Args:
        source: a module; a TensorDict or nested mapping of a module's parameters and buffers; or a
            state dict.

    Raises:
        TypeError: if ``source`` is none of these, or has weights that are not tensors.
        ValueError: if a module has parameters without shapes.
    """
    if isinstance(source, TensorDictBase):
        return _of_mapping(dict(source.items()))
    if isinstance(source, nn.Module):
        check_whole(source)
        return Weights(named_tensors(source), extra_state(source))
    if isinstance(source, Weights):
        return source
    if isinstance(source, Mapping):
        return _of_mapping(source)
    raise TypeError(
        "weights must be a module, a TensorDict or a dict of tensors, but they are "
        f"{type(source).__name__}"
    )


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns all parameters and buffers by name, tied tensors under each of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {**dict(parameters), **dict(buffers)}


def check_whole(module: nn.Module) -> None:
    """Rejects a module with weights that are not tensors, such as a quantized module.

    Raises:
        TypeError: if weights are not tensors, because an update would not change these weights.
        ValueError: if parameters have no shapes yet.
    """
    lazy = [name for name, value in module.named_parameters() if is_lazy(value)]
    if lazy:
        raise ValueError(
            f"{type(module).__name__} has parameters without shapes, such as those of LazyLinear "
            f"before its first call: {', '.join(lazy)}. Call the module once before its weights "
            "are sent"
        )
    for path, part in module.named_modules():
        plain = type(part)._save_to_state_dict is nn.Module._save_to_state_dict
        if plain or isinstance(part, TensorDictBase):
            continue
        others = [
            f"{path}.{name}".lstrip(".")
            for name, value in part.state_dict().items()
            if not isinstance(value, Tensor) and name.rpartition(".")[2] != _EXTRA_SUFFIX
        ]
        if others:
            raise TypeError(
                f"{type(module).__name__} has weights that are not tensors: {', '.join(others)} "
                "(perhaps it was quantized). They can't be sent: send the weights of the "
                "original module to workers that don't quantize it, or collect without updates"
            )


def check_dtype(name: str, given: torch.dtype, own: torch.dtype) -> None:
    """Rejects a weight whose dtype can't be cast to the model's dtype.

    Floating-point numbers are rounded to the precision of the model. An integer dtype is cast only
    to an integer dtype that can represent all of its values, so counts don't change. A bool is cast
    only to a bool, so masks stay masks.

    Args:
        name: name of the weight, for the error message.
        given: dtype of the weight.
        own: dtype of the model's tensor.

    Raises:
        ValueError: if ``given`` can't be cast to ``own``.
    """
    if not is_castable(given, own):
        raise ValueError(
            f"weight {name!r} is {given}, which is not cast to the policy's {own}, because "
            f"values could be lost. If this is the right tensor, convert it to {own}, for "
            f"example with .to({own})"
        )


def is_castable(given: torch.dtype, own: torch.dtype) -> bool:
    """Returns True if dtype ``given`` can be cast to ``own``; see :func:`check_dtype`."""
    if given == own:
        return True
    if given.is_floating_point:
        return own.is_floating_point or own.is_complex
    if given.is_complex:
        return own.is_complex
    if own.is_floating_point or own.is_complex or torch.bool in (given, own):
        return False
    narrow, wide = torch.iinfo(given), torch.iinfo(own)
    return wide.min <= narrow.min and narrow.max <= wide.max


def extra_state(module: nn.Module) -> dict[str, Any]:
    """Returns the extra state of submodules (``get_extra_state``), by path."""
    return {
        path: part.get_extra_state()
        for path, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def packed_extra(extra: Mapping[str, Any]) -> bytes:
    """Pickles extra state. The result for an empty mapping is empty."""
    data: bytes = cloudpickle.dumps(extra) if extra else b""
    return data


def unpacked_extra(data: bytes) -> dict[str, Any]:
    """Unpickles extra state. The result for empty bytes is empty."""
    return pickle.loads(data) if data else {}


def set_extra_state(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Passes extra state to submodules (``set_extra_state``).

    Raises:
        KeyError: see :func:`check_extra_state`.
    """
    for part, state in check_extra_state(module, extra):
        part.set_extra_state(state)


def check_extra_state(module: nn.Module, extra: Mapping[str, Any]) -> list[tuple[nn.Module, Any]]:
    """Returns each submodule that gets extra state, together with that state.

    Raises:
        KeyError: if a submodule does not exist, or does not accept extra state.
    """
    found = []
    for path, state in extra.items():
        try:
            part = module.get_submodule(path)
        except AttributeError:
            raise KeyError(
                f"there is extra state for {path!r}, but {type(module).__name__} has no such "
                "submodule"
            ) from None
        if type(part).set_extra_state is nn.Module.set_extra_state:
            kind = type(part).__name__
            raise KeyError(f"there is extra state for {path!r}, but {kind} takes no extra state")
        found.append((part, state))
    return found


def _of_mapping(source: Mapping[str, Any]) -> Weights:
    tensors: dict[str, Tensor] = {}
    given = source.get(EXTRA, {})
    extra = dict(getattr(given, "data", given))
    for name, value in _flattened({k: v for k, v in source.items() if k != EXTRA}, ""):
        path, _, last = name.rpartition(".")
        if last == _EXTRA_SUFFIX:
            extra[path] = value
        elif isinstance(value, Tensor):
            tensors[name] = value
        else:
            raise TypeError(f"weight {name!r} must be a tensor, but it is {type(value).__name__}")
    return Weights(tensors, extra)


def _flattened(source: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in source.items():
        is_extra = str(name).rpartition(".")[2] == _EXTRA_SUFFIX
        if isinstance(value, (Mapping, TensorDictBase)) and not is_extra:
            yield from _flattened(dict(value.items()), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
