"""Normalisation of observations and rewards, in the memory of a batch.

Of arrays, a stepper writes the observations into separate rows. After each step, the normaliser
writes the normalised values into the rows that the policy reads. Everything that the policy doesn't
read is normalised when the batch is finished: the observations under ``"next"``, and the rewards.

Of tensors, the stepper steps a :class:`NormalizedSteps` instead of the environment, which
normalises all observations of a step at once. Its :class:`NormalizedRows` keep the observations of
the environment until they have been counted. The rewards are normalised when a batch is finished.
Nothing in the loop waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from trawl.envs.processes.ready import Rows
from trawl.envs.tensor_env import TensorStep
from trawl.keys import Key, next_of
from trawl.memory import Array, Mask
from trawl.rollout.batches import StepFn
from trawl.rollout.block import Block
from trawl.rollout.episodes import StepArrays
from trawl.rollout.moments import RunningMoments, TensorMoments
from trawl.rollout.normalization import NormalizeObservation
from trawl.rollout.ops import column, operations
from trawl.rollout.stages.frame_normalizer import (
    DiscountedReturns,
    FrameNormalizer,
    NormalizedEntry,
    present_in,
)
from trawl.rollout.stages.stage import StageSetup
from trawl.rollout.step_tensors import StepTensors
from trawl.rollout.steppers.tensors import StepSource, TensorSource

# --- arrays


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


class ReadyNormalizer(ArrayNormalizer):
    """Normalises frames in the order of their arrival, where a row is that of one environment.

    Statistics are those of the frames in this order. They are brought up to date after certain
    numbers of frames, wherever these fall, so they depend on the order of the frames alone.
    """

    # The environment of each row of the batch.
    _envs: NDArray[np.int64]

    def __init__(self, setup: StageSetup[Array]) -> None:
        super().__init__(setup)
        # True for environments that have a frame in the batch.
        self._present = np.zeros(self._num_envs, np.bool_)

    @override
    def renew_within(self, filled: int) -> float:
        if filled > self._statistics.due:
            self._refresh(filled)
        return self._statistics.due + 1 - filled

    @override
    def begin(self, block: Block, view: StepArrays) -> StepArrays:
        self._rows, self._envs = view.arrays, np.zeros(block.layout.steps, np.int64)
        return view

    @override
    def record(self, envs: Rows, start: int) -> None:
        chosen = slice(start, start + len(envs))
        self._envs[chosen], self._present[envs] = envs, True
        for one in self._observations:
            one.raw[chosen, 0] = one.raw_next[envs]

    @override
    def pass_on(self, envs: Rows, start: int) -> None:
        self._normalize_next(envs)

    @override
    def begin_episodes(self, envs: Rows) -> None:
        for reward in self._rewards:
            # Those with a frame have one that ends the return before, when the batch is finished.
            reward.carry[envs[~self._present[envs]]] = 0
        self._normalize_next(envs)

    @override
    def _keep_last(self, filled: int) -> None:
        # Each environment's newest observation is kept as soon as it arrives.
        self._present[:] = False

    @override
    def _owners(self, filled: int) -> list[int]:
        found: list[int] = self._envs[:filled].tolist()
        return found


# --- tensors


class TensorNormalizer(FrameNormalizer[Tensor, StepTensors]):
    """Normalises the frames of environments whose data are tensors.

    Except for rounding, the results equal those of :class:`ArrayNormalizer`.
    """

    _observations: list[NormalizedRows]
    _steps: NormalizedSteps

    def __init__(self, setup: StageSetup[Tensor]) -> None:
        self._home = setup.home
        super().__init__(setup)

    @override
    def _new_observations(
        self, setup: StageSetup[Tensor], keys: Sequence[Key], options: NormalizeObservation
    ) -> list[NormalizedRows]:
        rows, steps = [setup.next_rows[key] for key in keys], setup.options.steps
        self._kept = rows_kept(rows, steps, setup.masked)
        return [
            NormalizedRows(steps, self._kept, key, row, options, self._absent(key))
            for key, row in zip(keys, rows, strict=True)
        ]

    @override
    def _on_device(self, moments: RunningMoments) -> TensorMoments:
        return TensorMoments.on(self._home, moments)

    @override
    def source(self, source: TensorSource) -> StepSource:
        if not self._observations:
            return source
        self._steps = NormalizedSteps(source, self._observations)
        return self._steps

    # --- between batches

    @override
    def _normalize_fresh(self) -> None:
        for one in self._observations:
            values = torch.empty_like(one.next_row)
            one.normalize(one.raw_next, values)
            if one.absent is not None:
                self._ops.clear_absent(values, self._next_rows[one.absent])
            mask = column(self._fresh, values)
            torch.where(mask, values, one.next_row, out=one.next_row)

    # --- a batch

    @override
    def begin(self, block: Block, view: StepTensors) -> StepTensors:
        self._rows = view.arrays
        for one in self._observations:
            one.begin()
        return view

    @override
    def bind(self, step: StepFn, view: StepTensors, part: slice, start: int, stop: int) -> StepFn:
        if not self._observations:
            return step
        statistics, steps, kept = self._statistics, self._steps, self._kept
        for one in self._observations:
            one.bind(view, start, stop)

        def step_counted(t: int) -> None:
            steps.t, row = t, start + t + 1
            if not kept:
                # The step may change the observations with which it begins.
                self._end_rows(row)
            step(t)
            if row > statistics.due:
                self._end_rows(row)
                self._load()
                statistics.set_due(row)
            elif kept and row % kept == 0:
                self._end_rows(row)

        return step_counted

    @override
    def abandon(self) -> None:
        super().abandon()
        if self._observations:
            self._steps.release()
        for one in self._observations:
            one.release()

    @override
    def _end_rows(self, stop: int) -> None:
        chosen = slice(self._statistics.first, stop)
        if self._statistics.training and chosen.start < stop:
            mask = self._counted(stop)
            part = None if mask is None else mask[chosen].reshape(-1)
            for one in self._observations:
                present = part
                if one.absent is not None:
                    present = present_in(self._rows[one.absent][chosen].flatten(0, 1), part)
                self._statistics.add(one.key, TensorMoments.of(one.kept(chosen), present))
        self._statistics.first = stop

    @override
    def _keep_last(self, filled: int) -> None:
        for one in self._observations:
            one.keep_next(filled)

    @override
    def _return_moments(
        self, one: DiscountedReturns, returns: Tensor, present: Tensor | None
    ) -> TensorMoments:
        # The rewards of a group's agents share their statistics.
        lead = returns if one.carry.ndim == 1 else returns[..., 0]
        if present is not None:
            present = column(present, lead).expand_as(lead).reshape(-1)
        return TensorMoments.of(returns.reshape(-1, *one.components), present)


# Number of values that are kept before they are counted: on the CPU, so that they stay in the
# cache; on a GPU, where each count takes as long as its calls, to limit the memory.
_KEPT_CPU, _KEPT_GPU = 1 << 18, 1 << 24


class NormalizedRows(NormalizedEntry):
    """Rows of one observation, and the statistics with which it is normalised.

    Args:
        steps: number of rows in a batch.
        kept: number of rows that are counted together; the rows of a batch are divided into parts
            of this size. With 0, a row is counted before its step, without a copy.
        *args: see :class:`NormalizedEntry`.

    Attributes:
        flags: rows of the flags of absent agents before each step; empty if there are none.
    """

    next_row: Tensor
    raw_next: Tensor

    def __init__(self, steps: int, kept: int, *args: Any) -> None:
        super().__init__(*args)
        self.flags: Sequence[Tensor] = ()
        # The step of the last row of a part writes the first row of the next part.
        self._raw = self.next_row.new_empty(min(2 * kept, steps), *self.next_row.shape)
        self._steps, self._size = steps, len(self._raw)
        self._held = self.raw_next
        self._last = self.next_row.clone()
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []

    def begin(self) -> None:
        """Begins a batch."""
        if self._size:
            self._raw[0].copy_(self.raw_next)
        self._held = self.raw_next

    def bind(self, view: StepTensors, start: int, stop: int) -> None:
        """Sets the rows to write to in the steps of a chunk."""
        self._targets = view.following(self.key, start, stop)
        self._sources = [*self._rows(start + 1, stop + 1)] if self._size else []
        if self.absent is not None:
            self.flags = view.rows(self.absent, start, stop)

    def release(self) -> None:
        """Gives up the rows of the batch."""
        self._targets, self._sources, self.flags = [], [], ()

    def _rows(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yields the kept rows of a chunk, in which row ``steps`` is that of the next batch."""
        row, end = start, min(stop, self._steps)
        while row < end:
            first = row % self._size
            part = self._raw[first : first + end - row]
            yield from part.unbind(0)
            row += len(part)
        if stop > self._steps:
            yield self.raw_next

    def keep(self, t: int, values: Tensor) -> None:
        """Keeps the observations with which the next frame begins, until they are counted."""
        if self._size:
            self._sources[t].copy_(values)
        else:
            self._held = values

    def follow(self, t: int, values: Tensor) -> Tensor:
        """Writes normalised values to the row of the next frame, and returns this row."""
        row = self._targets[t]
        self.normalize(values, row)
        return row

    def keep_next(self, row: int) -> None:
        """Keeps the observations with which the next batch begins."""
        if not self._size:
            self.raw_next.copy_(self._held)
        elif row < self._steps:
            self.raw_next.copy_(self._raw[row % self._size])

    def kept(self, chosen: slice) -> Tensor:
        """Returns the observations of some rows of the same part, one after the other."""
        if not self._size:
            return self._held
        first = chosen.start % self._size
        return self._raw[first : first + chosen.stop - chosen.start].flatten(0, 1)

    def normalized_last(self, values: Tensor, ended: Tensor, at_once: bool) -> Tensor:
        """Returns normalised values where ``ended`` is True, and any values elsewhere."""
        last = self._last
        if not at_once:
            self.normalize(values, last)
            return last
        # On the CPU, it is worth finding the rows, because only few episodes end in a step. For a
        # few rows, numpy is faster than torch.
        rows = ended.numpy().nonzero()[0]
        if len(rows):
            chosen = torch.from_numpy(rows)
            found = values.index_select(0, chosen).to(last.dtype)
            self.normalize(found, found)
            # Faster than index_copy_.
            last.index_put_((chosen,), found)
        return last


