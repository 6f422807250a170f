"""State of a TorchRL environment, from which another environment continues.

The state contains the state of each Gymnasium environment inside, captured in one of the ways of
:mod:`trawl.envs.capture`, and the attributes of all other objects: the environment, the
environments in it, its transforms, and their modules and readers of ``info``. If an attribute is
not plain data, all attributes are pickled together.

This module is imported only if the environment is one of TorchRL.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import torch
from gymnasium.vector import VectorEnv
from torch import nn
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase, SerialEnv, Transform
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.gym_like import BaseInfoDictReader

from trawl.envs.capture import NONE, capture, check_state, restore
from trawl.envs.capture.codec import Decoder, Encoder, NotPlain, difference
from trawl.envs.capture.fixed import check_identity, class_name, has_own_methods, is_simple
from trawl.envs.capture.kinds import FIXED_IN_GRAPHS
from trawl.envs.capture.pickling import check_trust, pickled, unpickled
from trawl.envs.capture.ways import chain
from trawl.errors import EnvStateError, env_errors
from trawl.foreign import torchrl as foreign
from trawl.foreign.torch import FORWARD_HOOKS, TENSORS
from trawl.foreign.torchrl import (
    DERIVED,
    SIMULATOR,
    cached_parent,
    forget_parent,
    input_spec,
    modules_in,
    own_keys,
    parts_of_batch,
    set_simulator,
    tensors_in,
)
from trawl.keys import as_key, show_key
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import check_torchrl

_ATTRIBUTES, _OWN, _PICKLE = "attributes", "get_state", "pickle"
_SIMULATORS = (gymnasium.Env, VectorEnv)
_FIXED = (*FIXED_IN_GRAPHS, TensorSpec)
_ROWS = "shared_tensordict_parent"
# Entries of the state of an object. Tensors come first, because they are restored in place.
_ENTRIES = ("tensors", "masks", "own", "attributes")
# Attributes that follow from other attributes, or that refer to objects outside the environment.
_DERIVED = (frozenset(vars(nn.Module())) - {"training"}) | DERIVED


class TorchRLState:
    """Captures and restores the state of a TorchRL environment.

    Args:
        env: the environment.
    """

    def __init__(self, env: EnvBase) -> None:
        self._name = type(env).__name__
        self._parts = parts_of(env)

    @property
    def state_methods(self) -> list[str]:
        """Way in which :meth:`capture` captures each environment of a batch."""
        envs = [one for one in self._parts if isinstance(one, EnvBase)]
        # Environments that contain no other environment of TorchRL.
        bases = [env for env in envs if not any(isinstance(one, EnvBase) for one in _children(env))]
        try:
            state = self.capture()
        except EnvStateError:
            return [NONE] * len(bases)
        if state["way"] == _PICKLE:
            return [_PICKLE] * len(bases)
        inner = iter(state["simulators"])
        return [
            next(inner)["way"]
            if simulator_of(one) is not None
            else _OWN
            if has_own_methods(one)
            else _ATTRIBUTES
            for one in bases
        ]

    def capture(self) -> dict[str, Any]:
        """Returns the state of the environment as plain data.

        Raises:
            EnvStateError: if the state can't be captured.
        """
        parts = _with_parents(self._parts)
        try:
            inner = [capture(env) for env in self._simulators]
            way, objects = self._captured(parts)
        except (NotPlain, EnvStateError) as error:
            raise EnvStateError(f"the state of {self._name} can't be captured: {error}") from error
        return {
            "way": way,
            "identity": _identity_of(self._parts),
            "simulators": inner,
            "cached": [_has_parent(one) for one in parts if isinstance(one, Transform)],
            "objects": objects,
        }

    def _captured(self, parts: Sequence[Any]) -> tuple[str, Any]:
        """Returns the way of capturing, and the states of the objects as plain data."""
        members = self._members(parts)
        encoder = Encoder(members, fixed=_FIXED)
        states = [_state_of(one, encoder) for one in parts]
        made = [dict(state) for state in states]
        try:
            for entry in _ENTRIES:
                for one, state in zip(parts, made, strict=True):
                    if entry in state:
                        state[entry] = encoder.named(type(one).__name__, state[entry])
        except NotPlain as why:
            try:
                return _PICKLE, pickled(states, members, (EnvBase,))
            except NotPlain as error:
                raise NotPlain(f"{_ATTRIBUTES}: {why}; {_PICKLE}: {error}") from error
        return _ATTRIBUTES, made

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Checks that a state belongs to an environment like this one; changes nothing.

        Raises:
            EnvStateError: if the state belongs to another environment; the message says what
                differs.
        """
        try:
            own: Any = self.capture()
        except EnvStateError:
            own = UNKNOWN
        with env_errors():
            check_torchrl(state, "state", own, len(self._members(_with_parents(self._parts))))
        check_identity(_identity_of(self._parts), state["identity"], self._name, verb="are")
        for env, inner in zip(self._simulators, state["simulators"], strict=True):
            check_state(env, inner)

    def restore(self, state: Mapping[str, Any], trust: bool = False) -> None:
        """Continues from a state that :meth:`capture` returned.

        Args:
            state: the state.
            trust: True to open a pickle that another process made.

        Raises:
            EnvStateError: if the state belongs to another environment, or can't be restored.
        """
        self.check_state(state)
        if state["way"] == _PICKLE:
            check_trust(state["objects"], trust, self._name)
        found = [one for one in self._parts if simulator_of(one) is not None]
        for one, inner in zip(found, state["simulators"], strict=True):
            set_simulator(one, restore(simulator_of(one), inner, trust))
        try:
            self._restore_objects(_with_parents(self._parts, state["cached"]), state)
        except (KeyError, NotPlain, RuntimeError, ValueError) as error:
            raise EnvStateError(
                f"the state of {self._name} can't be restored by {state['way']}: {error}"
            ) from error

    def _restore_objects(self, parts: Sequence[Any], state: Mapping[str, Any]) -> None:
        members, objects = self._members(parts), state["objects"]
        is_pickle = state["way"] == _PICKLE
        states = unpickled(objects, members) if is_pickle else _decoded(parts, objects, members)
        encoder = Encoder(members, fixed=_FIXED)
        for one, its in zip(parts, states, strict=True):
            _write(one, its, encoder)
        if is_pickle:
            return
        for one, mine, its in zip(parts, self._captured(parts)[1], objects, strict=True):
            place = difference(mine, its, type(one).__name__)
            if place is not None:
                raise NotPlain(f"{place} differs from the state after it was restored")

    @property
    def _simulators(self) -> list[Any]:
        return [env for env in map(simulator_of, self._parts) if env is not None]

    def _members(self, parts: Sequence[Any]) -> list[Any]:
        return [*parts, *(one for env in self._simulators for one in chain(env))]


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
        yield from parts_of_batch(one)
        return
    yield from (part for part in modules_in(one).values() if part is not None)
    for name, value in sorted(vars(one).items()):
        if name not in _DERIVED:
            items = value if type(value) is list else [value]
            yield from (part for part in items if isinstance(part, (nn.Module, BaseInfoDictReader)))


