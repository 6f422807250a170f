"""Replay of an episode, for environments whose state can't be read.

An :class:`EpisodeLog` records everything that determines how an episode begins, and keeps the
actions since then. Another environment repeats the reset and the steps. The log is not a wrapper:
code that resets and steps the environment passes the resets and the actions to the log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gymnasium import wrappers
from typing_extensions import override

from trawl.envs.capture import origin
from trawl.envs.capture.codec import Decoder, Encoder, NotPlain
from trawl.envs.capture.simulators import emulator_of, emulator_state
from trawl.envs.capture.step_log import ActionCodec, ObservationLeaves, StepLog, digest
from trawl.envs.capture.ways import chain
from trawl.errors import EnvStateError
from trawl.schema.encoded import kind_of

# Wrappers whose attributes depend on nothing but the steps of the episode.
_REPLAYED = (wrappers.OrderEnforcing, wrappers.PassiveEnvChecker, wrappers.TimeLimit)
#: Way of an environment whose episode is replayed.
REPLAY = "replay"
#: Number of steps of an episode above which it can't be replayed.
MOST_STEPS = 1_000_000
#: Bytes of the actions of an episode above which it can't be replayed.
MOST_BYTES = 64 * 2**20


class ObservationCodec(ObservationLeaves, Protocol):
    """Codec of observations, such as a :class:`~trawl.envs.spaces.SpaceCodec`."""

    def encode(self, sample: Any, info: Any = None, /) -> list[Any]:
        """Returns the arrays of an observation and its info, in the order of ``leaves``."""


class EpisodeLog(StepLog):
    """Origin of the current episode of an environment, and the actions since then.

    Args:
        observations: codec of the observations.
        actions: codec of the actions, which have a fixed layout.
    """

    def __init__(self, observations: ObservationCodec, actions: ActionCodec) -> None:
        super().__init__(observations, actions, MOST_STEPS, MOST_BYTES)
        self._encode = observations.encode
        # Function that returns the origin as plain data.
        self._origin: Callable[[], dict[str, Any]] = dict
        self._made: dict[str, Any] | None = None
        self._worlds: list[Any] = []

    def begin(self, env: Any, arguments: Mapping[str, Any]) -> None:
        """Records the origin of an episode; must be called just before the reset that begins it.

        Args:
            env: the environment.
            arguments: arguments of the reset.
        """
        members = chain(env)
        self._worlds = origin.worlds(members[-1])
        if self._made is None:
            self._made = origin.numbers(members[-1])
        self.clear()
        self.why = None
        try:
            self._origin = origin.note(members, arguments, self._made)
        except NotPlain as error:
            self.lose(str(error))

    def remade(self) -> None:
        """Prepares for an environment that was made anew."""
        self._made = None
        self.lose("no episode has begun since the environment was made anew")

    def why_not(self, env: Any) -> str | None:
        """Returns the reason why the episode can't be replayed; None if it can be.

        Args:
            env: the environment.
        """
        now = origin.worlds(chain(env)[-1])
        if any(one is other for one in now for other in self._worlds):
            # The observations may be the same at first, and differ after a later collision.
            return "its episodes share a world of Box2D, which remembers earlier ones"
        return self.why

    def capture(self, env: Any) -> dict[str, Any]:
        """Returns the origin, the actions, and data to check a replay with, as plain data.

        Raises:
            NotPlain: if the episode can't be replayed.
        """
        why = self.why_not(env)
        if why is not None:
            raise NotPlain(why)
        members = chain(env)
        encoder = Encoder(members[::-1])
        return {
            "origin": self._origin(),
            **self.state(),
            **_end(members[-1]),
            "wrappers": [encoder.attributes(member) for member in members[:-1]],
        }

    @override
    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        noted = state["origin"]
        self._origin = lambda: noted

    def replay(self, env: Any, state: Mapping[str, Any]) -> None:
        """Repeats a saved episode, and continues it in this log.

        Args:
            env: an environment that was made in the same way.
            state: the state that :meth:`capture` returned.

        Raises:
            EnvStateError: if the episode can't be repeated, or its results differ.
        """
        self.load(state)
        try:
            self._repeat(env, state)
        except BaseException:
            self.lose("a replay has failed")
            raise

    def _repeat(self, env: Any, state: Mapping[str, Any]) -> None:
        members = chain(env)
        try:
            if self._made is None:
                self._made = origin.numbers(members[-1])
            origin.write(members, state["origin"], self._made, state)
            leaves, rewards = self._play(env, origin.arguments_of(state["origin"]))
        except EnvStateError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise EnvStateError(f"{env} can't be replayed: {why}") from error
        self.check(env, leaves, rewards, state)
        for name, value in _end(members[-1]).items():
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

    def _play(self, env: Any, arguments: Mapping[str, Any]) -> tuple[list[Any], int]:
        """Repeats the reset and all steps.

        Args:
            env: the environment.
            arguments: arguments of the reset.

        Returns:
            The leaves of the last observation, and a digest of the rewards.
        """
        obs, info = env.reset(**arguments)
        rewards = 0
        for step in range(self.steps):
            obs, reward, terminated, truncated, info = env.step(self.action(step))
            rewards = digest(reward, rewards)
            if (terminated or truncated) and step + 1 < self.steps:
                raise EnvStateError(
                    f"{env} was replayed, but its episode ended after {step + 1} steps instead of "
                    f"going on for {self.steps}"
                )
        return self._encode(obs, info), rewards


def _stays(value: Any) -> bool:
    """Returns True unless a value is a space, which is captured only after samples were drawn."""
    return kind_of(value) != "space"


def _end(base: Any) -> dict[str, Any]:
    """Returns data to compare after a replay: states of the generators and of the emulator."""
    emulator = emulator_of(base)
    state = None if emulator is None else emulator_state(emulator)
    return {"generators": origin.generators(base), "emulator": state}
