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

from trawl.keys import Key, next_of
from trawl.memory import Array, Mask
from trawl.rollout.block import Block
from trawl.rollout.episodes import StepArrays
from trawl.rollout.moments import BaseMoments, RunningMoments
from trawl.rollout.normalization import clip_within
from trawl.rollout.stages.frame_normalizer import (
    DiscountedReturns,
    FrameNormalizer,
    Operations,
    present_in,
)
from trawl.rollout.stages.stage import StageSetup
from trawl.rollout.writers.batch_writer import StepFn


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


_OPERATIONS = Operations(
    np.add,
    np.multiply,
    np.clip,
    lambda values, mask: np.copyto(values, 0, where=mask),
    lambda values, dtype: values.astype(dtype),
    np.finfo,
    np.float64,
)


class ArrayNormalizer(FrameNormalizer[Array, StepArrays]):
    """Normalises the frames of environments whose data are arrays."""

    _ops = _OPERATIONS
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

    # --- between batches

    @override
    def _normalize_fresh(self) -> None:
        self._normalize_next(self._fresh)

    def _normalize_next(self, envs: Array) -> None:
        """Normalises the observations with which some environments go on."""
        for one in self._observations:
            values = one.raw_next[envs]
            one.normalize(values, values)
            if one.absent is not None:
                self._ops.clear_absent(values, self._next_rows[one.absent][envs])
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
                self._ops.clear_absent(rows[t], flags[t])
            if start + t >= statistics.due:
                refresh(start + t + 1)

        return step_normalized

    def _refresh(self, stop: int) -> None:
        """Brings the statistics up to date in the middle of a batch."""
        self._end_rows(stop)
        self._load()
        self._statistics.set_due(stop)

    @override
    def _end_rows(self, stop: int) -> None:
        chosen = slice(self._statistics.first, stop)
        mask = self._counted(stop)
        for one in self._observations:
            if self._statistics.training:
                part = None if mask is None else mask[chosen]
                self._statistics.add(one.key, self._moments(one, chosen, part))
            # Nothing else reads the observations after these steps.
            after = self._rows[next_of(one.key)][chosen]
            one.normalize(after, after)
            if one.absent is not None:
                # An agent that is done after a step, but wasn't before, has a last observation.
                flags = self._rows[one.absent][chosen] & self._rows[next_of(one.absent)][chosen]
                self._ops.clear_absent(after, flags)
        self._statistics.first = stop

    def _moments(self, one: _Observation, chosen: slice, mask: Mask | None) -> RunningMoments:
        rows = one.raw[chosen]
        if one.absent is None:
            return RunningMoments.of(_samples(rows, mask))
        present = present_in(self._rows[one.absent][chosen], mask)
        samples = _samples(rows, None)
        return RunningMoments.of(samples, present.reshape(-1, present.shape[-1]))

    @override
    def _keep_last(self, filled: int) -> None:
        for one in self._observations:
            if filled < len(one.raw):
                one.next_obs[...] = self._rows[one.key][filled]

    @override
    def _return_moments(
        self, one: DiscountedReturns, returns: Array, present: Mask | None
    ) -> RunningMoments:
        return RunningMoments.of(_samples(returns, present).reshape(-1, *one.components))


def _part(view: StepArrays, part: slice) -> StepArrays:
    return view.part(part.start, part.stop - part.start)


def _samples(rows: Array, mask: Mask | None) -> Array:
    """Returns the frames of some rows, ``(count, *leaf)``, or of the agents that a mask marks."""
    if mask is not None and not mask.all():
        return rows[mask]
    # A row may have no elements, so numpy can't find the size of a dimension.
    return rows.reshape(len(rows) * rows.shape[1], *rows.shape[2:])
