"""The ways in which the state of a Gymnasium environment is captured and restored."""

from __future__ import annotations

import hmac
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Wrapper
from gymnasium.utils import EzPickle
from typing_extensions import override

from trawl.envs.capture.attributes import Decoder, Encoder, NotPlain
from trawl.envs.capture.replay import ReplayableEnv
from trawl.errors import EnvStateError

# Signs the pickles that this process makes.
_KEY = secrets.token_bytes(32)
# Beginnings of the names of MuJoCo's data whose sizes differ between steps, or that are private.
_VARYING = ("_", "efc_", "iefc_", "contact", "arena", "buffer", "island", "map_", "iM", "iLD")


def chain(env: Any) -> list[Any]:
    """Returns the wrappers around an environment, outermost first, and the environment itself."""
    found = [env]
    while isinstance(found[-1], Wrapper):
        found.append(found[-1].env)
    return found


class Way(ABC):
    """A way to capture the state of an environment; the wrappers' attributes are plain data."""

    name: str

    @abstractmethod
    def suits(self, base: Any) -> bool:
        """Returns True if environments of this kind may be captured in this way."""

    def capture(self, members: Sequence[Any]) -> dict[str, Any]:
        """Returns the state of a wrapper chain.

        Raises:
            NotPlain: if it can't be captured.
        """
        encoder = Encoder(members)
        inner = self.capture_base(members[-1], encoder)
        return {"base": inner, "wrappers": [encoder.attributes(one) for one in members[:-1]]}

    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        """Restores a state, and returns the environment to continue with."""
        decoder = Decoder(members)
        self.restore_base(members[-1], state["base"], decoder)
        for member, attributes in zip(members[:-1], state["wrappers"], strict=True):
            decoder.write(member, attributes)
        return members[0]

    @abstractmethod
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        """Returns the state of the environment without its wrappers."""

    @abstractmethod
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        """Restores the state of the environment without its wrappers."""


class OwnMethods(Way):
    """The environment has methods ``get_state`` and ``set_state``."""

    name = "get_state"

    @override
    def suits(self, base: Any) -> bool:
        return all(callable(getattr(base, name, None)) for name in ("get_state", "set_state"))

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        return encoder.encode(base.get_state())

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        base.set_state(decoder.decode(state))


class Ale(Way):
    """Atari environments of ale-py: the emulator's state, with its generator."""

    name = "ale"
    _skip = frozenset({"ale", "_action_set", "_game_difficulty", "_game_mode"})

    @override
    def suits(self, base: Any) -> bool:
        return hasattr(getattr(base, "ale", None), "cloneState")

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        state = base.ale.cloneState(include_rng=True)
        return {"ale": state.__getstate__(), "attributes": encoder.attributes(base, self._skip)}

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        kind: Any = type(base.ale.cloneState(include_rng=True))
        emulator = kind.__new__(kind)
        emulator.__setstate__(state["ale"])
        base.ale.restoreState(emulator)
        decoder.write(base, state["attributes"])


class Mujoco(Way):
    """MuJoCo environments: the state that the integrator needs, with the warm start."""

    name = "mujoco"
    _skip = frozenset({"model", "data", "mujoco_renderer"})

    @override
    def suits(self, base: Any) -> bool:
        kind = type(getattr(base, "data", None))
        return kind.__module__.startswith("mujoco") and hasattr(base, "model")

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        import mujoco

        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        values = np.empty(mujoco.mj_stateSize(base.model, kind))
        mujoco.mj_getState(base.model, base.data, values, kind)
        return {
            "physics": encoder.encode(values),
            "derived": encoder.encode({k: v.copy() for k, v in _derived(base.data).items()}),
            "attributes": encoder.attributes(base, self._skip),
        }

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        import mujoco

        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        values = decoder.decode(state["physics"])
        if len(values) != mujoco.mj_stateSize(base.model, kind):
            raise EnvStateError(
                f"the physics of {base} have {mujoco.mj_stateSize(base.model, kind)} numbers, but "
                f"the state has {len(values)}: it is one of another model"
            )
        mujoco.mj_setState(base.model, base.data, values, kind)
        mujoco.mj_forward(base.model, base.data)
        mujoco.mj_setState(base.model, base.data, values, kind)
        derived = _derived(base.data)
        for name, array in decoder.decode(state["derived"]).items():
            derived[name][...] = array
        decoder.write(base, state["attributes"])


def _derived(data: Any) -> dict[str, Any]:
    """Returns the quantities that rewards may use, such as positions of bodies before a step.

    They belong to the last step, so that they can't be computed from the physics alone.
    """
    arrays = {name: getattr(data, name) for name in dir(data) if not name.startswith(_VARYING)}
    return {name: one for name, one in arrays.items() if isinstance(one, np.ndarray) and one.size}


class Attributes(Way):
    """The attributes of the environment are numbers, arrays, generators and the like."""

    name = "attributes"

    @override
    def suits(self, base: Any) -> bool:
        return True

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        return encoder.attributes(base)

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        decoder.write(base, state)


class Pickle(Way):
    """The environment and its wrappers are pickled."""

    name = "pickle"

    @override
    def suits(self, base: Any) -> bool:
        # An EzPickle pickles the arguments of its constructor instead of its state.
        return not isinstance(base, EzPickle)

    @override
    def capture(self, members: Sequence[Any]) -> dict[str, Any]:
        if any(isinstance(member, EzPickle) for member in members):
            raise NotPlain("which is an EzPickle")
        try:
            data: bytes = cloudpickle.dumps(members[0])
        except Exception as error:
            raise NotPlain(f"which can't be pickled: {error}") from error
        return {"pickle": data, "signature": hmac.digest(_KEY, data, "sha256")}

    @override
    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        data = state["pickle"]
        signature = hmac.digest(_KEY, data, "sha256")
        if not (trust or hmac.compare_digest(state["signature"], signature)):
            raise EnvStateError(
                f"{members[-1]} was pickled in another process, and a pickle can run any code: if "
                "you know where the state comes from, load it with trust=True"
            )
        fresh = cloudpickle.loads(data)
        members[0].close()
        return fresh

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        raise NotImplementedError

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        raise NotImplementedError


class Replay(Way):
    """The current episode is repeated."""

    name = "replay"

    @override
    def suits(self, base: Any) -> bool:
        return True

    @override
    def capture(self, members: Sequence[Any]) -> dict[str, Any]:
        recorder, others = _recorder(members)
        encoder = Encoder(members)
        return {
            "base": recorder.capture(encoder),
            "wrappers": [encoder.attributes(one) for one in others[:-1]],
        }

    @override
    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        recorder, others = _recorder(members)
        decoder = Decoder(members)
        recorder.replay(state["base"], decoder)
        for member, attributes in zip(others[:-1], state["wrappers"], strict=True):
            decoder.write(member, attributes)
        return members[0]

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        raise NotImplementedError

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        raise NotImplementedError


def _recorder(members: Sequence[Any]) -> tuple[ReplayableEnv, list[Any]]:
    """Returns the wrapper that notes the episode, and the other members of the chain."""
    for member in members:
        if isinstance(member, ReplayableEnv):
            return member, [one for one in members if one is not member]
    raise NotPlain("whose episode was not noted from its start")


WAYS: dict[str, Way] = {
    way.name: way for way in (OwnMethods(), Ale(), Mujoco(), Attributes(), Pickle(), Replay())
}
