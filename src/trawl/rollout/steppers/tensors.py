"""Functions that step an environment whose data are tensors, and write the results into rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from trawl.envs.tensor_env import TensorStep
from trawl.keys import (
    DONE,
    IS_INIT,
    MASK,
    STEP_COUNT,
    TERMINATED,
    TRUNCATED,
    Key,
    as_key,
    next_of,
)
from trawl.rollout.batches import StepFn
from trawl.rollout.cuts import is_late, mark_cut
from trawl.rollout.episodes import EpisodeTracker, Follow
from trawl.rollout.inputs import LazyRows
from trawl.rollout.policy.leaves import PolicyLeaves
from trawl.rollout.step_tensors import StepTensors
from trawl.rollout.steppers.arrays import EnvStepper

_COUNTS = STEP_COUNT, next_of(STEP_COUNT)


class StepSource(Protocol):
    """Object that takes the steps: the environment, or an object that changes its results."""

    def begin(self, mask: Tensor | None, **kwargs: Any) -> list[Tensor]:
        """Begins episodes; see :meth:`~trawl.envs.tensor_env.TensorEnv.begin`."""

    def advance(self, actions: Iterable[Tensor]) -> TensorStep:
        """Takes a step; see :meth:`~trawl.envs.tensor_env.TensorEnv.advance`."""

    def begin_next(self, ended: Tensor, cut: Tensor | None = None) -> list[Tensor]:
        """Returns observations; see :meth:`~trawl.envs.tensor_env.TensorEnv.begin_next`."""


class TensorSource(StepSource, Protocol):
    """The part of a :class:`~trawl.envs.tensor_env.TensorEnv` that stepper and stages use."""

    batch_size: torch.Size
    home: torch.device
    observation_keys: list[Key]
    skips: bool

    @property
    def action_keys(self) -> Sequence[Any]:
        """Keys of the actions."""

    @property
    def reward_keys(self) -> Sequence[Any]:
        """Keys of the rewards."""

    @property
    def answers_at_once(self) -> bool:
        """True if code can read a tensor without waiting for a device."""


class TensorStages(Protocol):
    """The part of the stages that steppers of tensors use."""

    def source(self, source: Any) -> Any:
        """Returns an object that takes the steps, and changes their results."""

    def followers(self, start: int, stop: int) -> list[Follow]:
        """Returns what to call after each step, when the next row is written."""


class TensorStepper(EnvStepper[StepTensors]):
    """Steps an environment whose data are tensors, and writes entries of the next frame.

    Args:
        env: the environment.
        limit: number of steps after which an episode is cut off; None for no limit.
        stages: what is done to frames.

    Attributes:
        policy_leaves: entries that the policy writes in rows, to be set before a batch.
        latest: the observations that the last step of the chunk returned for the next frame; None
            before the first step. They are more likely to be in the cache than their copies.
    """

    def __init__(
        self,
        env: TensorSource,
        limit: int | None,
        stages: TensorStages,
    ) -> None:
        self._env = env
        # The object that takes the steps.
        self._source: StepSource = stages.source(env)
        self._limit = limit
        self._stages = stages
        self.policy_leaves = PolicyLeaves({}, [], [])
        self.latest: list[Tensor] | None = None
        self.num_envs = env.batch_size.numel()
        self.root_keys = env.observation_keys
        self._chunk = (0, 0)

    @override
    def reset(self, view: StepTensors, mask: Tensor | None, **kwargs: Any) -> None:
        leaves = self._env.begin(mask, **kwargs)
        for key, leaf in zip(self.root_keys, leaves, strict=True):
            view.next_obs[key].copy_(leaf)

    @override
    def begin_after(self, view: StepTensors, row: int) -> None:
        (start, stop), everywhere = self._chunk, torch.ones_like(view.arrays[MASK][row])
        begun = self._source.begin(None)
        for key, value in zip(self.root_keys, begun, strict=True):
            view.following(key, start, stop)[row - start].copy_(value)
        for write in self._followers(view, start, stop):
            write(row - start, everywhere)

    @override
    def bind(self, view: StepTensors, episodes: EpisodeTracker, start: int, stop: int) -> StepFn:
        self._chunk = start, stop
        env, source, tensors = self._env, self._source, view.arrays
        self.latest = None
        merge = _merge_few if env.answers_at_once else _merge

        def rows(key: Key) -> Sequence[Tensor]:
            return view.rows(key, start, stop)

        count = stop - start
        observed = _each_step([rows(next_of(key)) for key in self.root_keys], count)
        following = _each_step([view.following(key, start, stop) for key in self.root_keys], count)
        actions = _each_step([rows(as_key(key)) for key in env.action_keys], count)
        rewards = _each_step([rows(next_of(as_key(key))) for key in env.reward_keys], count)
        limit = self._limit
        keys = TERMINATED, TRUNCATED, DONE, *(() if limit is None else _COUNTS)
        columns = {key: tensors[key][start:stop, :, 0].unbind(0) for key in keys}
        terminated, truncated, done = (columns[key] for key in keys[:3])
        counts, counted = ((), ()) if limit is None else (columns[key] for key in _COUNTS)
        following_counts = view.following(STEP_COUNT, start, stop) if limit is not None else []
        next_counts = [row[:, 0] for row in following_counts]
        masks = rows(MASK) if env.skips else ()
        follow = self._followers(view, start, stop)

        def step(t: int) -> None:
            result = source.advance(actions[t])
            for row, value in zip(observed[t], result.last, strict=True):
                row.copy_(value)
            for row, value in zip(rewards[t], result.rewards, strict=True):
                row.copy_(value)
            terminated[t].copy_(result.terminated)
            truncated[t].copy_(result.truncated)
            ended = torch.logical_or(result.terminated, result.truncated, out=done[t])
            if result.final is not None:
                merge(observed[t], result.final, ended)
            if result.skipped is not None:
                torch.logical_not(result.skipped, out=masks[t])
            cut = None
            if limit is not None:
                # A copy, because the limit adds to the flags.
                ended = ended.clone()
                steps = torch.add(counts[t], 1, out=counted[t])
                next_counts[t].copy_(steps)
                late = is_late(limit, steps, result.skipped)
                mark_cut(truncated[t], done[t], late)
                cut = late & ~ended
            begun = self.latest = source.begin_next(ended, cut)
            for row, value in zip(following[t], begun, strict=True):
                row.copy_(value)
            if follow:
                starts = _starts(done[t], result)
                for write in follow:
                    write(t, starts)

        return step

    def newest(self, key: Key, rows: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns rows of an entry, or :attr:`latest` instead of them, where it has the entry."""
        if key not in self.root_keys:
            return rows
        index, dtype = self.root_keys.index(key), rows[0].dtype

        def read(t: int) -> Tensor:
            value = rows[t] if self.latest is None else self.latest[index]
            return value if value.dtype is dtype else rows[t]

        return LazyRows(read, len(rows))

    def _followers(self, view: StepTensors, start: int, stop: int) -> list[Follow]:
        found: list[Follow] = []
        if IS_INIT in view.next_obs and next_of(IS_INIT) in view.arrays:
            found.append(_marked(view.following(IS_INIT, start, stop)))
        zeroed = self.policy_leaves.states + ([STEP_COUNT] if self._limit is not None else [])
        carried = [view.following(key, start, stop) for key in zeroed]
        carried += [[view.next_obs[key]] * (stop - start) for key in self.policy_leaves.memories]
        found += map(_emptied, carried)
        return found + self._stages.followers(start, stop)


