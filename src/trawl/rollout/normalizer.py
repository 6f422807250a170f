"""Normalisation of the observations and rewards of a batch, in the batch's own memory.

A stepper writes the observations of the environment into separate rows. After each step, the
normaliser writes the normalised values into the rows that the policy reads. Everything that the
policy doesn't read is normalised when the batch is finished: the observations under ``"next"``, and
the rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from typing_extensions import override

from trawl.envs.features import is_feature
from trawl.keys import DONE, MASK, RAW_REWARD, Key, next_of, show_key, show_keys
from trawl.memory import Array, Mask
from trawl.rollout.batch_writer import StepFn
from trawl.rollout.episodes import StepArrays
from trawl.rollout.layout import Leaf
from trawl.rollout.moments import RunningMoments
from trawl.rollout.normalization import (
    Normalization,
    NormalizeObservation,
    NormalizeOptions,
    NormalizeReward,
    Statistics,
    affine,
)

# In the middle of a batch, the statistics are brought up to date whenever their count has doubled.
# They are first brought up to date after this many frames.
_FIRST_FRAMES = 16
_NEVER = 2**62


def observation_keys(options: NormalizeObservation, observed: Mapping[Key, Leaf]) -> list[Key]:
    """Returns the keys of the observations to normalise.

    Args:
        options: the options.
        observed: layout of the observations.

    Raises:
        KeyError: if there is no such observation.
        ValueError: if an observation has no floating-point numbers, or none of them has.
    """
    floats = [key for key, leaf in observed.items() if leaf.dtype.is_floating_point]
    if options.keys is None:
        found = [key for key in floats if is_feature(key)]
        if not found:
            raise ValueError(
                "normalize_observations needs an observation of floating-point numbers, but the "
                f"environment has only {show_keys(set(observed))}"
            )
        return found
    for key in options.keys:
        if key not in observed:
            raise KeyError(
                f"normalize_observations has the key {show_key(key)}, but the observations are "
                f"{show_keys(set(observed))}"
            )
        if key not in floats:
            raise ValueError(
                f"normalize_observations has the key {show_key(key)}, but its dtype is "
                f"{observed[key].dtype}: only floating-point numbers can be normalised"
            )
    return list(options.keys)


def raw_reward_of(key: Key) -> Key:
    """Returns the key of the environment's own reward, for the key of a normalised one."""
    return (*key[:-1], RAW_REWARD)


class _Observation:
    """Rows of one observation, and the statistics with which it is normalised.

    Args:
        key: key of the observation.
        next_obs: the normalised observations with which the next batch begins.
        steps: number of rows in a batch.
        clip: largest absolute value of an element.

    Attributes:
        raw_next: the observations of the environment with which the next batch begins.
    """

    def __init__(self, key: Key, next_obs: Array, steps: int, clip: float) -> None:
        self.key, self.next_obs = key, next_obs
        self.raw_next = next_obs.copy()
        self.raw = np.empty((steps, *next_obs.shape), next_obs.dtype)
        leaf = next_obs.shape[1:]
        # The largest factor, and the largest limit that is not infinite.
        self._largest = float(np.finfo(next_obs.dtype).max)
        clip = clip if math.isinf(clip) else min(clip, self._largest)
        # Arrays of the same dtype, because numpy is slower with any other operand.
        self._mean, self._scale, self._low, self._high = (
            np.full(leaf, value, next_obs.dtype) for value in (0, 1, -clip, clip)
        )

    @property
    def operands(self) -> tuple[Array, Array, Array, Array]:
        """Arrays to subtract, multiply with, and clip to; they keep their identity."""
        return self._mean, self._scale, self._low, self._high

    def load(self, moments: RunningMoments, epsilon: float) -> None:
        """Sets the statistics for all rows from now on."""
        mean, scale = affine(moments, epsilon)
        self._mean[...], self._scale[...] = mean, np.minimum(scale, self._largest)

    def normalize(self, source: Array, target: Array) -> None:
        """Writes normalised values; ``target`` may be ``source`` itself."""
        np.subtract(source, self._mean, target)
        np.multiply(target, self._scale, target)
        np.maximum(target, self._low, out=target)
        np.minimum(target, self._high, out=target)


class Normalizer:
    """Base of :class:`BatchNormalizer` that leaves the frames as they are.

    Attributes:
        normalization: the statistics; None if nothing is normalised.
    """

    normalization: Normalization | None = None

    @property
    def keys(self) -> list[Key]:
        """Keys of the observations that are normalised."""
        return []

    @property
    def more_leaves(self) -> dict[Key, Leaf]:
        """Layout of further entries of a batch."""
        return {}

    @property
    def raw_next(self) -> dict[Key, Array]:
        """The environment's own observations with which the next batch begins, by key."""
        return {}

    def saved_rows(self) -> dict[str, Array]:
        """Returns the arrays that a state has, by name."""
        return {}

    def reset(self, mask: Mask | None = None) -> None:
        """Normalises the first observations of environments that were reset, or of all."""

    def begin(self, view: StepArrays, in_groups: bool) -> StepArrays:
        """Begins a batch.

        Args:
            view: the arrays that the policy reads and writes.
            in_groups: True if the rows of a step are not filled all at once.

        Returns:
            The arrays for the stepper, where the observations of the environment go elsewhere.
        """
        return view

    def bind(self, step: StepFn, view: StepArrays, part: slice, start: int, stop: int) -> StepFn:
        """Returns a function that takes a step and normalises the observations that follow.

        Args:
            step: function that takes the step of row ``start + t``.
            view: the stepper's arrays.
            part: the environments that step.
            start: the first row.
            stop: the row after the last row.
        """
        return step

    def finish(self, filled: int, partial: bool) -> None:
        """Normalises the rest of a batch, and adds its frames to the statistics.

        Args:
            filled: number of rows that were filled.
            partial: True if there are more rows.
        """


