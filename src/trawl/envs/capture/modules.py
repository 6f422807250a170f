"""Objects that a TorchRL environment consists of, and their attributes as plain data.

The objects are the environment, the environments in it, its transforms, and their modules and
readers of ``info``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import gymnasium
import torch
from gymnasium.vector import VectorEnv
from torch import nn
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase, SerialEnv, Transform
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.gym_like import BaseInfoDictReader

from trawl.envs.capture.attributes import NotPlain, class_name, is_simple, same_data
from trawl.envs.capture.tensors import TensorDecoder, TensorEncoder
from trawl.keys import as_key, show_key

_SIMULATORS = (gymnasium.Env, VectorEnv)
_TENSORS = ("_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ROWS = "shared_tensordict_parent"
_ENTRIES = ("tensors", "masks", "own", "attributes")
# Attributes that follow from other attributes, or that refer to objects outside the environment.
_DERIVED = (frozenset(vars(nn.Module())) - {"training"}) | {
    "_cache",
    "_collector",
    "_compiled_step_and_maybe_reset",
    "_constructor_kwargs",
    "_container",
    "_env",
    "_input_spec",
    "_output_spec",
    "_parent",
    "_read_obs",
    "_read_reward",
    "_sync_device_val",
    "_sync_orig_device_val",
}


def parts_of(env: Any) -> list[Any]:
    """Returns an environment and the objects in it, each before its parts."""
    found: list[Any] = []
    _add(env, found)
    return found


def _add(one: Any, found: list[Any]) -> None:
    if not any(one is other for other in found):
        found.append(one)
        for part in _children(one):
            _add(part, found)


def _children(one: Any) -> Iterator[Any]:
    if isinstance(one, BatchedEnvBase):
        yield from vars(one).get("_envs", ())
        return
    yield from (part for part in vars(one).get("_modules", {}).values() if part is not None)
    for name, value in sorted(vars(one).items()):
        if name not in _DERIVED:
            items = value if type(value) is list else [value]
            yield from (part for part in items if isinstance(part, (nn.Module, BaseInfoDictReader)))


def with_parents(parts: Sequence[Any], cached: Sequence[bool] | None = None) -> list[Any]:
    """Returns the objects of an environment, and of the copies that its transforms cache.

    A transform may have a copy of the environment, with copies of the transforms before it.

    Args:
        parts: the objects of the environment.
        cached: for each transform, True if it must have a copy; None to change nothing.
    """
    found = list(parts)
    wanted = None if cached is None else iter(cached)
    for one in found:  # the loop also visits objects that it adds
        if isinstance(one, Transform):
            parent = vars(one).get("_parent")
            if wanted is not None and next(wanted, False) != (parent is not None):
                vars(one)["_parent"] = None
                parent = one.parent if parent is None else None
            if parent is not None:
                _add(parent, found)
    return found


def cached_parents(parts: Sequence[Any]) -> list[bool]:
    """Returns, for each transform, True if it has a copy of the environment."""
    return [vars(one).get("_parent") is not None for one in parts if isinstance(one, Transform)]


def simulator_of(one: Any) -> Any:
    """Returns the Gymnasium environment of one of TorchRL's wrappers, or None."""
    env = vars(one).get("_env")
    return env if isinstance(env, _SIMULATORS) else None


def attributes_of(one: Any) -> dict[str, Any]:
    """Returns the attributes that belong to the state of an object.

    Raises:
        NotPlain: if the object has state elsewhere.
    """
    if isinstance(one, BatchedEnvBase):
        if type(one) is not SerialEnv or one.is_closed:
            raise NotPlain(f"{type(one).__name__} keeps its state in processes, or is closed")
        return {}
    if not is_simple(type(one)):
        raise NotPlain(f"{type(one).__name__} has more than the attributes in vars()")
    if any(vars(one).get(name) for name in _HOOKS):
        raise NotPlain(f"{type(one).__name__} has hooks")
    extra = {"_env"} if simulator_of(one) is None and "_env" in vars(one) else set()
    return {
        name: value
        for name, value in sorted(vars(one).items())
        if name not in _DERIVED or name in extra
    }


def tensors_of(one: Any) -> dict[str, Any]:
    """Returns the parameters and buffers of an object, and the rows of a batch of environments."""
    if isinstance(one, BatchedEnvBase):
        rows = vars(one).get(_ROWS)
        # Entries that an environment does not return keep their values from an earlier step.
        leaves = {} if rows is None else dict(rows.items(True, True))
        return {show_key(as_key(key)): value for key, value in leaves.items()}
    return {
        f"{kind}/{name}": value
        for kind in _TENSORS
        for name, value in vars(one).get(kind, {}).items()
        if value is not None
    }


def _masked_specs(one: Any) -> dict[str, Any]:
    """Returns the specs of an environment whose samples may be restricted by a mask."""
    spec = vars(one).get("_input_spec") if isinstance(one, EnvBase) else None
    leaves = {} if spec is None else dict(spec.items(True, True))
    return {
        show_key(as_key(key)): leaf for key, leaf in leaves.items() if hasattr(leaf, "update_mask")
    }


def has_methods(one: Any) -> bool:
    """Returns True if the class of an object has methods ``get_state`` and ``set_state``."""
    return all(callable(getattr(type(one), name, None)) for name in ("get_state", "set_state"))


def bases_of(parts: Sequence[Any]) -> list[Any]:
    """Returns the environments that contain no other environment of TorchRL."""
    envs = [one for one in parts if isinstance(one, EnvBase)]
    return [env for env in envs if not any(isinstance(one, EnvBase) for one in _children(env))]


