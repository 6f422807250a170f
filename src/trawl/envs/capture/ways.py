"""Ways to capture and restore the state of a Gymnasium environment."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Wrapper
from gymnasium.vector import VectorWrapper
from typing_extensions import override

from trawl.envs.capture.codec import Decoder, Encoder, NotPlain
from trawl.envs.capture.pickling import check_trust, pickled, unpickled
from trawl.errors import EnvStateError
from trawl.foreign.environments import ATARI_CONSTANT


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


class Way:
    """A way to capture the state of an environment, by default as plain data.

    Attributes:
        name: the name of the way.
        shared: names of attributes that a copy of the environment may share with it; None if the
            environment can't be copied.
    """

    name: str
    shared: frozenset[str] | None = frozenset()

    def suits(self, base: Any) -> bool:
        """Returns True if environments of this kind may be captured in this way."""
        return True

    def works(self, members: Sequence[Any], wrappers_only: bool = False) -> bool:
        """Returns True if a wrapper chain can be captured as plain data; copies nothing.

        Args:
            members: the wrapper chain, outermost first.
            wrappers_only: True to look only at the wrappers.
        """
        encoder = Encoder(members, looks_only=True)
        try:
            if not wrappers_only:
                self.capture_base(members[-1], encoder)
            for member in members[:-1]:
                encoder.attributes(member)
        except NotPlain:
            return False
        return True

    def capture(self, members: Sequence[Any]) -> dict[str, Any]:
        """Returns the state of a wrapper chain, including the attributes of wrappers.

        Raises:
            NotPlain: if the state can't be captured.
        """
        encoder = Encoder(members)
        try:
            return self._captured(members, encoder)
        except NotPlain:
            if not encoder.needs_blocks:
                raise
        return self._captured(members, Encoder(members, in_blocks=True))

    def _captured(self, members: Sequence[Any], encoder: Encoder) -> dict[str, Any]:
        inner = self.capture_base(members[-1], encoder)
        return {"base": inner, "wrappers": [encoder.attributes(one) for one in members[:-1]]}

    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        """Restores a state, and returns the environment to continue with."""
        decoder = Decoder(members)
        self.restore_base(members[-1], state["base"], decoder)
        for member, attributes in zip(members[:-1], state["wrappers"], strict=True):
            decoder.replace(member, attributes)
        return members[0]

    def comparable(self, state: Mapping[str, Any]) -> Any:
        """Returns the part of a state that is equal each time the same state is captured."""
        return state

    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        """Returns the state of the environment without its wrappers."""
        raise NotImplementedError

    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        """Restores the state of the environment without its wrappers."""
        raise NotImplementedError


class OwnMethods(Way):
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


class Attributes(Way):
    """Attributes of the environment: numbers, arrays, generators and collections of these."""

    name = "attributes"

    @override
    def capture_base(self, base: Any, encoder: Encoder) -> Any:
        return encoder.attributes(base)

    @override
    def restore_base(self, base: Any, state: Any, decoder: Decoder) -> None:
        decoder.replace(base, state)


class Pickle(Way):
    """The environment and its wrappers are pickled."""

    name = "pickle"
    shared = None

    @override
    def works(self, members: Sequence[Any], wrappers_only: bool = False) -> bool:
        return False

    @override
    def capture(self, members: Sequence[Any]) -> dict[str, Any]:
        return pickled(members[0])

    @override
    def comparable(self, state: Mapping[str, Any]) -> Any:
        # Two pickles of the same state may differ in the order of their content.
        return None

    @override
    def restore(self, members: Sequence[Any], state: Mapping[str, Any], trust: bool) -> Any:
        check_trust(state, trust, members[-1])
        fresh = unpickled(state)
        members[0].close()
        return fresh


# --- simulators whose state is not in the attributes of their environments

# Prefixes of the names of MuJoCo's data that are private, or whose sizes differ between steps.
_VARYING = ("_", "efc_", "iefc_", "contact", "arena", "buffer", "island", "map_", "iM", "iLD")


def emulator_of(base: Any) -> Any:
    """Returns the emulator of an Atari environment of ale-py; None for other environments."""
    emulator = getattr(base, "ale", None)
    return emulator if hasattr(emulator, "cloneState") else None


def emulator_state(emulator: Any) -> Any:
    """Returns the state of an emulator and of its generator.

    The state does not include the previous action, which sticky actions may repeat.
    """
    return emulator.cloneState(include_rng=True).__getstate__()


def put_emulator_state(emulator: Any, state: Any) -> None:
    """Makes an emulator continue from a state that :func:`emulator_state` returned."""
    kind: Any = type(emulator.cloneState(include_rng=True))
    saved = kind.__new__(kind)
    saved.__setstate__(state)
    emulator.restoreState(saved)


class Ale(Way):
    """Atari environments of ale-py: the emulator's state, with its generator.

    The state does not include the previous action, which sticky actions may repeat.
    """

    name = "ale"
    shared = None
    _skip = ATARI_CONSTANT | {"ale"}

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


class Mujoco(Way):
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
            # Copies, because the arrays are views of MuJoCo's memory.
            "derived": Encoder().encode({n: one.copy() for n, one in _arrays(base.data).items()}),
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
        values, derived = decoder.decode(state["physics"]), Decoder().decode(state["derived"])
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


def _arrays(data: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Returns quantities that rewards may use, such as positions of bodies before a step.

    They depend on the last step, so they can't be computed from the physics state alone. Indices
    are left out, because MuJoCo does not check them.
    """
    found = {name: getattr(data, name) for name in dir(data) if not name.startswith(_VARYING)}
    return {
        name: one
        for name, one in found.items()
        if isinstance(one, np.ndarray) and one.dtype.kind == "f" and one.size > 0
    }


def _check_sizes(value: Any, own: np.ndarray[Any, Any], name: str) -> None:
    if not isinstance(value, np.ndarray) or (value.dtype, value.shape) != (own.dtype, own.shape):
        raise NotPlain(f"{name} is not an array of {own.dtype} of shape {own.shape}")
