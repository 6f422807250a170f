"""Normalisation of the observations and rewards of batches whose data are tensors.

The stepper steps a :class:`~trawl.rollout.normalized_steps.NormalizedSteps` instead of the
environment. The rewards are normalised when a batch is finished. Nothing in the loop waits for the
device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from trawl.envs.tensor_env import TensorEnv
from trawl.keys import DONE, MASK, Key
from trawl.rollout.batch_statistics import (
    BatchStatistics,
    DiscountedReturns,
    observation_keys,
    raw_reward_of,
)
from trawl.rollout.batch_writer import StepFn
from trawl.rollout.frame_entries import FrameEntries
from trawl.rollout.frame_normalizer import FrameNormalizer
from trawl.rollout.moments import RunningMoments
from trawl.rollout.normalization import NormalizeOptions, Statistics, clip_within
from trawl.rollout.normalized_steps import NormalizedRows, NormalizedSteps, rows_kept
from trawl.rollout.tensor_block import TensorBlock
from trawl.rollout.tensor_moments import TensorMoments
from trawl.rollout.tensor_stepper import StepSource


class TensorNormalizer(FrameNormalizer[Tensor, TensorBlock]):
    """Normalises the batches of a ``TensorBatchWriter``.

    Except for rounding, the results equal those of
    :class:`~trawl.rollout.array_normalizer.ArrayNormalizer`.

    Args:
        env: the environment.
        options: options of everything that is normalised.
        entries: the entries of frames.
        next_row: for each entry of the next frame, the row after a batch's last row.
        steps: number of rows in a batch.

    Attributes:
        source: the object that the stepper steps.

    Raises:
        KeyError, ValueError: see :func:`~trawl.rollout.batch_statistics.observation_keys`.
    """

    def __init__(
        self,
        env: TensorEnv,
        options: NormalizeOptions,
        entries: FrameEntries,
        next_row: Mapping[Key, Tensor],
        steps: int,
    ) -> None:
        self.source: StepSource = env
        self._options = options
        self._home = env.home
        self._observations: list[NormalizedRows] = []
        self._rewards: list[DiscountedReturns] = []
        count = env.batch_size.numel()
        if options.observations is not None:
            clip = options.observations.clip
            keys = observation_keys(options.observations, entries.observed)
            self._kept = rows_kept([next_row[key] for key in keys], steps, entries.masked)
            self._observations = [
                NormalizedRows(key, next_row[key], steps, self._kept, clip) for key in keys
            ]
            places = [(env.observation_keys.index(one.key), one) for one in self._observations]
            self._steps = NormalizedSteps(env, places)
            self.source = self._steps
        if options.rewards is not None:
            self._rewards = [
                DiscountedReturns(
                    key,
                    options.rewards,
                    torch.zeros(count, *leaf.shape, dtype=torch.float64, device=env.home),
                    torch.add,
                    torch.mul,
                )
                for key, leaf in entries.rewards.items()
            ]
        self._statistics = BatchStatistics(options, self._empty(), count, self._on_device)
        self.normalization = self._statistics.normalization
        self._fresh = torch.ones(count, dtype=torch.bool, device=env.home)
        self._rows: Mapping[Key, Tensor] = {}

    def _on_device(self, moments: RunningMoments) -> TensorMoments:
        return TensorMoments.on(self._home, moments)

    def _empty(self) -> Statistics:
        found = {one.key: RunningMoments.empty(one.leaf) for one in self._observations}
        return found | {one.key: RunningMoments.empty() for one in self._rewards}

    # --- between batches

    @override
    def restart(self, mask: Tensor | None) -> None:
        chosen = torch.ones_like(self._fresh) if mask is None else mask
        self._fresh |= chosen
        for one in self._rewards:
            one.carry.masked_fill_(_column(chosen, one.carry), 0.0)
        self._statistics.load()
        self._load()
        self._normalize_fresh()

    def _normalize_fresh(self) -> None:
        for one in self._observations:
            values = torch.empty_like(one.next_row)
            one.normalize(one.raw_next, values)
            mask = _column(self._fresh, values)
            torch.where(mask, values, one.next_row, out=one.next_row)

    # --- a batch

    @override
    def renew(self, most_frames: float, in_groups: bool) -> Tensor | None:
        self._statistics.most_frames = most_frames
        self._statistics.begin(in_groups)
        self._load()
        if self._home.type == "cpu" and not self._fresh.any():
            return None
        self._normalize_fresh()
        fresh = self._fresh.clone()
        self._fresh.zero_()
        return fresh

    @override
    def begin(self, block: TensorBlock, view: TensorBlock) -> TensorBlock:
        self._rows = view.tensors
        for one in self._observations:
            one.begin()
        return view

    @override
    def bind(self, step: StepFn, view: TensorBlock, part: slice, start: int, stop: int) -> StepFn:
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

    def _end_rows(self, stop: int) -> None:
        """Counts the frames up to a row."""
        chosen = slice(self._statistics.first, stop)
        if self._statistics.training and chosen.start < stop:
            mask = self._counted(stop)
            part = None if mask is None else mask[chosen].reshape(-1)
            for one in self._observations:
                self._statistics.add(one.key, TensorMoments.of(one.kept(chosen), part))
        self._statistics.first = stop

    @override
    def finish(self, block: TensorBlock, filled: int) -> None:
        if filled:
            self._end_rows(filled)
            self._finish_rewards(filled)
        for one in self._observations:
            one.keep_next(filled)
        self._rows = {}
        self._statistics.finish()

    def _finish_rewards(self, filled: int) -> None:
        tensors, statistics, counted = self._rows, self._statistics, self._counted(filled)
        goes_on = ~tensors[DONE][:filled, :, 0]
        if MASK in tensors:
            # Another episode follows a row without a frame.
            goes_on = goes_on & tensors[MASK][:filled]
        keep = goes_on.double()
        for one in self._rewards:
            rewards, options = tensors[one.key][:filled], one.options
            if options.keep_raw:
                tensors[raw_reward_of(one.key)][:filled] = rewards
            returns = rewards.double()
            one.add(returns, _column(keep * options.gamma, rewards))
            if statistics.training:
                # The rewards of a group's agents share their statistics.
                agents = returns[0, 0].numel()
                mask = None if counted is None else counted.reshape(-1, 1).expand(-1, agents)
                samples = returns.reshape(-1)
                moments = TensorMoments.of(samples, None if mask is None else mask.reshape(-1))
                statistics.add(one.key, moments)
            largest = torch.finfo(rewards.dtype).max
            _, scale = statistics.of(one.key).affine(options.epsilon, largest)
            clip = clip_within(options.clip, largest)
            rewards.mul_(scale.to(rewards.dtype)).clamp_(-clip, clip)


def _column(rows: Tensor, like: Tensor) -> Tensor:
    """Returns values of rows in a shape that broadcasts to that of a tensor."""
    return rows.reshape(*rows.shape, *[1] * (like.ndim - rows.ndim))