def _each_step(found: Sequence[Sequence[Tensor]], count: int) -> list[tuple[Tensor, ...]]:
    """Returns the rows of several entries for each of ``count`` steps."""
    return list(zip(*found, strict=True)) or [()] * count


def _merge(rows: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor) -> None:
    """Writes values where the mask is True, without asking the device whether it is anywhere."""
    for row, value in zip(rows, values, strict=True):
        chosen = mask.view(-1, *[1] * (row.ndim - 1))
        row.copy_(torch.where(chosen, value.to(row.dtype), row))


def _merge_few(rows: Sequence[Tensor], values: Sequence[Tensor], mask: Tensor) -> None:
    """Writes values where the mask is True, on the CPU."""
    # For a few rows, numpy is faster than torch.
    found = mask.numpy().nonzero()[0]
    if not len(found):
        return
    for row, value in zip(rows, values, strict=True):
        if row.dtype is value.dtype and row.dtype is not torch.bfloat16:
            row.numpy()[found] = value.detach().numpy()[found]
        else:
            chosen = torch.from_numpy(found)
            row.index_copy_(0, chosen, value.index_select(0, chosen).to(row.dtype))


def _starts(done: Tensor, result: TensorStep) -> Tensor:
    """Returns True where the next row is the first of an episode."""
    return done if result.skipped is None else done | result.skipped


def _emptied(targets: list[Tensor]) -> Follow:
    """Returns a function that zeroes what the policy has written where an episode begins."""

    def write(t: int, starts: Tensor) -> None:
        target = targets[t]
        target.masked_fill_(starts.view(-1, *[1] * (target.ndim - 1)), 0)

    return write


def _marked(targets: list[Tensor]) -> Follow:
    rows = [target[:, 0] for target in targets]

    def write(t: int, starts: Tensor) -> None:
        rows[t].copy_(starts)

    return write
