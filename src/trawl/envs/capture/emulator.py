"""State of ALE, the emulator of Atari games."""

from __future__ import annotations

from typing import Any


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
