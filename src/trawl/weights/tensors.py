"""Weights of a model by name, converted from any form in which a user may pass them."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trawl.foreign.torch import saves_specially

# Keys of a module's extra state: in a TensorDict, among the module's weights; and in a state dict,
# as in ``nn.Module.state_dict``.
_EXTRA = "__extra_state__"
_EXTRA_SUFFIX = "_extra_state"
_EXTRA_KEYS = (_EXTRA, _EXTRA_SUFFIX)


@dataclass(frozen=True)
class Weights:
    """Weights in the internal form, to which all other forms are converted.

    Attributes:
        tensors: parameters and buffers by dotted name; tied tensors under each of their names.
        extra: extra state (``nn.Module.get_extra_state``) by the path of its module.
    """

    tensors: dict[str, Tensor]
    extra: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> Weights:
        """Returns copies in CPU memory that share no memory with the originals."""
        copies: dict[int, Tensor] = {}
        for tensor in self.tensors.values():
            if id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().to("cpu", copy=True)
        tensors = {name: copies[id(tensor)] for name, tensor in self.tensors.items()}
        return Weights(tensors, _copied_extra(self.extra))

    def in_form(self, form: str) -> Any:
        """Returns the weights as a flat dict if ``form`` is ``"state_dict"``, or else nested."""
        return self.flat() if form == "state_dict" else self.nested()

    def nested(self) -> TensorDict:
        """Returns the tensors and copies of the extra state as a nested TensorDict.

        Extra state is under the key ``"__extra_state__"`` of its module. A dict with text as keys
        becomes a TensorDict, in which values other than tensors and such dicts are non-tensor data.
        """
        found = TensorDict({tuple(name.split(".")): value for name, value in self._detached()})
        for path, state in _copied_extra(self.extra).items():
            found.set((*path.split("."), _EXTRA) if path else _EXTRA, _as_entry(state))
        return found

    def flat(self) -> dict[str, Any]:
        """Returns the tensors and copies of the extra state as a state dict."""
        extra = _copied_extra(self.extra)
        states = {f"{path}.{_EXTRA_SUFFIX}".lstrip("."): state for path, state in extra.items()}
        return {**dict(self._detached()), **states}

    def _detached(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.detach()) for name, tensor in self.tensors.items())


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
        if not saves_specially(part) or isinstance(part, TensorDictBase):
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
    """Pickles extra state. The result for an empty mapping is empty.

    Raises:
        TypeError: if extra state can't be pickled.
    """
    if not extra:
        return b""
    try:
        data: bytes = cloudpickle.dumps(extra)
    except Exception as error:
        names = ", ".join(repr(path or "the module itself") for path in extra)
        raise TypeError(
            f"the extra state (get_extra_state) of {names} can't be pickled: {error}"
        ) from error
    return data


def unpacked_extra(data: bytes) -> dict[str, Any]:
    """Unpickles extra state. The result for empty bytes is empty."""
    return pickle.loads(data) if data else {}


def set_extra_state(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Passes copies of extra state to submodules (``set_extra_state``).

    Modules usually keep what they get, and change it later.

    Raises:
        KeyError: see :func:`check_extra_state`.
    """
    for part, state in check_extra_state(module, _copied_extra(extra)):
        part.set_extra_state(state)


def own_extra_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict with copies of its extra state, for ``nn.Module.load_state_dict``."""
    extra = {k: v for k, v in state_dict.items() if k.rpartition(".")[2] == _EXTRA_SUFFIX}
    return {**state_dict, **_copied_extra(extra)}


def update_extra_state(destination: Any, extra: Mapping[str, Any]) -> None:
    """Replaces extra state in a TensorDict or dict of weights; tensors are changed in place.

    Args:
        destination: the TensorDict or dict. Extra state that it lacks is left out.
        extra: extra state by the path of its module.
    """
    given = _copied_extra(extra)
    for path, container, key in list(_extra_places(destination, "")):
        if path in given:
            _replace(container, key, given[path])


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


def _copied_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns copies of extra state, like those that other processes get."""
    return unpacked_extra(packed_extra(extra))


def _as_entry(state: Any) -> Any:
    """Returns extra state as an entry of a TensorDict; the inverse of :func:`_of_entry`."""
    if isinstance(state, Tensor):
        return state.detach()
    if type(state) in (dict, OrderedDict) and state and all(type(key) is str for key in state):
        return TensorDict({key: _as_entry(value) for key, value in state.items()})
    return NonTensorData(state)


def _of_entry(entry: Any) -> Any:
    if is_non_tensor(entry):
        return entry.data
    if isinstance(entry, TensorDictBase):
        return {key: _of_entry(value) for key, value in entry.items()}
    return entry


def _of_mapping(source: Mapping[str, Any]) -> Weights:
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in _flattened(source, ""):
        path, _, last = name.rpartition(".")
        if last == _EXTRA_SUFFIX:
            extra[path] = value
        elif last == _EXTRA:
            extra[path] = _of_entry(value)
        elif _EXTRA in (parts := name.split(".")):
            # The keys of a TensorDict were flattened.
            at = parts.index(_EXTRA)
            place = extra.setdefault(".".join(parts[:at]), {})
            for part in parts[at + 1 : -1]:
                place = place.setdefault(part, {})
            place[last] = _of_entry(value)
        elif isinstance(value, Tensor):
            tensors[name] = value
        else:
            raise TypeError(f"weight {name!r} must be a tensor, but it is {type(value).__name__}")
    return Weights(tensors, extra)


def _flattened(source: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in source.items():
        if _is_branch(name, value):
            yield from _flattened(dict(value.items()), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _extra_places(source: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
    """Yields the path, the container and the key of each module's extra state."""
    for name, value in source.items():
        if _is_branch(name, value):
            yield from _extra_places(value, f"{prefix}{name}.")
        elif str(name).rpartition(".")[2] in _EXTRA_KEYS:
            yield f"{prefix}{name}".rpartition(".")[0], source, name


def _is_branch(name: Any, value: Any) -> bool:
    """Returns True if an entry contains other weights, and isn't the extra state of a module."""
    nested = isinstance(value, (Mapping, TensorDictBase))
    return nested and str(name).rpartition(".")[2] not in _EXTRA_KEYS


def _replace(container: Any, key: str, state: Any) -> None:
    if not isinstance(container, TensorDictBase):
        container[key] = state
        return
    old, new = container.get(key), _as_entry(state)
    if isinstance(new, TensorDictBase) and isinstance(old, TensorDictBase):
        if set(new.keys()) == set(old.keys()):
            for inner, value in state.items():
                _replace(old, inner, value)
            return
    elif isinstance(new, Tensor) and isinstance(old, Tensor) and new.shape == old.shape:
        old.data.copy_(new)
        return
    container.set(key, new)
