"""Normalisation of the observations and rewards of a batch, in the batch's own memory.

A stepper writes the observations of the environment into separate rows. After each step, the
normaliser writes the normalised values into the rows that the policy reads. Everything that the
policy doesn't read is normalised when the batch is finished: the observations under ``"next"``, and
the rewards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from trawl.keys import DONE, MASK, Key, next_of
from trawl.memory import Array, Mask
from trawl.rollout.batch_writer import StepFn
from trawl.rollout.block import Block
from trawl.rollout.episodes import StepArrays
from trawl.rollout.frame_normalizer import FrameNormalizer, raw_reward_of
from trawl.rollout.moments import BaseMoments, RunningMoments
from trawl.rollout.normalization import clip_within
from trawl.rollout.stage import StageSetup


class _Observation:
    """Rows of one observation, and the statistics with which it is normalised.

    Args:
        key: key of the observation.
        next_obs: the normalised observations with which the next batch begins.
        rows: number of rows in a batch, and of environments in a row.
        clip: largest absolute value of an element.
        absent: key of the flag that is True for absent agents; None if no agent is ever absent.

    Attributes:
        leaf: shape of an observation.
        raw_next: the observations of the environment with which the next batch begins.
    """

    def __init__(
        self, key: Key, next_obs: Array, rows: tuple[int, int], clip: float, absent: Key | None
    ) -> None:
        self.key, self.next_obs, self.absent = key, next_obs, absent
        self.raw_next = next_obs.copy()
        self.leaf = leaf = next_obs.shape[1:]
        self.raw = np.empty((*rows, *leaf), next_obs.dtype)
        self._largest = float(np.finfo(next_obs.dtype).max)
        clip = clip_within(clip, self._largest)
        # Arrays of the same dtype, because numpy is slower with any other operand.
        self._mean, self._scale, self._low, self._high = (
            np.full(leaf, value, next_obs.dtype) for value in (0, 1, -clip, clip)
        )

    @property
    def operands(self) -> tuple[Array, Array, Array, Array]:
        """Arrays to subtract, multiply with, and clip to; they keep their identity."""
        return self._mean, self._scale, self._low, self._high

    def load(self, moments: BaseMoments, epsilon: float) -> None:
        """Sets the statistics for all rows from now on."""
        self._mean[...], self._scale[...] = moments.affine(epsilon, self._largest)

    def normalize(self, source: Array, target: Array) -> None:
        """Writes normalised values; ``target`` may be ``source`` itself."""
        np.subtract(source, self._mean, target)
        np.multiply(target, self._scale, target)
        np.maximum(target, self._low, out=target)
        np.minimum(target, self._high, out=target)


class ArrayNormalizer(FrameNormalizer[Array, StepArrays]):
    """Normalises the frames of environments whose data are arrays."""

    _ops = np.add, np.multiply
    _observations: list[_Observation]
    _rows: dict[Key, Array]

    @override
    def _new_observations(
        self, setup: StageSetup[Array], keys: Sequence[Key], clip: float
    ) -> list[_Observation]:
        rows = setup.options.steps, setup.envs_per_row
        return [
            _Observation(key, setup.next_rows[key], rows, clip, self._absent(key)) for key in keys
        ]

    @override
    def _zeros(self, shape: tuple[int, ...]) -> Array:
        return np.zeros((self._num_envs, *shape))

    # --- between batches

    @override
    def _clear_carry(self, carry: Array, chosen: Mask) -> None:
        carry[chosen] = 0

    @override
    def _normalize_fresh(self) -> None:
        self._normalize_next(self._fresh)

    def _normalize_next(self, envs: Array) -> None:
        """Normalises the observations with which some environments go on."""
        for one in self._observations:
            values = one.raw_next[envs]
            one.normalize(values, values)
            if one.absent is not None:
                _clear(values, self._next_rows[one.absent][envs])
            one.next_obs[envs] = values

    # --- a batch

    @override
    def begin(self, block: Block, view: StepArrays) -> StepArrays:
        self._rows = view.arrays
        for one in self._observations:
            view.arrays[one.key][0] = one.next_obs
        arrays = view.arrays | {one.key: one.raw for one in self._observations}
        next_obs = {**self.first_rows(view.next_obs)}
        return StepArrays(arrays, next_obs, bfloat16=view.bfloat16)

    @override
    def bind(self, step: StepFn, view: StepArrays, part: slice, start: int, stop: int) -> StepFn:
        if not self._observations:
            return step
        subtract, multiply, maximum, minimum = np.subtract, np.multiply, np.maximum, np.minimum
        statistics, refresh = self._statistics, self._refresh
        next_obs = {**self._next_rows, **{one.key: one.next_obs for one in self._observations}}
        view, target = _part(view, part), _part(StepArrays(self._rows, next_obs), part)
        pairs = [
            (
                view.following(one.key, start, stop),
                target.following(one.key, start, stop),
                *one.operands,
            )
            for one in self._observations
        ]
        absences = [
            (target.following(one.key, start, stop), target.following(one.absent, start, stop))
            for one in self._observations
            if one.absent is not None
        ]

        def step_normalized(t: int) -> None:
            step(t)
            for raw, rows, mean, scale, low, high in pairs:
                row = rows[t]
                subtract(raw[t], mean, row)
                multiply(row, scale, row)
                maximum(row, low, out=row)
                minimum(row, high, out=row)
            for rows, flags in absences:
                _clear(rows[t], flags[t])
            if start + t >= statistics.due:
                refresh(start + t + 1)

        return step_normalized

    def _refresh(self, stop: int) -> None:
        """Brings the statistics up to date in the middle of a batch."""
        self._end_rows(stop)
        self._load()
        self._statistics.set_due(stop)

    def _end_rows(self, stop: int) -> None:
        """Counts the frames up to a row, and normalises the observations after their steps."""
        chosen = slice(self._statistics.first, stop)
        mask = self._counted(stop)
        for one in self._observations:
            if self._statistics.training:
                part = None if mask is None else mask[chosen]
                self._statistics.add(one.key, self._moments(one, chosen, part))
            after = self._rows[next_of(one.key)][chosen]
            one.normalize(after, after)
            if one.absent is not None:
                # An agent that is done after a step, but wasn't before, has a last observation.
                flags = self._rows[one.absent][chosen] & self._rows[next_of(one.absent)][chosen]
                _clear(after, flags)
        self._statistics.first = stop

    def _moments(self, one: _Observation, chosen: slice, mask: Mask | None) -> RunningMoments:
        rows = one.raw[chosen]
        if one.absent is None:
            return RunningMoments.of(_samples(rows, mask))
        present = _present(self._rows[one.absent][chosen], mask)
        samples = _samples(rows, None)
        return RunningMoments.of(samples, present.reshape(-1, present.shape[-1]))

    @override
    def finish(self, block: Block, filled: int) -> None:
        if filled:
            self._end_rows(filled)
            self._finish_rewards(filled)
        self._keep_last(filled)
        self._rows = {}
        self._statistics.finish()

    def _keep_last(self, filled: int) -> None:
        """Keeps the observations after the last step."""
        for one in self._observations:
            if filled < len(one.raw):
                one.next_obs[...] = self._rows[one.key][filled]

    def _finish_rewards(self, filled: int) -> None:
        rows, statistics, counted = self._rows, self._statistics, self._counted(filled)
        for one in self._rewards:
            rewards, gamma = rows[one.key][:filled], one.options.gamma
            if one.options.keep_raw:
                rows[raw_reward_of(one.key)][:filled] = rewards
            absent = self._absent(one.key[1:])
            goes_on = self._goes_on(filled, rewards.ndim, absent)
            returns = rewards.astype(np.float64)
            # A return may be infinite, which is reported later.
            with np.errstate(invalid="ignore"):
                one.add(returns, np.where(goes_on, gamma, 0.0), self._owners(filled))
            if statistics.training:
                present = counted
                if absent is not None:
                    present = _present(rows[absent][:filled], counted)
                statistics.add(one.key, RunningMoments.of(_samples(returns, present).reshape(-1)))
            largest = float(np.finfo(rewards.dtype).max)
            _, scale = statistics.of(one.key).affine(one.options.epsilon, largest)
            np.multiply(rewards, rewards.dtype.type(scale), rewards)
            clip = clip_within(one.options.clip, largest)
            np.clip(rewards, -clip, clip, rewards)

    def _owners(self, filled: int) -> list[int] | None:
        """Returns the environment of each row; None if a row has those of all."""
        return None

    def _goes_on(self, filled: int, ndim: int, absent: Key | None) -> Mask:
        """Returns True where a return continues in the next row."""
        ends = self._rows[DONE][:filled, :, 0]
        if MASK in self._rows:
            # Another episode follows a row without a frame.
            ends = ends | ~self._rows[MASK][:filled]
        ends = ends.reshape(*ends.shape, *[1] * (ndim - 2))
        if absent is not None:
            ends = ends | self._rows[next_of(absent)][:filled]
        return ~ends


def _clear(values: Array, absent: Mask) -> None:
    """Writes zeros where ``absent`` is True, which has the shape ``(*size, agents, 1)``."""
    mask = absent.reshape(*absent.shape[:-1], *[1] * (values.ndim - absent.ndim + 1))
    np.copyto(values, 0, where=mask)


def _present(absent: Array, mask: Mask | None) -> Mask:
    """Returns True where an agent is present in a frame, ``(*size, agents)``."""
    present: Mask = ~absent[..., 0]
    return present if mask is None else present & mask[..., None]


def _part(view: StepArrays, part: slice) -> StepArrays:
    return view.part(part.start, part.stop - part.start)


def _samples(rows: Array, mask: Mask | None) -> Array:
    """Returns the frames of some rows, ``(count, *leaf)``, or of the agents that a mask marks."""
    if mask is not None and not mask.all():
        return rows[mask]
    # A row may have no elements, so numpy can't find the size of a dimension.
    return rows.reshape(len(rows) * rows.shape[1], *rows.shape[2:])