class NormalizedSteps:
    """Steps of an environment, with normalised observations.

    The observations of a step are normalised in the row of the next frame. The stepper copies them
    from there, and the policy reads them while they are still in the cache.

    Args:
        env: the environment.
        rows: rows of the observations that are normalised.

    Attributes:
        t: number of the step in its chunk.
    """

    t = 0

    def __init__(self, env: TensorSource, rows: Sequence[NormalizedRows]) -> None:
        self._env = env
        index = env.observation_keys.index
        self._places = [(index(one.key), one) for one in rows]
        self._ops = operations(rows[0].next_row)
        # The observations of agents, each with the index of the flag of those that are absent.
        self._absent = [(index(one.key), one, index(one.absent)) for one in rows if one.absent]
        # The leaves of the last step, of the environment and normalised.
        self._last: list[Tensor] = []
        self._shown: list[Tensor] = []

    def release(self) -> None:
        """Gives up the rows of the batch."""
        self._last, self._shown = [], []

    def begin(self, mask: Tensor | None, **kwargs: Any) -> list[Tensor]:
        """Begins episodes, as the environment does, and returns normalised observations."""
        return self._begun(self._env.begin(mask, **kwargs))

    def advance(self, actions: Iterable[Tensor]) -> TensorStep:
        """Takes a step, and returns its results with normalised observations."""
        result = self._env.advance(actions)
        self._last, self._shown = result.last, self._normalized(result.last)
        for index, one, flag in self._absent:
            # An agent that is done after a step, but wasn't before, has a last observation.
            self._ops.clear_absent(self._shown[index], result.last[flag] & one.flags[self.t])
        final = result.final
        if final is not None:
            final = [*final]
            ended = torch.logical_or(result.terminated, result.truncated)
            at_once = self._env.answers_at_once
            for index, one in self._places:
                final[index] = one.normalized_last(final[index], ended, at_once)
        return TensorStep(self._shown, final, *result[2:])

    def begin_next(self, ended: Tensor, cut: Tensor | None = None) -> list[Tensor]:
        """Returns the normalised observations that the next step begins with."""
        leaves = self._env.begin_next(ended, cut)
        if leaves is not self._last:
            return self._begun(leaves)
        self._keep(leaves)
        return self._shown

    def _begun(self, leaves: list[Tensor]) -> list[Tensor]:
        self._keep(leaves)
        found = self._normalized(leaves)
        for index, _, flag in self._absent:
            self._ops.clear_absent(found[index], leaves[flag])
        return found

    def _keep(self, leaves: Sequence[Tensor]) -> None:
        for index, one in self._places:
            one.keep(self.t, leaves[index])

    def _normalized(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        found = [*leaves]
        for index, one in self._places:
            found[index] = one.follow(self.t, found[index])
        return found


def rows_kept(rows: Sequence[Tensor], steps: int, masked: bool) -> int:
    """Returns the number of rows whose observations are counted together.

    Returns 0 if each row is to be counted just before its step, because a row is too large to stay
    in the cache for long. A row that may hold no frame can be counted only after the step.
    """
    on_cpu = rows[0].device.type == "cpu"
    found = (_KEPT_CPU if on_cpu else _KEPT_GPU) // max(1, sum(row.numel() for row in rows))
    if found < 2 and on_cpu and not masked:
        return 0
    return max(1, min(steps, found))
