"""Normalisation of the observations and rewards of a batch, in the batch's own memory.

A stepper writes the observations of the environment into separate rows. After each step, the
normaliser writes the normalised values into the rows that the policy reads. Everything that the
policy doesn't read is normalised when the batch is finished: the observations under ``"next"``, and
the rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from trawl.keys import Key, next_of
from trawl.memory import Array, Mask
from trawl.rollout.block import Block
from trawl.rollout.episodes import StepArrays
from trawl.rollout.moments import RunningMoments
from trawl.rollout.normalization import NormalizeObservation
from trawl.rollout.stages.frame_normalizer import (
    DiscountedReturns,
    FrameNormalizer,
    NormalizedEntry,
    present_in,
)
from trawl.rollout.stages.stage import StageSetup
from trawl.rollout.writers.batch_writer import StepFn


class _Observation(NormalizedEntry):
    """Observation of the environments, whose own values are in the rows ``raw``.

    Args:
        rows: number of rows in a batch, and of environments in a row.
        *args: see :class:`NormalizedEntry`.
    """

    def __init__(self, rows: tuple[int, int], *args: Any) -> None:
        super().__init__(*args)
        self.raw: Array = np.empty((*rows, *self.leaf), self.next_row.dtype)


class ArrayNormalizer(FrameNormalizer[Array, StepArrays]):
    """Normalises the frames of environments whose data are arrays."""

    _observations: list[_Observation]
    _rows: dict[Key, Array]

    @override
    def _new_observations(
        self, setup: StageSetup[Array], keys: Sequence[Key], options: NormalizeObservation
    ) -> list[_Observation]:
        rows = setup.options.steps, setup.envs_per_row
        return [
            _Observation(rows, key, setup.next_rows[key], options, self._absent(key))
            for key in keys
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
            one.next_row[envs] = values

    # --- a batch

    @override
    def begin(self, block: Block, view: StepArrays) -> StepArrays:
        self._rows = view.arrays
        for one in self._observations:
            view.arrays[one.key][0] = one.next_row
        arrays = view.arrays | {one.key: one.raw for one in self._observations}
        next_obs = {**self.first_rows(view.next_obs)}
        return StepArrays(arrays, next_obs, bfloat16=view.bfloat16)

    @override
    def bind(self, step: StepFn, view: StepArrays, part: slice, start: int, stop: int) -> StepFn:
        if not self._observations:
            return step
        statistics, refresh = self._statistics, self._refresh
        clear_absent = self._ops.clear_absent
        next_obs = {**self._next_rows, **{one.key: one.next_row for one in self._observations}}
        view, target = _part(view, part), _part(StepArrays(self._rows, next_obs), part)
        changed = [
            (
                one.normalize,
                view.following(one.key, start, stop),
                target.following(one.key, start, stop),
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
            for normalize, raw, rows in changed:
                normalize(raw[t], rows[t])
            if absences:
                for rows, flags in absences:
                    clear_absent(rows[t], flags[t])
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
                one.next_row[...] = self._rows[one.key][filled]

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
