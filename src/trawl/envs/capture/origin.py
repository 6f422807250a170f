"""Origin of an episode: everything that determines how it begins, recorded before the reset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.wrappers import PassiveEnvChecker

from trawl.envs.capture.codec import Decoder, Encoder, NotPlain
from trawl.envs.capture.kinds import GENERATORS, generator_state
from trawl.envs.capture.simulators import emulator_of, emulator_state, put_emulator_state

_NUMBERS = frozenset({bool, int, float})
# Names of the kinds of generators in the codec, by class.
_GENERATORS = {kind: name for name, kind in GENERATORS.items()}
# Longer lists and larger arrays of wrappers are not recorded before each reset: most of them are
# records of episodes, or are overwritten by the reset. If an episode depends on one of them, the
# check after its replay fails.
_MOST_ITEMS = 256


def numbers(base: Any) -> dict[str, Any]:
    """Returns the attributes of an environment that are numbers, such as counters."""
    return {name: value for name, value in _attributes(base).items() if type(value) in _NUMBERS}


def generators(base: Any) -> dict[str, Any]:
    """Returns the states of the generators among an environment's attributes, as plain data."""
    return _as_data(_states(base))


def _states(base: Any) -> dict[str, tuple[str, Any]]:
    """Returns the kinds and states of the generators among an environment's attributes.

    Raises:
        NotPlain: if a generator has spawned others, so that its state is incomplete.
    """
    return {
        name: (_GENERATORS[type(value)], generator_state(value))
        for name, value in _attributes(base).items()
        if type(value) in _GENERATORS
    }


def _as_data(states: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    return {
        name: {"number": 0, "kind": kind, "state": Encoder().encode(state)}
        for name, (kind, state) in states.items()
    }


def worlds(base: Any) -> list[Any]:
    """Returns the Box2D worlds among an environment's attributes.

    The order in which a world finds collisions depends on bodies that were destroyed earlier.
    """
    return [
        value
        for value in _attributes(base).values()
        if type(value).__name__ == "b2World" and type(value).__module__.startswith("Box2D")
    ]


def note(
    members: Sequence[Any], arguments: Mapping[str, Any], made: Mapping[str, Any]
) -> Callable[[], dict[str, Any]]:
    """Records the origin of the episode that the next reset begins.

    Args:
        members: the wrapper chain, outermost first.
        arguments: arguments of the reset.
        made: the numbers of the environment when it was made. Unchanged numbers are not recorded,
            because they may be handles that differ in another process.

    Returns:
        A function that returns the origin as plain data. The conversion is postponed, because most
        episodes end before a state is captured.

    Raises:
        NotPlain: if the origin can't be recorded, or the environment has neither a generator nor a
            seed.
    """
    base = members[-1]
    if isinstance(base, gymnasium.Env) and arguments.get("seed") is None:
        # Without a seed, the reset draws from this generator, which is made on first access.
        _ = base.np_random
    emulator, states = emulator_of(base), _states(base)
    if emulator is None and not states and arguments.get("seed") is None:
        raise NotPlain("the environment has no generator, and was reset without a seed")
    # Numbered from the inside, because the collector may add a wrapper around the others.
    encoder = Encoder(members[::-1], most=_MOST_ITEMS)
    wrappers = [_noted(member, encoder) for member in members[:-1]]
    now, screen = numbers(base), None if emulator is None else emulator_state(emulator)
    given = Encoder().encode(dict(arguments))

    def origin() -> dict[str, Any]:
        return {
            "arguments": given,
            "generators": _as_data(states),
            "numbers": {
                name: value
                for name, value in now.items()
                if name not in made or value != made[name] or type(value) is not type(made[name])
            },
            "emulator": screen,
            "wrappers": wrappers,
        }

    return origin


def _noted(wrapper: Any, encoder: Encoder) -> dict[str, Any]:
    """Returns the attributes of a wrapper on which an episode may depend."""
    # No episode depends on Gymnasium's checker. It keeps observations, which may be too large to be
    # recorded, and its flags must match them.
    return {} if isinstance(wrapper, PassiveEnvChecker) else encoder.some_attributes(wrapper)


def write(
    members: Sequence[Any],
    origin: Mapping[str, Any],
    made: Mapping[str, Any],
    end: Mapping[str, Any],
) -> None:
    """Restores the origin of an episode in an environment.

    Numbers, generators and attributes of wrappers that exist only here are deleted.

    Args:
        members: the wrapper chain, outermost first.
        origin: the origin that :func:`note` returned.
        made: the numbers of this environment when it was made.
        end: states of the generators and of the wrappers after the episode.
    """
    base, decoder = members[-1], Decoder(members[::-1])
    attributes = _attributes(base)
    known = {**made, **origin["numbers"]}
    sources = {*origin["generators"], *end["generators"]}
    for name, value in [*attributes.items()]:
        kept = known if type(value) in _NUMBERS else sources
        if type(value) in {*_NUMBERS, *_GENERATORS} and name not in kept:
            del attributes[name]
    fitting = {
        name: value
        for name, value in known.items()
        if name not in attributes or type(attributes[name]) in _NUMBERS
    }
    decoder.write(base, fitting)
    Decoder().write(base, origin["generators"])
    if origin["emulator"] is not None:
        put_emulator_state(base.ale, origin["emulator"])
    inside = zip(
        members[-2::-1], reversed(origin["wrappers"]), reversed(end["wrappers"]), strict=False
    )
    # In the order in which they were recorded, because values may refer to earlier values.
    for member, noted, last in reversed(list(inside)):
        if not isinstance(member, PassiveEnvChecker):
            decoder.drop_others(member, frozenset({*noted, *last}))
            decoder.write(member, noted)


def arguments_of(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the reset that began the episode."""
    arguments: dict[str, Any] = Decoder().decode(origin["arguments"])
    return arguments


def _attributes(base: Any) -> dict[str, Any]:
    return getattr(base, "__dict__", {})