def identity_of(parts: Sequence[Any]) -> dict[str, str]:
    """Returns a description that is equal for all environments made in the same way."""
    transforms = [one for one in parts if isinstance(one, Transform)]
    return {
        "environments": _names(one for one in parts if isinstance(one, EnvBase)),
        "transforms": ", ".join(map(_shown, transforms)) or "none",
        "other parts": _names(one for one in parts if not isinstance(one, (EnvBase, Transform))),
    }


def _names(parts: Iterable[Any]) -> str:
    return ", ".join(type(one).__name__ for one in parts) or "none"


def _shown(transform: Transform) -> str:
    keys = [vars(transform).get(name) for name in ("_in_keys", "_out_keys")]
    shown = [" ".join(map(str, found)) for found in keys if type(found) is list and found]
    return f"{type(transform).__name__}({' -> '.join(shown)})"


def encoder_for(members: Sequence[Any]) -> TensorEncoder:
    """Returns an encoder of the state of objects; values may refer to the ``members``."""
    return TensorEncoder(members, (TensorSpec,))


def decoder_for(members: Sequence[Any]) -> TensorDecoder:
    """Returns a decoder for the objects of another environment."""
    return TensorDecoder(members)


def state_of(one: Any, encoder: TensorEncoder) -> dict[str, Any]:
    """Returns the state of an object, without the Gymnasium environment in it.

    The values in the entries ``"masks"``, ``"tensors"``, ``"own"`` and ``"attributes"`` are not
    encoded yet.

    Raises:
        NotPlain: if the object has state that is not in its attributes.
    """
    masks = {name: leaf.mask for name, leaf in _masked_specs(one).items() if leaf.mask is not None}
    state = {"class": class_name(one), "masks": masks}
    if has_methods(one):
        return {**state, "own": {"state": one.get_state()}}
    found = attributes_of(one)
    return {
        **state,
        "tensors": tensors_of(one),
        "names": list(found),
        "attributes": {name: v for name, v in found.items() if not encoder.is_fixed(v)},
    }


def encoded(states: Sequence[dict[str, Any]], encoder: TensorEncoder) -> list[dict[str, Any]]:
    """Returns states of objects as plain data.

    Raises:
        NotPlain: if a value can't be captured.
    """
    made = [dict(state) for state in states]
    # Tensors come first, because they are restored in place.
    for entry in _ENTRIES:
        for state in made:
            if entry in state:
                state[entry] = {
                    name: _encoded(state["class"], name, value, encoder)
                    for name, value in sorted(state[entry].items())
                }
    return made


def _encoded(owner: str, name: str, value: Any, encoder: TensorEncoder) -> Any:
    try:
        return encoder.encode(value, inside=False)
    except NotPlain as error:
        raise NotPlain(f"{owner.rpartition('.')[2]}.{name}, {error}") from None


def difference(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> str | None:
    """Returns the name of the first value that differs between encoded states, or None."""
    for mine, its in zip(one, other, strict=True):
        owner = mine["class"].rpartition(".")[2]
        for entry in _ENTRIES:
            values, others = mine.get(entry, {}), its.get(entry, {})
            for name in sorted({*values, *others}):
                if not same_data(values.get(name), others.get(name)):
                    return f"{owner}.{name}"
        if not same_data(mine, its):
            return f"{owner}'s attributes"
    return None


def decoded(
    parts: Sequence[Any], states: Sequence[dict[str, Any]], decoder: TensorDecoder
) -> list[dict[str, Any]]:
    """Returns states of objects that :func:`encoded` converted.

    Args:
        parts: the objects that will get the states; some of their tensors are written in place.
        states: the states.
        decoder: the decoder.

    Raises:
        NotPlain: if an object lacks a value that the state refers to.
    """
    made = [dict(state) for state in states]
    for entry in _ENTRIES:
        for one, state in zip(parts, made, strict=True):
            if entry in state:
                present = _present(one, entry)
                with decoder.in_place() if entry == "tensors" else nullcontext():
                    state[entry] = {
                        name: decoder.decode(data, present.get(name))
                        for name, data in state[entry].items()
                    }
    return made


def _present(one: Any, entry: str) -> dict[str, Any]:
    if entry == "tensors":
        return tensors_of(one)
    return attributes_of(one) if entry == "attributes" else {}


def write(one: Any, state: Mapping[str, Any], encoder: TensorEncoder) -> None:
    """Writes a state that :func:`state_of` returned for another object into an object.

    Args:
        one: the object.
        state: the state.
        encoder: an encoder for the objects of this environment.
    """
    for name, leaf in _masked_specs(one).items():
        mask = state["masks"].get(name)
        if mask is not None or leaf.mask is not None:
            leaf.update_mask(mask)
    if "own" in state:
        one.set_state(state["own"]["state"])
        return
    present = tensors_of(one)
    for name, value in state["tensors"].items():
        _write_tensor(one, name, value, present.get(name))
    for name, value in attributes_of(one).items():
        if name not in state["names"] and not encoder.is_fixed(value):
            del vars(one)[name]
    vars(one).update(state["attributes"])


def _write_tensor(one: Any, name: str, value: Any, present: Any) -> None:
    if value is present:
        return
    if isinstance(one, BatchedEnvBase) or isinstance(present, nn.Parameter):
        with torch.no_grad():
            present.copy_(value)
        return
    kind, _, name = name.partition("/")
    if kind not in _TENSORS or name not in vars(one)[kind]:
        raise NotPlain(f"{type(one).__name__} has no tensor {name}")
    vars(one)[kind][name] = value
