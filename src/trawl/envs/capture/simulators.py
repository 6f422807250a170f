"""States of simulators that are not in the attributes of their environments."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from typing_extensions import override

from trawl.envs.capture.codec import Decoder, Encoder, NotPlain
from trawl.envs.capture.ways import Way
from trawl.errors import EnvStateError

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
