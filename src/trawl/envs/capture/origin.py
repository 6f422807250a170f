"""The origin of an episode: everything that decides how it begins, noted before the reset."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from trawl.envs.capture.attributes import Decoder, Encoder, NotPlain
from trawl.envs.capture.emulator import emulator_of, emulator_state, put_emulator_state

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_NUMBERS = (bool, int, float)
# Longer lists and larger arrays of wrappers are not noted before each reset: they are mostly
# records of episodes, or are overwritten by the reset. If an episode needs them, the check after
# its replay fails.
_MOST_ITEMS = 256


def numbers(base: Any) -> dict[str, Any]:
    """Returns the attributes of an environment that are numbers, such as counters."""
    return {name: value for name, value in _attributes(base).items() if type(value) in _NUMBERS}


def generators(base: Any) -> dict[str, Any]:
    """Returns the states of the generators among an environment's attributes.

    Raises:
        NotPlain: if a generator's state can't be captured.
    """
    return {
        name: Encoder([]).encode(value)
        for name, value in _attributes(base).items()
        if type(value) in _GENERATORS
    }


def note(members: Sequence[Any], arguments: Mapping[str, Any], made: Mapping[str, Any]) -> Any:
    """Returns the origin of the episode that the next reset begins, as plain data.

    Args:
        members: the wrapper chain, outermost first.
        arguments: arguments of the reset.
        made: the numbers of the environment when it was made. They are not noted, because they
            may be handles that differ in another process.

    Raises:
        NotPlain: if the origin can't be noted, or nothing decides the beginning of an episode.
    """
    base = members[-1]
    if isinstance(base, gymnasium.Env) and arguments.get("seed") is None:
        # Without a seed, the reset draws from this generator, which the first look at it makes.
        _ = base.np_random
    emulator, found = emulator_of(base), generators(base)
    if emulator is None and not found and arguments.get("seed") is None:
        raise NotPlain("the environment has no generator, and was reset without a seed")
    # The collector may add a wrapper outside of the others, so that numbers start inside.
    encoder = Encoder(members[::-1], most=_MOST_ITEMS)
    return {
        "arguments": Encoder([]).encode(dict(arguments)),
        "generators": found,
        "numbers": {
            name: value
            for name, value in numbers(base).items()
            if name not in made or value != made[name] or type(value) is not type(made[name])
        },
        "emulator": None if emulator is None else emulator_state(emulator),
        "wrappers": [encoder.some_attributes(member) for member in members[:-1]],
    }


def write(members: Sequence[Any], origin: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Brings an environment to the origin of an episode.

    Args:
        members: the wrapper chain, outermost first.
        origin: the origin that :func:`note` returned.
        made: the numbers of this environment when it was made.
    """
    base = members[-1]
    attributes = _attributes(base)
    for name, value in {**made, **origin["numbers"]}.items():
        if name not in attributes or type(attributes[name]) in _NUMBERS:
            attributes[name] = value
    Decoder([]).write(base, origin["generators"])
    if origin["emulator"] is not None:
        put_emulator_state(base.ale, origin["emulator"])
    decoder = Decoder(members[::-1])
    inside = zip(members[-2::-1], reversed(origin["wrappers"]), strict=False)
    # In the order in which they were noted, because values may refer to earlier ones.
    for member, noted in reversed(list(inside)):
        decoder.write(member, noted)


def arguments_of(origin: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the reset that began the episode."""
    arguments: dict[str, Any] = Decoder([]).decode(origin["arguments"])
    return arguments


def _attributes(base: Any) -> dict[str, Any]:
    return getattr(base, "__dict__", {})
