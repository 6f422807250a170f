"""Ways to capture and restore the state of a Gymnasium environment."""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Wrapper
from gymnasium.utils import EzPickle
from gymnasium.vector import VectorWrapper
from typing_extensions import override

from trawl.envs.capture.attributes import Decoder, Encoder, NotPlain
from trawl.envs.capture.emulator import emulator_of, emulator_state, put_emulator_state
from trawl.envs.capture.signing import is_own, sign
from trawl.errors import EnvStateError

# Prefixes of the names of MuJoCo's data that are private, or whose sizes differ between steps.
_VARYING = ("_", "efc_", "iefc_", "contact", "arena", "buffer", "island", "map_", "iM", "iLD")


def chain(env: Any) -> list[Any]:
    """Returns the wrappers around an environment, outermost first, and the environment itself."""
    found = [env]
    while (inner := _wrapped(found[-1])) is not None:
        found.append(inner)
    return found


# Wrappers of PettingZoo, which are looked up by name so that it is not imported, and the attributes
# that hold what they wrap.
_AGENT_WRAPPERS = {
    "BaseWrapper": "env",
    "BaseParallelWrapper": "env",
    "aec_to_parallel_wrapper": "aec_env",
    "turn_based_aec_to_parallel_wrapper": "aec_env",
    "parallel_to_aec_wrapper": "env",
}


def _wrapped(env: Any) -> Any:
    """Returns the environment that a wrapper wraps; None if ``env`` is not a wrapper."""
    if isinstance(env, (Wrapper, VectorWrapper)):
        return env.env
    for kind in type(env).__mro__:
        if kind.__module__.startswith("pettingzoo.utils.") and kind.__name__ in _AGENT_WRAPPERS:
            return getattr(env, _AGENT_WRAPPERS[kind.__name__])
    return None


class Way(ABC):
    """A way to capture the state of an environment."""

    name: str

    @abstractmethod
    def suits(self, base: Any) -> bool:
        """Returns True if environments of this kind may be captured in this way."""

    @abstractmethod
    def capture(self, members: Sequence[Any]) -> dict[str, Any]:
        """Returns the state of a wrapper chain.

        Raises:
            NotPlain: if the state can't be captured.
        """

    @abstractmethod
    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        """Restores a state, and returns the environment to continue with."""

    def comparable(self, state: Mapping[str, Any]) -> Any:
        """Returns the part of a state that is equal each time the same state is captured."""
        return state


class PlainWay(Way):
    """A way that captures plain data, including the attributes of wrappers.

    Attributes:
        shared: names of attributes that a copy of the environment may share with it; None if the
            environment can't be copied.
    """

    shared: frozenset[str] | None = frozenset()

    @override
    def capture(self, members: Sequence[Any]) -> dict[str, Any]:
        return self._capture(members, Encoder(members))

    def _capture(self, members: Sequence[Any], encoder: Encoder) -> dict[str, Any]:
        inner = self.capture_base(members[-1], encoder)
        return {"base": inner, "wrappers": [encoder.attributes(one) for one in members[:-1]]}

    def works(self, members: Sequence[Any]) -> bool:
        """Returns True if the state of a wrapper chain can be captured; copies nothing."""
        try:
            self._capture(members, Encoder(members, looks_only=True))
        except NotPlain:
            return False
        return True

    @override
    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        decoder = Decoder(members)
        self.restore_base(members[-1], state["base"], decoder)
        for member, attributes in zip(members[:-1], state["wrappers"], strict=True):
            decoder.replace(member, attributes)
        return members[0]

    @abstractmethod
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        """Returns the state of the environment without its wrappers."""

    @abstractmethod
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        """Restores the state of the environment without its wrappers."""


class OwnMethods(PlainWay):
    """The environment has methods ``get_state`` and ``set_state``."""

    name = "get_state"

    @override
    def suits(self, base: Any) -> bool:
        return all(callable(getattr(base, name, None)) for name in ("get_state", "set_state"))

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        return None if encoder.looks_only else encoder.encode(base.get_state())

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        base.set_state(decoder.decode(state))


class Ale(PlainWay):
    """Atari environments of ale-py: the emulator's state, with its generator.

    The state does not include the previous action, which sticky actions may repeat.
    """

    name = "ale"
    shared = None
    _skip = frozenset({"ale", "_action_set", "_game_difficulty", "_game_mode"})

    @override
    def suits(self, base: Any) -> bool:
        emulator = emulator_of(base)
        if emulator is None:
            return False
        return float(emulator.getFloat("repeat_action_probability")) == 0

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        attributes = encoder.attributes(base, self._skip)
        return {"ale": emulator_state(base.ale), "attributes": attributes}

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        put_emulator_state(base.ale, state["ale"])
        decoder.replace(base, state["attributes"], self._skip)


