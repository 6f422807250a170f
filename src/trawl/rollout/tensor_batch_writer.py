"""Batches of environments whose data are tensors, filled on the device of the data.

Nothing in the loop waits for the device. Once per batch, the rewards and the flags are copied to
the host, for trajectory ids, statistics and checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.envs.agent_groups import groups_of
from trawl.envs.tensor_env import TensorEnv
from trawl.keys import (
    DONE,
    IS_INIT,
    MASK,
    NO_TRAJECTORY,
    TRAJ_IDS,
    Key,
    as_key,
    next_of,
)
from trawl.memory import Mask
from trawl.rollout.batch_writer import ActFn, BatchOptions, StepFn
from trawl.rollout.block import Block
from trawl.rollout.checks import check_rewards
from trawl.rollout.device_transfer import moved
from trawl.rollout.episodes import BatchEpisodeTracker
from trawl.rollout.fixed_layout_writer import FixedLayoutWriter
from trawl.rollout.frame_normalizer import observation_keys
from trawl.rollout.layout import Layout, Leaf, pool_key
from trawl.rollout.policy import Policy
from trawl.rollout.policy_binder import PolicyBinder
from trawl.rollout.stage import Stage
from trawl.rollout.tensor_block import TensorBlock, TensorPool
from trawl.rollout.tensor_env_restarts import RestartingTensorStepper
from trawl.rollout.tensor_normalizer import TensorNormalizer
from trawl.rollout.tensor_stacks import TensorStacks
from trawl.rollout.tensor_stepper import StepSource, TensorStepper
from trawl.supported import LIMIT_ALL_AT_ONCE
from trawl.tensordicts import size_groups


class TensorBatchWriter(FixedLayoutWriter):
    """Fills batches with the frames of an environment whose data are tensors.

    Args:
        env: the environment; the constructor resets it.
        policy: the policy; the constructor calls it once to find out what it writes.
        options: options of the batches.

    Raises:
        NoFixedLayout: if the entries that the policy writes have no fixed layout.
        ValueError: if an option needs resets that the environment can't make.
    """

    env: TensorEnv

    def __init__(self, env: TensorEnv, policy: Policy, options: BatchOptions) -> None:
        _check_limit(env, options.limit)
        super().__init__(env, policy, options, env.skips or options.restarts is not None)
        self.episodes = BatchEpisodeTracker(self.num_envs)
        # The entries that the next batch begins with.
        self._next = {key: self._zeros(leaf) for key, leaf in self.entries.roots.items()}
        # The object that takes the steps.
        self._source: StepSource = env
        self._stages = self._new_stages()
        self._begin_episodes(None)
        self._policy_leaves = self._discover()
        for key, leaf in self._policy_leaves.read_later.items():
            self._next[key] = self._zeros(leaf)
        self._layout = self._new_layout()
        self.pool = TensorPool(self._layout, env.home, options.recycle)
        self._stepper = self._new_stepper()
        self._binder = PolicyBinder(env, policy, self._policy_leaves, self._readable, self._next)
        self._block = TensorBlock({})
        self._given: Block | None = None

    def _new_stages(self) -> list[Stage[Tensor, TensorBlock]]:
        """Returns what is done to frames, in the order in which they pass."""
        env, options, entries = self.env, self.options, self.entries
        stages: list[Stage[Tensor, TensorBlock]] = []
        if options.normalize:
            chosen = options.normalize.observations
            keys = [] if chosen is None else observation_keys(chosen, entries.observed)
            rewards, masked = entries.rewards, entries.masked
            normalizer = TensorNormalizer(
                env, options.normalize, keys, rewards, masked, self._next, options.steps
            )
            self._source, self.normalization = normalizer.source, normalizer.normalization
            stages.append(normalizer)
        if options.frame_stack is not None:
            observed, newest, groups = entries.observed, self._next, groups_of(env)
            stack = TensorStacks(options.frame_stack, env, groups, observed, newest, options.steps)
            stages.append(stack)
        return stages

    @override
    def _new_layout(self) -> Layout:
        plain = super()._new_layout()
        return Layout(plain.leaves, plain.batch, plain.steps, plain.pools, agents=self.env.agents)

    def _new_stepper(self) -> TensorStepper:
        limit, restarts = self.options.limit, self.options.restarts
        parts = self.env, self._source, limit, self._policy_leaves, self._next
        return (
            TensorStepper(*parts) if restarts is None else RestartingTensorStepper(*parts, restarts)
        )

    def _zeros(self, leaf: Leaf) -> Tensor:
        shape = (self.num_envs, *leaf.shape)
        return torch.zeros(shape, dtype=leaf.dtype, device=self.env.home)

    def _begin_episodes(self, mask: Tensor | None, **kwargs: Any) -> None:
        """Begins episodes in all environments, or in those of the mask, in the next batch."""
        leaves = self.env.begin(mask, **kwargs)
        first_rows: Mapping[Key, Tensor] = self._next
        for stage in reversed(self._stages):
            first_rows = stage.first_rows(first_rows)
        for key, leaf in zip(self.env.observation_keys, leaves, strict=True):
            first_rows[key].copy_(leaf)
        for stage in self._stages:
            stage.restart(mask)
        rows = slice(None) if mask is None else mask
        for key, row in self._next.items():
            if key not in self.env.observation_keys:
                row[rows] = key == IS_INIT

    # --- filling

    @override
    def begin(self, block: Block | None = None) -> None:
        self._given = block
        self._renew_stages()
        self._block = self.pool.lease()
        self._block.newest = self._stepper.newest
        for stage in reversed(self._stages):
            stage.begin(self._block, self._block)
        tensors = self._block.tensors
        for key in self.entries.flags:
            tensors[key].zero_()
        if self.entries.masked:
            tensors[MASK].fill_(True)
        if self.entries.marks_starts:
            tensors[next_of(IS_INIT)].zero_()
        for key, row in self._next.items():
            if key not in self._policy_leaves.memories:
                tensors[key][0].copy_(row)

    @override
    def bind(self, start: int, stop: int, random: bool) -> tuple[ActFn | None, StepFn]:
        act = self._binder.bind(self._block, start, stop, random)
        step = self._stepper.bind(self._block, start, stop)
        for stage in self._stages:
            step = stage.bind(step, self._block, slice(0, self.num_envs), start, stop)
        return act, step

    @override
    def finish(self, filled: int) -> TensorDictBase | None:
        block, self._block = self._block, TensorBlock({})
        given, self._given = self._given, None
        tensors = block.tensors
        if filled < self.options.steps:
            for key, row in self._next.items():
                if key not in self._policy_leaves.memories:
                    row.copy_(tensors[key][filled])
            for rows in tensors.values():
                rows[filled:] = 0
        self.env.check()
        self._binder.check()
        self._number(tensors, filled)
        for stage in self._stages:
            stage.finish(block, filled)
        if given is None:
            return self._deliver(block)
        if block.grown:
            return moved(self._deliver(block), torch.device("cpu"))
        # A worker's batch is in memory of the host, which it shares with the driver.
        for key, rows in block.tensors.items():
            given.lease.tensors[key].copy_(rows.transpose(0, 1))
        for key, frames in block.pools.items():
            start, found = given.lease.pool_starts.get(key, 0), given.lease.tensors
            found[pool_key(key)][start : start + len(frames)].copy_(frames)
            for name in (key, next_of(key)):
                found[name].add_(start)
        return None

    def _number(self, tensors: Mapping[Key, Tensor], filled: int) -> None:
        """Writes trajectory ids, checks the rewards, and adds them to the statistics."""
        if filled:
            self.policy.check_samples(tensors, filled)
        rewards = self._rewards(tensors, filled)
        done = tensors[DONE][:filled, :, 0].cpu().numpy()
        counted = tensors[MASK][:filled].cpu().numpy() if self.entries.masked else None
        check_rewards(rewards, lambda: self._actions(tensors, filled))
        self.sums.add(rewards, done, counted)
        self._write_ids(tensors, done, None if counted is None else ~counted)

    def _write_ids(self, tensors: Mapping[Key, Tensor], done: Mask, skipped: Mask | None) -> None:
        target, filled, cut = tensors.get(TRAJ_IDS), len(done), False
        if isinstance(self._stepper, RestartingTensorStepper):
            cut, self._stepper.cut = self._stepper.cut, False
        if target is None or target.device.type != "cpu":
            ids = torch.from_numpy(self.episodes.number(done, skipped, cut))
            if target is not None:
                target[:filled].copy_(ids)
        else:
            self.episodes.write(target[:filled].numpy(), done, skipped, cut)
        if target is not None:
            target[filled:] = NO_TRAJECTORY

    def _rewards(self, tensors: Mapping[Key, Tensor], filled: int) -> NDArray[Any]:
        """Returns the rewards of the environments; those of several agents are averaged."""
        lead = (filled, self.num_envs, -1)
        parts = [tensors[key][:filled].reshape(lead) for key in self.entries.rewards]
        if len(parts) == 1 and parts[0].shape[-1] == 1:
            return parts[0][..., 0].cpu().numpy()
        return torch.cat(parts, -1).double().mean(-1).cpu().numpy()

    def _actions(self, tensors: Mapping[Key, Tensor], filled: int) -> dict[Key, NDArray[Any]]:
        keys = map(as_key, self.env.action_keys)
        return {key: tensors[key][:filled].cpu().float().numpy() for key in keys}

    @property
    @override
    def layout(self) -> Layout:
        return self._layout

    # --- between batches

    @override
    def reset(self, mask: NDArray[Any] | None = None, **kwargs: Any) -> None:
        chosen = None if mask is None else torch.from_numpy(mask).to(self.env.home)
        self._begin_episodes(chosen, **kwargs)
        self.sums.reset(mask)
        self.episodes.renew(mask)

    def fake(self) -> TensorDictBase:
        """Returns a batch of zeros with the layout of a real one."""
        block = self.pool.lease()
        block.clear()
        return self._deliver(block)

    def _deliver(self, block: TensorBlock) -> TensorDictBase:
        size = (self.num_envs, self.options.steps)
        batch = block.deliver(self.hidden, size, self.env.device)
        size_groups(batch, self.env.agents)
        return batch

    @override
    def describe(self) -> dict[str, Any]:
        return {"env_path": "tensor", **self.policy.describe(), **self.pool.describe()}


def _check_limit(env: TensorEnv, limit: int | None) -> None:
    if limit is not None and not env.can_restart:
        raise LIMIT_ALL_AT_ONCE.error(
            "max_frames_per_traj",
            limit,
            against=env.name,
            instead=(
                "if its reset takes a mask or ids, state it: TorchVectorEnv(env, "
                "partial_reset='mask')"
            ),
        )