def _has_parent(transform: Transform) -> bool:
    return cached_parent(transform) is not None


def _with_parents(parts: Sequence[Any], cached: Sequence[bool] | None = None) -> list[Any]:
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
            parent = cached_parent(one)
            if wanted is not None and next(wanted, False) != (parent is not None):
                forget_parent(one)
                parent = one.parent if parent is None else None
            if parent is not None:
                _add(parent, found)
    return found


def simulator_of(one: Any) -> Any:
    """Returns the Gymnasium environment of one of TorchRL's wrappers, or None."""
    env = foreign.simulator_of(one)
    return env if isinstance(env, _SIMULATORS) else None


def _identity_of(parts: Sequence[Any]) -> dict[str, str]:
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
    keys = own_keys(transform)
    shown = [" ".join(map(str, found)) for found in keys if type(found) is list and found]
    return f"{type(transform).__name__}({' -> '.join(shown)})"


# --- states of objects


def _state_of(one: Any, encoder: Encoder) -> dict[str, Any]:
    """Returns the state of an object, without the Gymnasium environment in it.

    The values in the entries of ``_ENTRIES`` are not encoded yet.

    Raises:
        NotPlain: if the object has state that is not in its attributes.
    """
    masks = {name: leaf.mask for name, leaf in _masked_specs(one).items() if leaf.mask is not None}
    state = {"class": class_name(one), "masks": masks}
    if has_own_methods(one):
        return {**state, "own": {"state": one.get_state()}}
    found = _attributes_of(one)
    return {
        **state,
        "tensors": _tensors_of(one),
        "names": list(found),
        "attributes": {name: v for name, v in found.items() if not encoder.is_fixed(v)},
    }