class BatchNormalizer(Normalizer):
    """Normalises the batches of an ``ArrayBatchWriter``.

    The statistics of observations are those of the frames: the observation with which each frame
    begins counts once. Rows that hold no frame don't count. Rewards are normalised with statistics
    that include the batch itself.

    Args:
        options: what is normalised.
        observed: layout of the observations.
        rewards: layout of the rewards.
        next_obs: the observations with which the next batch begins, normalised.
        steps: number of rows in a batch.

    Attributes:
        normalization: the statistics.

    Raises:
        KeyError, ValueError: see :func:`observation_keys`.
    """

    def __init__(
        self,
        options: NormalizeOptions,
        observed: Mapping[Key, Leaf],
        rewards: Mapping[Key, Leaf],
        next_obs: Mapping[Key, Array],
        steps: int,
    ) -> None:
        self._options = options
        self._observations: list[_Observation] = []
        self._rewards: list[_Reward] = []
        count = len(next(iter(next_obs.values())))
        if options.observations is not None:
            keys, clip = observation_keys(options.observations, observed), options.observations.clip
            self._observations = [_Observation(key, next_obs[key], steps, clip) for key in keys]
        if options.rewards is not None:
            self._rewards = [
                _Reward(key, options.rewards, (count, *leaf.shape)) for key, leaf in rewards.items()
            ]
        self.normalization: Normalization = Normalization(options, self._empty())
        # True for environments that were reset since the last batch. Their first observation is
        # normalised when the next batch begins, with the statistics of that batch.
        self._fresh = np.ones(count, np.bool_)
        self._delta: Statistics = {}
        self._rows: dict[Key, Array] = {}
        self._first, self._due = 0, _NEVER
        self._num_envs = count

    def _empty(self) -> Statistics:
        found = {one.key: RunningMoments.empty(one.raw.shape[2:]) for one in self._observations}
        return found | {one.key: RunningMoments.empty() for one in self._rewards}

    @property
    @override
    def keys(self) -> list[Key]:
        return [one.key for one in self._observations]

    @property
    @override
    def more_leaves(self) -> dict[Key, Leaf]:
        if self._options.rewards is None or not self._options.rewards.keep_raw:
            return {}
        return {
            raw_reward_of(one.key): Leaf(one.carry.shape[1:], torch.float32)
            for one in self._rewards
        }

    @property
    @override
    def raw_next(self) -> dict[Key, Array]:
        return {one.key: one.raw_next for one in self._observations}

    @override
    def saved_rows(self) -> dict[str, Array]:
        found = {f"raw {show_key(one.key)}": one.raw_next for one in self._observations}
        found |= {f"return {show_key(one.key)}": one.carry for one in self._rewards}
        return found | {"fresh": self._fresh}

    # --- between batches

    @override
    def reset(self, mask: Mask | None = None) -> None:
        chosen = np.ones(self._num_envs, np.bool_) if mask is None else mask
        self._fresh |= chosen
        for reward in self._rewards:
            reward.carry[chosen] = 0
        self._load()
        self._normalize_fresh()

    def _normalize_fresh(self) -> None:
        fresh = self._fresh
        for one in self._observations:
            values = one.raw_next[fresh]
            one.normalize(values, values)
            one.next_obs[fresh] = values

    def _load(self) -> None:
        """Makes the newest statistics those of all rows from now on."""
        options = self._options.observations
        for one in self._observations:
            assert options is not None
            moments = self.normalization.of(one.key)
            if one.key in self._delta:
                moments = moments.merged(self._delta[one.key])
            one.load(moments, options.epsilon)

    # --- a batch

    @override
    def begin(self, view: StepArrays, in_groups: bool) -> StepArrays:
        self._delta, self._rows, self._first = {}, view.arrays, 0
        self._load()
        if self._fresh.any():
            self._normalize_fresh()
            self._fresh[:] = False
        for one in self._observations:
            one.raw[0] = one.raw_next
        self._due = _NEVER if in_groups or not self.normalization.training else self._next_due()
        arrays = view.arrays | {one.key: one.raw for one in self._observations}
        return StepArrays(arrays, view.next_obs | self.raw_next, bfloat16=view.bfloat16)

    def _next_due(self) -> int:
        """Returns the row after whose step the statistics are brought up to date."""
        if not self._observations:
            return _NEVER
        key = self._observations[0].key
        before = self.normalization.of(key).count
        if key in self._delta:
            before += self._delta[key].count
        return self._first + -(-max(before, _FIRST_FRAMES) // self._num_envs) - 1

    @override
    def bind(self, step: StepFn, view: StepArrays, part: slice, start: int, stop: int) -> StepFn:
        if not self._observations:
            return step
        subtract, multiply, maximum, minimum = np.subtract, np.multiply, np.maximum, np.minimum
        whole = StepArrays(self._rows, {one.key: one.next_obs for one in self._observations})
        view, target = _part(view, part), _part(whole, part)
        pairs = [
            (
                view.following(one.key, start, stop),
                target.following(one.key, start, stop),
                *one.operands,
            )
            for one in self._observations
        ]

        def step_normalized(t: int) -> None:
            step(t)
            for raw, rows, mean, scale, low, high in pairs:
                row = rows[t]
                subtract(raw[t], mean, row)
                multiply(row, scale, row)
                maximum(row, low, out=row)
                minimum(row, high, out=row)
            if start + t >= self._due:
                self._refresh(start + t + 1)

        return step_normalized

    def _refresh(self, stop: int) -> None:
        """Brings the statistics up to date in the middle of a batch."""
        self._end_rows(stop)
        self._load()
        self._due = self._next_due()

    def _end_rows(self, stop: int) -> None:
        """Counts the frames up to a row, and normalises the observations after their steps."""
        chosen = slice(self._first, stop)
        mask = self._rows[MASK][chosen] if MASK in self._rows else None
        for one in self._observations:
            if self.normalization.training:
                self._count(one.key, _samples(one.raw[chosen], mask))
            after = self._rows[next_of(one.key)][chosen]
            one.normalize(after, after)
        self._first = stop

    def _count(self, key: Key, samples: Array) -> None:
        moments = RunningMoments.of(samples)
        self._delta[key] = self._delta[key].merged(moments) if key in self._delta else moments

    @override
    def finish(self, filled: int, partial: bool) -> None:
        if filled:
            self._end_rows(filled)
            self._finish_rewards(filled)
        if partial:
            for one in self._observations:
                one.raw_next[...] = one.raw[filled]
        delta, self._delta, self._rows = self._delta, {}, {}
        self.normalization.merge(delta)

    def _finish_rewards(self, filled: int) -> None:
        mask = self._rows[MASK][:filled] if MASK in self._rows else None
        for one in self._rewards:
            rewards = self._rows[one.key][:filled]
            if one.options.keep_raw:
                self._rows[raw_reward_of(one.key)][:filled] = rewards
            returns = one.add(rewards, self._rows[DONE][:filled, :, 0], mask)
            if self.normalization.training:
                self._count(one.key, _samples(returns, mask).reshape(-1))
            moments = self.normalization.of(one.key)
            if one.key in self._delta:
                moments = moments.merged(self._delta[one.key])
            one.normalize(rewards, moments)


class _Reward:
    """Discounted returns of the environments, by which a reward is normalised.

    Args:
        key: key of the reward.
        options: the options.
        shape: shape of the rewards of a step.

    Attributes:
        carry: discounted return of each environment's episode so far, to add to its next reward.
    """

    def __init__(self, key: Key, options: NormalizeReward, shape: tuple[int, ...]) -> None:
        self.key, self.options = key, options
        self.carry = np.zeros(shape)

    def add(self, rewards: Array, done: Mask, mask: Mask | None) -> Array:
        """Adds rewards, and returns the discounted return up to each of them.

        Args:
            rewards: rewards of the environment, ``(steps, *shape)``.
            done: True where a step ended an episode, ``(steps, num_envs)``.
            mask: False where a row holds no frame, so that another episode follows.
        """
        # The environment's last reward is the last that a return has.
        goes_on = ~done if mask is None else ~done & mask
        lead = (*done.shape, *[1] * (rewards.ndim - 2))
        keep = np.where(goes_on, self.options.gamma, 0.0).reshape(lead)
        returns, carry, add, multiply = rewards.astype(np.float64), self.carry, np.add, np.multiply
        # A return may be infinite, which is reported later.
        with np.errstate(invalid="ignore"):
            for row, kept in zip(returns, keep, strict=True):
                add(row, carry, row)
                multiply(row, kept, carry)
        return returns

    def normalize(self, rewards: Array, moments: RunningMoments) -> None:
        """Normalises rewards in place."""
        _, scale = affine(moments, self.options.epsilon)
        np.multiply(rewards, rewards.dtype.type(scale), rewards)
        np.clip(rewards, -self.options.clip, self.options.clip, rewards)


def _part(view: StepArrays, part: slice) -> StepArrays:
    return view.part(part.start, part.stop - part.start)


def _samples(rows: Array, mask: Mask | None) -> Array:
    """Returns the frames of some rows, ``(count, *leaf)``."""
    if mask is not None and not mask.all():
        return rows[mask]
    return rows.reshape(-1, *rows.shape[2:])