class Mujoco(PlainWay):
    """MuJoCo environments: the integrator's state with its warm start, and derived quantities."""

    name = "mujoco"
    _skip = frozenset({"model", "data", "mujoco_renderer"})
    shared = frozenset({"model", "mujoco_renderer"})

    @override
    def suits(self, base: Any) -> bool:
        kind = type(getattr(base, "data", None))
        return kind.__module__.startswith("mujoco") and hasattr(base, "model")

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        import mujoco

        if encoder.looks_only:
            return encoder.attributes(base, self._skip)
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        values = np.empty(mujoco.mj_stateSize(base.model, kind))
        mujoco.mj_getState(base.model, base.data, values, kind)
        return {
            "model": _digest(base.model),
            "physics": encoder.encode(values),
            "derived": Encoder([]).encode(_derived(base.data)),
            "attributes": encoder.attributes(base, self._skip),
        }

    @override
    def comparable(self, state: Mapping[str, Any]) -> Any:
        # Some derived quantities are scratch memory.
        base = {name: part for name, part in state["base"].items() if name != "derived"}
        return {**state, "base": base}

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        import mujoco

        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        values, derived = decoder.decode(state["physics"]), Decoder([]).decode(state["derived"])
        _check_sizes(values, np.empty(mujoco.mj_stateSize(base.model, kind)), "physics")
        if state["model"] != _digest(base.model):
            raise EnvStateError(
                f"the state is one of another model than that of {base}: make the environment in "
                "the same way, or give it get_state() and set_state() if it changes its model"
            )
        mujoco.mj_setState(base.model, base.data, values, kind)
        mujoco.mj_forward(base.model, base.data)
        mujoco.mj_setState(base.model, base.data, values, kind)
        # The sizes of some depend on the physics. States of earlier versions have indices too.
        arrays = _arrays(base.data)
        derived = {name: one for name, one in derived.items() if one.dtype.kind == "f"}
        for name, array in derived.items():
            if name not in arrays:
                raise NotPlain(f"MuJoCo's data has no array {name} in this state")
            _check_sizes(array, arrays[name], name)
        for name, array in derived.items():
            arrays[name][...] = array
        decoder.replace(base, state["attributes"], self._skip)


def _digest(model: Any) -> str:
    """Returns a digest of the arrays of a model, which environments may change."""
    digest = hashlib.sha256()
    for name in dir(model):
        array = None if name.startswith("_") else getattr(model, name)
        if isinstance(array, np.ndarray):
            digest.update(array.tobytes())
    return digest.hexdigest()


def _derived(data: Any) -> dict[str, Any]:
    """Returns quantities that rewards may use, such as positions of bodies before a step.

    They depend on the last step, so they can't be computed from the physics state alone.
    """
    return {name: one.copy() for name, one in _arrays(data).items()}


def _arrays(data: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the quantities by name, without indices, which MuJoCo does not check."""
    found = {name: getattr(data, name) for name in dir(data) if not name.startswith(_VARYING)}
    return {name: one for name, one in found.items() if _is_quantity(one)}


def _is_quantity(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f" and value.size > 0


def _check_sizes(value: Any, own: np.ndarray[Any, Any], name: str) -> None:
    if not isinstance(value, np.ndarray) or (value.dtype, value.shape) != (own.dtype, own.shape):
        raise NotPlain(f"{name} is not an array of {own.dtype} of shape {own.shape}")


class Attributes(PlainWay):
    """Attributes of the environment: numbers, arrays, generators and collections of these."""

    name = "attributes"

    @override
    def suits(self, base: Any) -> bool:
        return True

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        return encoder.attributes(base)

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        decoder.replace(base, state)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that refuses an ``EzPickle``, which would pickle only its constructor's arguments."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, EzPickle):
            raise NotPlain(f"with {type(obj).__name__}, an EzPickle, which would lose its state")
        return super().reducer_override(obj)


class Pickle(Way):
    """The environment and its wrappers are pickled."""

    name = "pickle"

    @override
    def suits(self, base: Any) -> bool:
        return True

    @override
    def capture(self, members: Sequence[Any]) -> dict[str, Any]:
        try:
            file = io.BytesIO()
            _Pickler(file).dump(members[0])
            data = file.getvalue()
        except NotPlain:
            raise
        except Exception as error:
            raise NotPlain(f"which can't be pickled: {error}") from error
        return {"pickle": data, "signature": sign(data)}

    @override
    def comparable(self, state: Mapping[str, Any]) -> Any:
        # Two pickles of the same state may differ in the order of their content.
        return None

    @override
    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        data = state["pickle"]
        if not (trust or self.is_own(state)):
            raise EnvStateError(
                f"{members[-1]} was pickled by another program, and a pickle can run any code: if "
                "you know where the state comes from, load it with trust=True"
            )
        fresh = cloudpickle.loads(data)
        members[0].close()
        return fresh

    def is_own(self, state: Mapping[str, Any]) -> bool:
        """Returns True if a process of this program made the pickle in a state."""
        return is_own(state["pickle"], state["signature"])


PICKLE = Pickle()
WAYS: dict[str, Way] = {
    way.name: way for way in (OwnMethods(), Ale(), Mujoco(), Attributes(), PICKLE)
}


def is_plain(env: Any) -> bool:
    """Returns True if the state of an environment can be captured as plain data.

    The check is cheap, because it does not copy the state.
    """
    members = chain(env)
    return any(
        isinstance(way, PlainWay) and way.suits(members[-1]) and way.works(members)
        for way in WAYS.values()
    )


def wrappers_are_plain(env: Any) -> bool:
    """Returns True if the attributes of an environment's wrappers can be captured as plain data."""
    members = chain(env)
    encoder = Encoder(members, looks_only=True)
    try:
        for member in members[:-1]:
            encoder.attributes(member)
    except NotPlain:
        return False
    return True
