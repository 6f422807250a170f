"""State of a TorchRL environment, from which another environment continues.

The state contains the state of each Gymnasium environment inside, captured in one of the ways of
:mod:`trawl.envs.capture`, and the attributes of all other objects: environments, transforms and
their modules. If an attribute is not plain data, all attributes are pickled together.

TorchRL is only imported if the environment is one of TorchRL.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from trawl.envs.capture import NONE, capture, check_state, restore
from trawl.envs.capture.attributes import NotPlain
from trawl.envs.capture.pickling import AttributePickler, AttributeUnpickler
from trawl.envs.capture.signing import is_own, sign
from trawl.envs.capture.ways import chain
from trawl.errors import EnvStateError, env_errors
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import check_torchrl

_ATTRIBUTES, _OWN, _PICKLE = "attributes", "get_state", "pickle"


def torchrl_state(env: Any) -> TorchRLState | None:
    """Returns an object that captures and restores an environment; None if it isn't TorchRL's."""
    base = _env_base()
    return None if base is None or not isinstance(env, base) else TorchRLState(env)


def _env_base() -> Any:
    return getattr(sys.modules.get("torchrl.envs"), "EnvBase", None)


class TorchRLState:
    """Captures and restores the state of a TorchRL environment.

    Args:
        env: the environment.
    """

    def __init__(self, env: Any) -> None:
        from trawl.envs.capture import modules

        self._env = env
        self._modules = modules
        self._parts = modules.parts_of(env)

    @property
    def state_methods(self) -> list[str]:
        """Way in which :meth:`capture` captures each environment of a batch."""
        try:
            state = self.capture()
        except EnvStateError:
            return [NONE] * len(self._bases)
        simulators = iter(state["simulators"])
        ways = []
        for one in self._bases:
            own = _OWN if self._modules.has_methods(one) else _ATTRIBUTES
            inner = self._modules.simulator_of(one)
            ways.append(own if inner is None else next(simulators)["way"])
        return [_PICKLE] * len(ways) if state["way"] == _PICKLE else ways

    @property
    def _bases(self) -> list[Any]:
        """Environments that contain no other environment of TorchRL."""
        return self._modules.bases_of(self._parts)

    def capture(self) -> dict[str, Any]:
        """Returns the state of the environment as plain data.

        Raises:
            EnvStateError: if the state can't be captured.
        """
        simulators = self._simulators()
        try:
            inner = [capture(env) for env in simulators]
            way, objects = self._captured(simulators)
        except (NotPlain, EnvStateError) as error:
            raise EnvStateError(f"the state of {self._name} can't be captured: {error}") from error
        return {
            "way": way,
            "identity": self._modules.identity_of(self._parts),
            "simulators": inner,
            "cached": self._modules.cached_parents(self._everything()),
            "objects": objects,
        }

    def _captured(self, simulators: Sequence[Any]) -> tuple[str, Any]:
        """Returns the way of capturing, and the states of the objects as plain data."""
        parts = self._everything()
        members = _members(parts, simulators)
        encoder = self._modules.encoder_for(members)
        states = [self._modules.state_of(one, encoder) for one in parts]
        try:
            return _ATTRIBUTES, self._modules.encoded(states, encoder)
        except NotPlain as why:
            try:
                return _PICKLE, _pickled(states, members)
            except NotPlain as error:
                raise NotPlain(f"{_ATTRIBUTES}: {why}; {_PICKLE}: {error}") from error

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
        count = len(_members(self._everything(), self._simulators()))
        with env_errors():
            check_torchrl(state, "state", own, count)
        mine, other = self._modules.identity_of(self._parts), state["identity"]
        for name in mine:
            if mine[name] != other.get(name):
                raise EnvStateError(
                    f"the state is one of another environment: its {name} are {other.get(name)}, "
                    f"but those of {self._name} are {mine[name]}"
                )
        for env, inner in zip(self._simulators(), state["simulators"], strict=True):
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
            _check_trust(state["objects"], trust, self._name)
        self._restore_simulators(state["simulators"], trust)
        parts = self._modules.with_parents(self._parts, state["cached"])
        try:
            self._restore_objects(parts, state)
        except (KeyError, NotPlain, RuntimeError, ValueError) as error:
            raise EnvStateError(
                f"the state of {self._name} can't be restored by {state['way']}: {error}"
            ) from error

    def _restore_simulators(self, states: Sequence[Mapping[str, Any]], trust: bool) -> None:
        found = [one for one in self._parts if self._modules.simulator_of(one) is not None]
        for one, state in zip(found, states, strict=True):
            vars(one)["_env"] = restore(self._modules.simulator_of(one), state, trust)

    def _restore_objects(self, parts: Sequence[Any], state: Mapping[str, Any]) -> None:
        modules, simulators = self._modules, self._simulators()
        members = _members(parts, simulators)
        if state["way"] == _PICKLE:
            states = _unpickled(state["objects"]["pickle"], members)
        else:
            states = modules.decoded(parts, state["objects"], modules.decoder_for(members))
        encoder = modules.encoder_for(members)
        for one, its in zip(parts, states, strict=True):
            modules.write(one, its, encoder)
        if state["way"] == _ATTRIBUTES:
            name = modules.difference(self._captured(simulators)[1], state["objects"])
            if name is not None:
                raise NotPlain(f"{name} differs from the state after it was restored")

    def _simulators(self) -> list[Any]:
        found = map(self._modules.simulator_of, self._parts)
        return [env for env in found if env is not None]

    def _everything(self) -> list[Any]:
        return self._modules.with_parents(self._parts)

    @property
    def _name(self) -> str:
        return type(self._env).__name__


def _members(parts: Sequence[Any], simulators: Sequence[Any]) -> list[Any]:
    return [*parts, *(one for env in simulators for one in chain(env))]


def _pickled(states: Sequence[Mapping[str, Any]], members: Sequence[Any]) -> dict[str, Any]:
    file = io.BytesIO()
    try:
        AttributePickler(file, members, (_env_base(),)).dump(states)
    except NotPlain:
        raise
    except Exception as error:
        raise NotPlain(f"which can't be pickled: {error}") from error
    data = file.getvalue()
    return {"pickle": data, "signature": sign(data)}


def _unpickled(data: bytes, members: Sequence[Any]) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = AttributeUnpickler(io.BytesIO(data), members).load()
    return states


def _check_trust(objects: Mapping[str, Any], trust: bool, name: str) -> None:
    if not (trust or is_own(objects["pickle"], objects["signature"])):
        raise EnvStateError(
            f"{name} was pickled by another program, and a pickle can run any code: if you know "
            "where the state comes from, load it with trust=True"
        )