def _masked_specs(one: Any) -> dict[str, Any]:
    """Returns the specs of an environment whose samples may be restricted by a mask."""
    leaves = _leaves(input_spec(one) if isinstance(one, EnvBase) else None)
    return {name: leaf for name, leaf in leaves.items() if hasattr(leaf, "update_mask")}


def _leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a spec or of a TensorDict by name; none if it is None."""
    leaves = {} if tree is None else dict(tree.items(True, True))
    return {show_key(as_key(key)): leaf for key, leaf in leaves.items()}


def _attributes_of(one: Any) -> dict[str, Any]:
    if isinstance(one, BatchedEnvBase):
        if type(one) is not SerialEnv or one.is_closed:
            raise NotPlain(f"{type(one).__name__} keeps its state in processes, or is closed")
        return {}
    if not is_simple(type(one)):
        raise NotPlain(f"{type(one).__name__} has more than the attributes in vars()")
    if any(vars(one).get(name) for name in FORWARD_HOOKS):
        raise NotPlain(f"{type(one).__name__} has hooks")
    left_out = _DERIVED if simulator_of(one) is not None else _DERIVED - {SIMULATOR}
    return {name: value for name, value in sorted(vars(one).items()) if name not in left_out}


def _tensors_of(one: Any) -> dict[str, Any]:
    """Returns the parameters and buffers of an object, and the rows of a batch of environments."""
    if isinstance(one, BatchedEnvBase):
        # Entries that an environment does not return keep their values from an earlier step.
        return _leaves(vars(one).get(_ROWS))
    return tensors_in(one)


def _decoded(
    parts: Sequence[Any], states: Sequence[Mapping[str, Any]], members: Sequence[Any]
) -> list[dict[str, Any]]:
    """Returns the states of objects with decoded values; some tensors are written in place."""
    decoder, made = Decoder(members, in_graph=True), [dict(state) for state in states]
    for entry in _ENTRIES:
        decoder.in_place = entry == "tensors"
        present: Any = {"tensors": _tensors_of, "attributes": _attributes_of}.get(entry)
        for one, state in zip(parts, made, strict=True):
            if entry in state:
                old = {} if present is None else present(one)
                state[entry] = {n: decoder.decode(v, old.get(n)) for n, v in state[entry].items()}
    return made


def _write(one: Any, state: Mapping[str, Any], encoder: Encoder) -> None:
    """Writes a state that :func:`_state_of` returned for another object into an object."""
    for name, leaf in _masked_specs(one).items():
        mask = state["masks"].get(name)
        if mask is not None or leaf.mask is not None:
            leaf.update_mask(mask)
    if "own" in state:
        one.set_state(state["own"]["state"])
        return
    present = _tensors_of(one)
    for name, value in state["tensors"].items():
        _write_tensor(one, name, value, present.get(name))
    for name, value in _attributes_of(one).items():
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
    if kind not in TENSORS or name not in vars(one)[kind]:
        raise NotPlain(f"{type(one).__name__} has no tensor {name}")
    vars(one)[kind][name] = value
