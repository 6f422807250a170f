"""Checks that a vector environment resets according to its autoreset mode.

An environment may declare the wrong mode, because it inherits metadata, or because its author
misunderstood when the environment resets. The checks test whether the observations, rewards
and flags at the end of an episode agree with the mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from trawl.envs.autoreset import is_plain, keeps_zero_rewards, shows_observations
from trawl.envs.final_obs import final_sample
from trawl.envs.infos import BatchReader
from trawl.envs.outcomes import Outcome, checked_info
from trawl.envs.source import Source
from trawl.memory import Array, Mask


class ModeCheck:
    """Checks that a vector environment behaves according to its autoreset mode.

    Args:
        env: the environment.
        reader: reads the observations of the environment.
        mode: the mode that the environment is assumed to have.
    """

    def __init__(self, env: Any, reader: BatchReader, mode: AutoresetMode) -> None:
        self._env = env
        self.reader = reader
        self._mode = mode
        # A wrapper may change observations or rewards, and then they can't be compared.
        self._sees_observations = not is_plain(env) and shows_observations(env)
        self._sees_rewards = keeps_zero_rewards(env)

    def last(self, leaves: list[Array], ended: Mask, info: Any) -> None:
        """Rejects an environment that has already reset in the step that ended an episode.

        Args:
            leaves: the observations that the step returned.
            ended: mask of the sub-environments whose episodes the step ended.
            info: the info that the step returned.

        Raises:
            ValueError: if the last observation in the info differs from the returned observation.
        """
        if not self._sees_observations:
            return
        for row in map(int, np.flatnonzero(ended)):
            final = self.final(info, row)
            if final is not None and not _equal(final, _rows(leaves, row)):
                raise ValueError(
                    f"{self._assumed()}, but the step that ended an episode of sub-environment "
                    f"{row} returned an observation that differs from info['final_obs'], so the "
                    "environment resets in that step. State this with GymEnv(env, "
                    "autoreset_mode='SameStep')"
                )

    def final(self, info: Any, row: int) -> list[Any] | None:
        """Returns the encoded last observation of a row's episode, or None if the info has none."""
        sample = final_sample(checked_info(info, "step", self._env), row)
        return None if sample is None else self.reader.read_last(sample, row)

    def required_final(self, info: Any, row: int) -> list[Any]:
        """Returns the encoded last observation of a row's episode.

        Raises:
            KeyError: if the info has no last observation.
        """
        final = self.final(info, row)
        if final is None:
            held = sorted(info) if isinstance(info, dict) else info
            raise KeyError(
                f"{self._assumed()}, but returned no info['final_obs'] at the end of an episode "
                f"of sub-environment {row}; the info has {held}. Without it the last observation "
                "of the episode is lost"
            )
        return final

    def reset_step(self, resetting: Mask, outcome: Outcome) -> None:
        """Checks that the step after the end of an episode looks like a reset.

        Issues a single warning if a step that should be a reset returns a non-zero reward.

        Raises:
            ValueError: if the step ended an episode.
        """
        hint = "State the true mode with GymEnv(env, autoreset_mode='SameStep') or 'Disabled'"
        again = np.flatnonzero(resetting & (outcome.terminated | outcome.truncated))
        if again.size:
            raise ValueError(
                f"{self._assumed()}, but the step after the end of an episode of sub-environment "
                f"{again[0]} also ended an episode, so it was not a reset. {hint}"
            )
        rewards = outcome.reward[resetting]
        if self._sees_rewards and rewards.any():
            self._sees_rewards = False  # one warning is enough
            warnings.warn(
                f"{self._assumed()}, but the step after the end of an episode, which should be a "
                f"reset, returned a reward of {rewards[rewards != 0][0]}: if the environment "
                f"resets at another time, frames are wrong. {hint}",
                stacklevel=2,
            )

    def others(self, before: list[Array], after: list[Array], mask: Mask) -> None:
        """Rejects an environment whose partial reset also affects other sub-environments.

        Args:
            before: observations before the reset.
            after: observations that the reset returned.
            mask: mask of the sub-environments that were to be reset.

        Raises:
            ValueError: if the observation of a row outside ``mask`` has changed.
        """
        call = f"reset(options={{'reset_mask': {mask}}})"
        state = "GymEnv(env, autoreset_mode='NextStep') or 'SameStep'"
        if isinstance(getattr(self._env, "unwrapped", self._env), Source):
            call, state = f"begin({mask}, None)", "its autoreset_mode, 'NextStep' or 'SameStep'"
        rows = len(after[0])
        if rows != len(mask):
            raise ValueError(
                f"{call} of {self._env!r} returned observations with {rows} rows, but it must "
                f"return those of all {len(mask)} sub-environments"
            )
        for row in map(int, np.flatnonzero(~mask)):
            if not _equal(_rows(before, row), _rows(after, row)):
                raise ValueError(
                    f"{self._assumed()}, but {call} also changed sub-environment {row}. It must "
                    "reset only the sub-environments in the mask, and return the observations of "
                    "the others unchanged. If the environment resets by itself, state this with "
                    f"{state}"
                )

    @property
    def sees_observations(self) -> bool:
        """True if observations are checked.

        Observations are checked if the wrappers pass them on unchanged, and if :func:`is_plain` is
        False for the environment.
        """
        return self._sees_observations

    def _assumed(self) -> str:
        return f"{self._env!r} is assumed to have autoreset mode {self._mode.value!r}"


def _rows(leaves: Sequence[Any], row: int) -> list[Any]:
    return [leaf[row] for leaf in leaves]


def _equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Returns True if two encoded observations are equal in every leaf."""
    return all(
        np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")
        for a, b in zip(one, other, strict=True)
    )
