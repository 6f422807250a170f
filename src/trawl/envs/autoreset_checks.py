"""Whether a vector environment resets when its autoreset mode says, by what it returns.

An environment may state a mode that it doesn't have: it inherits metadata, or resets in another
way than its author thought. What can be told from observations, rewards and flags at the end of
an episode is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from trawl.envs.autoreset import is_plain, keeps_zero_rewards, shows_observations
from trawl.envs.outcomes import Outcome
from trawl.envs.spaces import Array, SpaceCodec

Mask = NDArray[np.bool_]

# Where the last observation is, from Gymnasium 1.1 on and before.
_FINAL = ("final_obs", "final_observation")


class ModeCheck:
    """Checks that a vector environment has the mode that it is taken for.

    Args:
        env: the environment.
        codec: encodes the observations of one sub-environment.
        mode: its mode.
    """

    def __init__(self, env: Any, codec: SpaceCodec, mode: AutoresetMode) -> None:
        self._env = env
        self._codec = codec
        self._mode = mode
        # A wrapper may show other observations or rewards than the environment gave.
        self._sees_observations = not is_plain(env) and shows_observations(env)
        self._sees_rewards = keeps_zero_rewards(env)

    def last(self, leaves: list[Array], ended: Mask, info: Any) -> None:
        """Refuses an environment that has reset already in the step that ended an episode.

        Args:
            leaves: the observations that the step returned.
            ended: whose episodes it ended.
            info: the info that it returned.

        Raises:
            ValueError: if the info holds another last observation than was returned.
        """
        if not self._sees_observations:
            return
        for row in map(int, np.flatnonzero(ended)):
            final = self.final(info, row)
            if final is not None and not _equal(final, _rows(leaves, row)):
                raise ValueError(
                    f"{self._taken()}, but the step that ended an episode of sub-environment "
                    f"{row} returned another observation than info['final_obs']: it resets in "
                    "that step. State it with GymEnv(env, autoreset_mode='SameStep')"
                )

    def final(self, info: Any, row: int) -> list[Any] | None:
        """The last observation of a row's episode, encoded, if the info holds it."""
        sample = _final_sample(info, row)
        return None if sample is None else self._codec.encode(sample)

    def required_final(self, info: Any, row: int) -> list[Any]:
        """The last observation of a row's episode, encoded.

        Raises:
            KeyError: if the info doesn't hold it.
        """
        final = self.final(info, row)
        if final is None:
            held = sorted(info) if isinstance(info, dict) else info
            raise KeyError(
                f"{self._taken()}, but gave no info['final_obs'] at the end of an episode of "
                f"sub-environment {row}; the info holds {held}. Without it the last observation "
                "of the episode is lost"
            )
        return final

    def reset_step(self, resetting: Mask, outcome: Outcome) -> None:
        """Checks that the step after the end of an episode looks like a reset.

        Raises:
            ValueError: if it ended an episode.
        """
        hint = "State it with GymEnv(env, autoreset_mode='SameStep') or 'Disabled'"
        again = np.flatnonzero(resetting & (outcome.terminated | outcome.truncated))
        if again.size:
            raise ValueError(
                f"{self._taken()}, but the step after the end of an episode of sub-environment "
                f"{again[0]} ended an episode as well, so that it was no reset. {hint}"
            )
        rewards = outcome.reward[resetting]
        if self._sees_rewards and rewards.any():
            self._sees_rewards = False  # one warning is enough
            warnings.warn(
                f"{self._taken()}, but the step after the end of an episode, which should be a "
                f"reset, gave a reward of {rewards[rewards != 0][0]}: frames are wrong if it "
                f"resets at another time. {hint}",
                stacklevel=2,
            )

    def others(self, before: list[Array], after: list[Array], mask: Mask) -> None:
        """Refuses an environment that resets all when it is told to reset some.

        Args:
            before: observations before the reset.
            after: what it returned.
            mask: which were to be reset.

        Raises:
            ValueError: if the observation of a row that was to be left alone has changed.
        """
        for row in map(int, np.flatnonzero(~mask)):
            if not _equal(_rows(before, row), _rows(after, row)):
                raise ValueError(
                    f"{self._taken()}, but reset(options={{'reset_mask': {mask}}}) changed "
                    f"sub-environment {row} as well. It must reset those of the mask only, and "
                    "return the others' observations as they were; if it resets by itself, state "
                    "it with GymEnv(env, autoreset_mode='NextStep') or 'SameStep'"
                )

    @property
    def sees_observations(self) -> bool:
        """Whether observations say what the environment itself returned."""
        return self._sees_observations

    def _taken(self) -> str:
        return f"{self._env!r} is taken for one of autoreset mode {self._mode.value!r}"


def _final_sample(info: Any, row: int) -> Any:
    """Sub-environment ``row``'s part of ``info["final_obs"]``, or None if there is none."""
    if isinstance(info, (list, tuple)):
        # As DictInfoToList returns it: an info for each sub-environment.
        return next((info[row][name] for name in _FINAL if name in info[row]), None)
    for name in _FINAL:
        if name in info:
            present = info.get(f"_{name}")
            return _row(info[name], row) if present is None or present[row] else None
    return None


def _row(sample: Any, row: int) -> Any:
    """Sub-environment ``row``'s part of an info entry, as ``VectorEnv`` merges them."""
    if isinstance(sample, dict):
        # Beside each entry, "_entry" says which sub-environments gave one.
        return {k: _row(v, row) for k, v in sample.items() if not _tells(k, sample)}
    return sample[row]


def _tells(key: Any, sample: dict[Any, Any]) -> bool:
    return str(key).startswith("_") and str(key)[1:] in sample


def _rows(leaves: Sequence[Any], row: int) -> list[Any]:
    return [leaf[row] for leaf in leaves]


def _equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two encoded observations are the same, leaf by leaf."""
    return all(
        np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f")
        for a, b in zip(one, other, strict=True)
    )
