"""Batches of environments whose data are tensors, filled on the device of the data.

Nothing in the loop waits for the device. Once per batch, the rewards and the flags are copied to
the host, for trajectory ids, statistics and checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

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
    show_key,
)
from trawl.memory import Mask
from trawl.rollout.batch_writer import ActFn, BatchOptions, StepFn
from trawl.rollout.block import Block
from trawl.rollout.checks import check_rewards
from trawl.rollout.fixed_layout_writer import FixedLayoutWriter
from trawl.rollout.layout import Layout, Leaf
from trawl.rollout.policy import Policy
from trawl.rollout.policy_binder import PolicyBinder
from trawl.rollout.policy_leaves import PolicyLeaves, discover_leaves
from trawl.rollout.tensor_block import TensorBlock, TensorPool
from trawl.rollout.tensor_env_restarts import RestartingTensorStepper
from trawl.rollout.tensor_episodes import BatchEpisodeTracker
from trawl.rollout.tensor_normalizer import TensorBatchNormalizer, TensorNormalizer
from trawl.rollout.tensor_stepper import TensorStepper
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
        self._normalizer = self._new_normalizer()
        self.normalization = self._normalizer.normalization
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

    def _new_normalizer(self) -> TensorNormalizer:
        options = self.options
        if not options.normalize:
            return TensorNormalizer(self.env)
        return TensorBatchNormalizer(
            self.env, options.normalize, self.entries, self._next, options.steps
        )

    @property
    def _readable(self) -> Mapping[Key, Leaf]:
        """The entries that exist before the policy acts, as the policy reads them."""
        return self.entries.roots

    def _discover(self) -> PolicyLeaves:
        """Calls the policy once to find out what it writes."""
        root = TensorDict({}, self.env.batch_size, device=self.env.device)
        for key, row in self._next.items():
            root.set(key, self._as_read(key, row))
        return discover_leaves(self.env, self.policy, root, self._readable)

    def _as_read(self, key: Key, row: Tensor) -> Tensor:
        """Returns a copy of the row after a batch, as the policy reads it."""
        return row.clone()

    def _new_layout(self) -> Layout:
        leaves = self.entries.leaves(self._policy_leaves, self._normalizer.more_leaves)
        size = tuple(self.env.batch_size)
        return Layout(leaves, size, self.options.steps, agents=self.env.agents)

    def _new_stepper(self) -> TensorStepper:
        limit, restarts = self.options.limit, self.options.restarts
        parts = self.env, self._normalizer.source, limit, self._policy_leaves, self._next
        return (
            TensorStepper(*parts) if restarts is None else RestartingTensorStepper(*parts, restarts)
        )

    def _zeros(self, leaf: Leaf) -> Tensor:
        shape = (self.num_envs, *leaf.shape)
        return torch.zeros(shape, dtype=leaf.dtype, device=self.env.home)

    def _begin_episodes(self, mask: Tensor | None, **kwargs: Any) -> None:
        """Begins episodes in all environments, or in those of the mask, in the next batch."""
        leaves = self.env.begin(mask, **kwargs)
        first_rows = self._next | self._normalizer.raw_next
        for key, leaf in zip(self.env.observation_keys, leaves, strict=True):
            first_rows[key].copy_(leaf)
        self._normalizer.reset(mask)
        rows = slice(None) if mask is None else mask
        for key, row in self._next.items():
            if key not in self.env.observation_keys:
                row[rows] = key == IS_INIT

    # --- filling

    @override
    def begin(self, block: Block | None = None) -> None:
        self._given = block
        self._block = self._new_block()
        self._block.newest = self._stepper.newest
        tensors = self._block.tensors
        for key in self.entries.flags:
            tensors[key].zero_()
        if self.entries.masked:
            tensors[MASK].fill_(True)
        if self.entries.marks_starts:
            tensors[next_of(IS_INIT)].zero_()
        self._normalizer.begin(tensors, self.most_frames)
        for key, row in self._next.items():
            if key not in self._policy_leaves.memories:
                tensors[key][0].copy_(row)

    def _new_block(self) -> TensorBlock:
        """Returns memory for a batch."""
        return self.pool.lease()

    @override
    def bind(self, start: int, stop: int, random: bool) -> tuple[ActFn | None, StepFn]:
        act = self._binder.bind(self._block, start, stop, random)
        step = self._stepper.bind(self._block, start, stop)
        return act, self._normalizer.bind(step, self._block, start, stop)

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
        self._normalizer.finish(filled)
        return self._finished(block, filled, given)

    def _finished(self, block: TensorBlock, filled: int, given: Block | None) -> Any:
        """Returns the batch, or None if it has been copied to the block ``given``."""
        if given is None:
            return self._deliver(block)
        # A worker's batch is in memory of the host, which it shares with the driver.
        for key, rows in block.tensors.items():
            given.lease.tensors[key].copy_(rows.transpose(0, 1))
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

    @override
    def _saved_rows(self) -> dict[str, Tensor]:
        rows = {show_key(key): row for key, row in self._next.items()}
        return rows | self._normalizer.saved_rows()

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
