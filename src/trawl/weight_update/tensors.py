"""The tensors of a model, by name, in whatever form they come."""

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

#: Where a model's extra state is among its weights, by the path of the submodule it belongs to.
EXTRA = "__extra_state__"
# What ``nn.Module.state_dict`` calls it.
_EXTRA_SUFFIX = "_extra_state"


@dataclass(frozen=True)
class Weights:
    """Weights in the one form that all others are brought to.

    Attributes:
        tensors: parameters and buffers by dotted name; tied ones under each of their names.
        extra: extra state (``nn.Module.get_extra_state``) by the path of its module.
    """

    tensors: dict[str, Tensor]
    extra: dict[str, Any] = field(default_factory=dict)


def weights_of(source: Any) -> Weights:
    """The weights that a user gave.

    Args:
        source: a module; a TensorDict of its parameters and buffers; a nested mapping of these,
            or a state dict.

    Raises:
        TypeError: if it is none of these, or has weights that are no tensors.
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
    """All parameters and buffers, tied ones under each of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {**dict(parameters), **dict(buffers)}


def check_whole(module: nn.Module) -> None:
    """Refuses a module that keeps weights in something else than tensors, as quantized ones do.

    Raises:
        TypeError: for such a module: new weights would not reach it.
        ValueError: for one that has parameters without shapes.
    """
    lazy = [name for name, value in module.named_parameters() if is_lazy(value)]
    if lazy:
        raise ValueError(
            f"{type(module).__name__} has parameters without shapes, as those of LazyLinear before "
            f"its first call: {', '.join(lazy)}. Call it once before its weights are sent"
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
                f"{type(module).__name__} has weights that are no tensors: {', '.join(others)} (it "
                "was quantized, perhaps). They can't be sent; send those of the module it was "
                "made of, to workers that don't quantize it, or collect without updates"
            )


def check_dtype(name: str, given: torch.dtype, own: torch.dtype) -> None:
    """Refuses a weight that would have to change what it is: a count, a mask or a real number.

    Floating-point numbers are rounded to the precision of the model. An integer is taken by wider
    integers only, so no count changes its value, and a bool only by a bool.

    Args:
        name: name of the weight, for the error.
        given: its dtype.
        own: the dtype that the model has.

    Raises:
        ValueError: if one can't be cast to the other in this way.
    """
    if not is_castable(given, own):
        raise ValueError(
            f"weight {name!r} is {given}, which is not cast to the policy's {own}, since values "
            f"could be lost. If this is the right tensor, give it as {own}, for example with "
            f".to({own})"
        )


def is_castable(given: torch.dtype, own: torch.dtype) -> bool:
    """Returns whether weights of one dtype are taken for those of another: see check_dtype."""
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
    """What submodules have to say of themselves beside their tensors, by path."""
    return {
        path: part.get_extra_state()
        for path, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
    }


def packed_extra(extra: Mapping[str, Any]) -> bytes:
    """Extra state as bytes; none for none."""
    data: bytes = cloudpickle.dumps(extra) if extra else b""
    return data


def unpacked_extra(data: bytes) -> dict[str, Any]:
    """The extra state in bytes."""
    return pickle.loads(data) if data else {}


def set_extra_state(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Gives submodules their extra state.

    Raises:
        KeyError: as :func:`check_extra_state`.
    """
    for part, state in check_extra_state(module, extra):
        part.set_extra_state(state)


def check_extra_state(module: nn.Module, extra: Mapping[str, Any]) -> list[tuple[nn.Module, Any]]:
    """Looks up who is to have which extra state.

    Raises:
        KeyError: if there is no such submodule, or it takes none.
    """
    found = []
    for path, state in extra.items():
        try:
            part = module.get_submodule(path)
        except AttributeError:
            raise KeyError(
                f"there is extra state for {path!r}, which {type(module).__name__} has not"
            ) from None
        if type(part).set_extra_state is nn.Module.set_extra_state:
            kind = type(part).__name__
            raise KeyError(f"there is extra state for {path!r}, but {kind} takes none")
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
            raise TypeError(f"weight {name!r} is no tensor but {type(value).__name__}")
    return Weights(tensors, extra)


def _flattened(source: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in source.items():
        is_extra = str(name).rpartition(".")[2] == _EXTRA_SUFFIX
        if isinstance(value, (Mapping, TensorDictBase)) and not is_extra:
            yield from _flattened(dict(value.items()), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
