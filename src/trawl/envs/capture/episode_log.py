"""Log of the current episode of an environment: how it began, and the actions since then.

How an episode begins is decided by everything that is recorded before the reset: generators,
numbers, the emulator's state, attributes of wrappers and arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import wrappers
from gymnasium.wrappers import PassiveEnvChecker
from typing_extensions import override

from trawl.envs.capture.action_log import ActionLog
from trawl.envs.capture.codec import Decoder, Encoder, NotPlain
from trawl.envs.capture.kinds import GENERATORS, generator_state
from trawl.envs.capture.ways import chain, emulator_of, emulator_state, put_emulator_state
from trawl.errors import EnvStateError
from trawl.schema.encoded import kind_of

# Wrappers whose attributes depend on nothing but the steps of the episode.
_REPLAYED = (wrappers.OrderEnforcing, PassiveEnvChecker, wrappers.TimeLimit)
_NUMBERS = frozenset({bool, int, float})
# Names of the kinds of generators in the codec, by class.
_GENERATORS = {kind: name for name, kind in GENERATORS.items()}
# Longer lists and larger arrays of wrappers are not recorded before each reset: most of them are
# records of episodes, or are overwritten by the reset. If an episode depends on one of them, the
# check after its replay fails.
_MOST_ITEMS = 256


class EpisodeLog(ActionLog):
    """Origin of the current episode of an environment, and the actions since then."""

    most_steps = 1_000_000
    # Function that returns the origin as plain data.
    _origin: Callable[[], dict[str, Any]] = dict
    # The numbers of the environment when it was made.
    _made: dict[str, Any] | None = None
    _worlds: Sequence[Any] = ()

    def begin(self, env: Any, arguments: Mapping[str, Any]) -> None:
        """Records the origin of an episode; must be called just before the reset that begins it.

        Args:
            env: the environment.
            arguments: arguments of the reset.
        """
        members = chain(env)
        self._worlds = _worlds(members[-1])
        if self._made is None:
            self._made = _numbers(members[-1])
        self.clear()
        self.why = None
        try:
            self._origin = _note(members, arguments, self._made)
        except NotPlain as error:
            self.lose(str(error))

    @override
    def remade(self) -> None:
        self._made = None
        self.lose("no episode has begun since the environment was made anew")

    @override
    def why_not(self, env: Any) -> str | None:
        now = _worlds(chain(env)[-1])
        if any(one is other for one in now for other in self._worlds):
            # The observations may be the same at first, and differ after a later collision.
            return "its episodes share a world of Box2D, which remembers earlier ones"
        return self.why

    @override
    def capture(self, env: Any) -> dict[str, Any]:
        why = self.why_not(env)
        if why is not None:
            raise NotPlain(why)
        members = chain(env)
        encoder = Encoder(members[::-1])
        return {
            "origin": self._origin(),
            **self.state(),
            **_end_of(members[-1]),
            "wrappers": [encoder.attributes(member) for member in members[:-1]],
        }

    @override
    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        noted = state["origin"]
        self._origin = lambda: noted

    @override
    def _begin(self, env: Any, state: Mapping[str, Any]) -> Sequence[Any]:
        members = chain(env)
        if self._made is None:
            self._made = _numbers(members[-1])
        _write(members, state["origin"], self._made, state)
        arguments = Decoder().decode(state["origin"]["arguments"])
        leaves: Sequence[Any] = self.owner.replay_reset(arguments)
        return leaves

    @override
    def _end(self, env: Any, state: Mapping[str, Any]) -> None:
        members = chain(env)
        for name, value in _end_of(members[-1]).items():
            if value != state[name]:
                raise EnvStateError(
                    f"{self.steps} steps of {env} were replayed, but its {name} has another state "
                    "after them than before"
                )
        # Some wrappers measure times, or keep records of earlier episodes. What others have follows
        # from the replay.
        decoder, encoder = Decoder(members[::-1]), Encoder(members[::-1])
        for member, attributes in zip(members[:-1], state["wrappers"], strict=True):
            own = encoder.attributes(member)
            lacking = {name for name in own.keys() - attributes.keys() if _stays(own[name])}
            unknown = attributes.keys() - own.keys() if isinstance(member, _REPLAYED) else set()
            if lacking or unknown:
                raise EnvStateError(
                    f"{type(member).__name__} must have the attributes {sorted(own)}, but the "
                    f"state has {sorted(attributes)}"
                )
            for name, value in attributes.items():
                if None not in (value, own.get(name)) and kind_of(value) != kind_of(own[name]):
                    raise EnvStateError(
                        f"{type(member).__name__}.{name} must be a {kind_of(own[name])}, but the "
                        f"state has a {kind_of(value)}"
                    )
            if not isinstance(member, _REPLAYED):
                decoder.replace(member, attributes)


def _stays(value: Any) -> bool:
    """Returns True unless a value is a space, which is captured only after samples were drawn."""
    return kind_of(value) != "space"


def _end_of(base: Any) -> dict[str, Any]:
    """Returns data to compare after a replay: states of the generators and of the emulator."""
    emulator = emulator_of(base)
    state = None if emulator is None else emulator_state(emulator)
    return {"generators": _generators(base), "emulator": state}


def _numbers(base: Any) -> dict[str, Any]:
    """Returns the attributes of an environment that are numbers, such as counters."""
    return {name: value for name, value in _attributes(base).items() if type(value) in _NUMBERS}


def _generators(base: Any) -> dict[str, Any]:
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


def _worlds(base: Any) -> list[Any]:
    """Returns the Box2D worlds among an environment's attributes.

    The order in which a world finds collisions depends on bodies that were destroyed earlier.
    """
    return [
        value
        for value in _attributes(base).values()
        if type(value).__name__ == "b2World" and type(value).__module__.startswith("Box2D")
    ]


def _note(
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
    now, screen = _numbers(base), None if emulator is None else emulator_state(emulator)
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
    return {} if isinstance(wrapper, PassiveEnvChecker) else encoder.attributes(wrapper, some=True)


def _write(
    members: Sequence[Any],
    origin: Mapping[str, Any],
    made: Mapping[str, Any],
    end: Mapping[str, Any],
) -> None:
    """Restores the origin of an episode in an environment.

    Numbers, generators and attributes of wrappers that exist only here are deleted.

    Args:
        members: the wrapper chain, outermost first.
        origin: the origin that :func:`_note` returned.
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


def _attributes(base: Any) -> dict[str, Any]:
    return getattr(base, "__dict__", {})
