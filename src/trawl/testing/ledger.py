"""A check that each step of an environment is delivered once, in order and with correct data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from trawl.testing.envs import FIELDS, NumberedEnv


@dataclass
class _EnvState:
    """State of an environment, according to the frames seen so far."""

    now: list[int] | None = None
    ended: bool = True
    resets: int = 0
    trajectory: int = -1


class Ledger:
    """Checks batches of frames of :class:`~trawl.testing.NumberedEnv`.

    Each step of each environment must arrive exactly once and in order. The observation before a
    step must be equal to the observation after the previous step, or be the first observation of
    an episode. Flags, rewards, actions, trajectory ids and step counts must match the step. Frames
    of several environments may be mixed in any way.

    Args:
        envs: the environments, or environments made with the same arguments.
        limit: the collector's ``max_frames_per_traj``; None if the collector has no limit.

    Attributes:
        frames: number of frames checked.
        episodes: number of episodes that ended.
        steps: number of steps that each environment has taken, keyed by environment number.

    Examples:
        >>> from trawl.collectors import Collector
        >>> from trawl.testing import Ledger, NumberedEnv
        >>> ledger = Ledger([NumberedEnv(lengths=[3, 1])])
        >>> with Collector(
        ...     NumberedEnv(lengths=[3, 1]), frames_per_batch=4, total_frames=8
        ... ) as collector:
        ...     for batch in collector:
        ...         ledger.add(batch)
        >>> ledger.frames, ledger.episodes
        (8, 4)
    """

    def __init__(self, envs: Iterable[NumberedEnv], limit: int | None = None) -> None:
        self._envs = {env.number: env for env in envs}
        self._kind = type(next(iter(self._envs.values())))
        self._limit = limit
        self._states = {number: _EnvState() for number in self._envs}
        self._trajectories: set[int] = set()
        self.frames = 0
        self.episodes = 0

    @property
    def steps(self) -> dict[int, int]:
        """Number of steps that each environment has taken, keyed by environment number."""
        return {number: state.now[3] if state.now else 0 for number, state in self._states.items()}

    def reset(self, number: int | None = None) -> None:
        """Records that an environment was reset since the last batch.

        Args:
            number: number of the environment; None for all environments.
        """
        for state in self._states.values() if number is None else [self._states[number]]:
            state.resets += 1

    def add(self, batch: TensorDictBase) -> None:
        """Checks the next batch.

        Raises:
            AssertionError: if a frame is wrong. The message names the first wrong frame and the
                expected value.
        """
        columns = self._columns(batch)
        for index in range(batch.numel()):
            frame = {name: column[index] for name, column in columns.items()}
            if frame.get("mask", True) and frame.get("trajectory", 0) != -1:
                try:
                    self._check(frame)
                except AssertionError as error:
                    raise AssertionError(f"frame {index} of the batch, {frame}: {error}") from None
                self.frames += 1

    def _columns(self, batch: TensorDictBase) -> dict[str, list[Any]]:
        """Returns a list for each name of a value to check, with one entry per frame."""
        following = batch.get("next")
        found = {
            "now": self._kind.numbers(batch),
            "then": self._kind.numbers(following),
            "action": self._kind.action_numbers(batch),
            "reward": following.get("reward"),
        }
        for key in ("done", "terminated", "truncated", "step_count", "is_init"):
            for name, part in ((key, batch), (f"next {key}", following)):
                value = part.get(key, None)
                if value is not None:
                    found[name] = value
        for key, name in (("traj_ids", "trajectory"), ("mask", "mask")):
            value = batch.get(("collector", key), None)
            if value is not None:
                found[name] = value
        count = batch.numel()
        shapes = {"now": (count, len(FIELDS)), "then": (count, len(FIELDS))}
        return {
            name: value.reshape(shapes.get(name, (count,))).tolist()
            for name, value in found.items()
        }

    def _check(self, frame: dict[str, Any]) -> None:
        now, then = frame["now"], frame["then"]
        number, episode, step, total, _ = now
        _same("environment", number, number if number in self._states else sorted(self._states))
        state = self._states[number]
        began = self._check_root(state, now)
        _same("numbers after", then, [number, episode, step + 1, total + 1, frame["action"]])
        _same("reward", frame["reward"], total + 1)
        terminated, truncated = self._envs[number].ending(episode, step + 1)
        truncated = truncated or (self._limit is not None and step + 1 >= self._limit)
        expected = {"terminated": terminated, "truncated": truncated}
        expected["done"] = terminated or truncated
        for key, value in expected.items():
            _same(f"next {key}", frame[f"next {key}"], value)
            _same(key, frame[key], False)
        for key, value in (("step_count", step), ("is_init", step == 0)):
            _same(key, frame.get(key, value), value)
        _same("next step_count", frame.get("next step_count", step + 1), step + 1)
        self._check_trajectory(state, began, frame.get("trajectory"))
        state.now, state.ended, state.resets = then, expected["done"], 0
        self.episodes += expected["done"]

    def _check_root(self, state: _EnvState, now: list[int]) -> bool:
        """Checks the observation before a step; returns True if it is an episode's first."""
        _, episode, step, total, action = now
        if not state.ended and not state.resets:
            _same("numbers", now, state.now)
            return False
        before, taken = (-1, 0) if state.now is None else (state.now[1], state.now[3])
        _same("numbers at a start", [step, total, action], [0, taken, -1])
        most = before + state.ended + state.resets
        # Before its first frame, an environment may have been reset any number of times.
        if state.now is not None and not before < episode <= most:
            raise AssertionError(f"episode is {episode}, not from {before + 1} to {most}")
        return True

    def _check_trajectory(self, state: _EnvState, began: bool, trajectory: int | None) -> None:
        if trajectory is None:
            return
        if not began:
            _same("trajectory", trajectory, state.trajectory)
        elif trajectory in self._trajectories:
            raise AssertionError(f"trajectory {trajectory} occurred before")
        self._trajectories.add(trajectory)
        state.trajectory = trajectory


def _same(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise AssertionError(f"{what} is {found}, not {expected}")
