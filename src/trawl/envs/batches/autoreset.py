"""Autoreset modes of vector environments: which one an environment has, and if it keeps to it.

The modes are described at https://farama.org/Vector-Autoreset-Mode. Gymnasium's wrappers affect
resets. Moreover, an environment may declare the wrong mode, because it inherits metadata, or
because its author misunderstood when the environment resets. :class:`ModeCheck` tests whether the
observations, rewards and flags at the end of an episode agree with the mode.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import vector as wrappers

from trawl.envs.capture.ways import chain
from trawl.envs.entries.infos import BatchReader
from trawl.envs.outcomes import Outcome, checked_info, final_sample
from trawl.envs.source import Source
from trawl.memory import Array, Mask

# Gymnasium's wrappers, grouped by their effect. Stateless wrappers transform each value separately,
# so it makes no difference whether sub-environments are reset one at a time or all together.
_STATELESS = frozenset(
    {
        wrappers.ClipAction,
        wrappers.ClipReward,
        wrappers.DictInfoToList,
        wrappers.DtypeObservation,
        wrappers.FilterObservation,
        wrappers.FlattenObservation,
        wrappers.GrayscaleObservation,
        wrappers.RescaleAction,
        wrappers.RescaleObservation,
        wrappers.ReshapeObservation,
        wrappers.ResizeObservation,
    }
)
_ACTIONS = (wrappers.ClipAction, wrappers.RescaleAction, wrappers.TransformAction)
_REWARDS = (wrappers.ClipReward, wrappers.TransformReward)
_STATISTICS = (wrappers.NormalizeReward, wrappers.RecordEpisodeStatistics)
_MODES = ", ".join(repr(mode.value) for mode in AutoresetMode)


def autoreset_mode(env: Any, given: AutoresetMode | str | None = None) -> AutoresetMode:
    """Returns the autoreset mode of a vector environment.

    Args:
        env: the vector environment.
        given: the mode stated by the user; it takes precedence over the environment's own mode.

    Raises:
        ValueError: if neither the user nor the environment states a mode, if the mode is invalid,
            or if the user's mode contradicts the mode of one of Gymnasium's own environments.
    """
    declared = declared_mode(env)
    if given is not None:
        mode = as_mode(given)
        if is_plain(env) and mode is not declared:
            raise ValueError(
                f"autoreset_mode={mode.value!r} contradicts {env!r}, which was made with "
                f"autoreset_mode={declared.value!r}; leave the argument out"
            )
        return mode
    if declared is None:
        raise ValueError(
            f"{env!r} doesn't state when it resets its sub-environments: its metadata has no "
            "'autoreset_mode'. State it with GymEnv(env, autoreset_mode=...): 'SameStep' if the "
            "step that ends an episode returns the first observation of the next one (and the "
            "last one in info['final_obs']), 'NextStep' if the step after the end is spent on "
            "the reset, 'Disabled' if only reset(options={'reset_mask': ...}) resets a "
            "sub-environment"
        )
    return as_mode(declared, f"metadata['autoreset_mode'] of {env!r}")


def declared_mode(env: Any) -> Any:
    """Returns the mode that the environment, or its outermost wrapper with metadata, declares.

    It may be invalid. None if there is none.
    """
    base, metadata = getattr(env, "unwrapped", env), getattr(env, "metadata", None)
    if metadata is getattr(base, "metadata", None):
        # Some classes write their mode into metadata that they share with other classes
        # (AtariVectorEnv writes into the metadata of VectorEnv), so the environment's attribute
        # takes precedence.
        own = getattr(base, "autoreset_mode", None)
        if own is not None or metadata is VectorEnv.metadata:
            return own
    return (metadata or {}).get("autoreset_mode")


def as_mode(value: Any, name: str = "autoreset_mode") -> AutoresetMode:
    """Returns an autoreset mode, given the mode or its value.

    Raises:
        ValueError: if there is no such mode; the message has the name.
    """
    try:
        return AutoresetMode(value)
    except ValueError:
        raise ValueError(f"{name} must be one of {_MODES}, but it is {value!r}") from None


def is_plain(env: Any) -> bool:
    """Returns True for Gymnasium's own vector environments with at most stateless wrappers.

    In any mode, these environments can reset a sub-environment on demand, and the time of the
    reset makes no difference. A subclass, a custom worker function or any other wrapper may rely
    on resets that happen according to the environment's mode.
    """
    base = getattr(env, "unwrapped", env)
    around = chain(env)[:-1]
    if type(base) is AsyncVectorEnv:
        if base.worker is not None:
            return False
    elif type(base) is not SyncVectorEnv:
        return False
    # If the environment doesn't copy its observations, a wrapper that transforms them in place
    # would transform some of them twice.
    return not around or (base.copy and all(type(wrapper) in _STATELESS for wrapper in around))


def is_restartable(env: Any) -> bool:
    """Returns True if any sub-environment can be restarted, although they reset by themselves."""
    base = getattr(env, "unwrapped", env)
    if isinstance(base, Source):
        return base.can_restart and all(type(one) in _STATELESS for one in chain(env)[:-1])
    # Without shared memory, AsyncVectorEnv resets once more after a partial reset.
    return is_plain(env) and not resets_twice(env)


def resets_twice(env: Any) -> bool:
    """Returns True if the environment still autoresets in the step after an explicit reset.

    Without shared memory, the processes of an ``AsyncVectorEnv`` don't register an explicit reset.
    """
    base = env.unwrapped
    return isinstance(base, AsyncVectorEnv) and not base.shared_memory


def shows_observations(env: Any) -> bool:
    """Returns True if the wrappers pass on the environment's observations unchanged."""
    known = {*_ACTIONS, *_REWARDS, *_STATISTICS, wrappers.DictInfoToList}
    return all(type(wrapper) in known for wrapper in chain(env)[:-1])


def keeps_zero_rewards(env: Any) -> bool:
    """Returns True if the wrappers leave rewards of zero unchanged."""
    known = {
        *_STATELESS,
        *_ACTIONS,
        *_STATISTICS,
        wrappers.NormalizeObservation,
    }
    known -= {*_REWARDS}
    return all(type(wrapper) in known for wrapper in chain(env)[:-1])


def forgetful_wrapper(env: Any) -> str | None:
    """Returns the name of a wrapper that loses all statistics in a partial reset, or None."""
    ours = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
    for wrapper in chain(env)[:-1]:
        # RecordEpisodeStatistics reads the reset mask from the options, but only after Gymnasium's
        # own environments have removed the mask from them.
        if isinstance(wrapper, wrappers.NormalizeReward) or (
            ours and isinstance(wrapper, wrappers.RecordEpisodeStatistics)
        ):
            return type(wrapper).__name__
    return None


# --- checks


class ModeCheck:
    """Checks that a vector environment behaves according to its autoreset mode.

    Args:
        env: the environment.
        reader: reads the observations of the environment.
        mode: the mode that the environment is assumed to have.

    Attributes:
        reader: the argument.
        sees_observations: True if observations are checked: if the wrappers pass them on unchanged,
            and :func:`is_plain` is False for the environment.
    """

    def __init__(self, env: Any, reader: BatchReader, mode: AutoresetMode) -> None:
        self._env = env
        self.reader = reader
        self._mode = mode
        # A wrapper may change observations or rewards, and then they can't be compared.
        self.sees_observations = not is_plain(env) and shows_observations(env)
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
        if not self.sees_observations:
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
