"""Batches of environments whose data are tensors, filled on the device of the data.

Nothing in the loop waits for the device. Once per batch, the rewards and the flags are copied to
the host, for trajectory ids, statistics and checks.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from trawl.envs.tensor_env import TensorEnv
from trawl.keys import NO_TRAJECTORY, TRAJ_IDS, Key
from trawl.memory import Mask
from trawl.rollout.batches import ActFn, BatchOptions, StepFn
from trawl.rollout.block import Block
from trawl.rollout.episodes import BatchEpisodeTracker
from trawl.rollout.layout import Layout, Leaf
from trawl.rollout.policy.binder import PolicyBinder
from trawl.rollout.policy.policy import Policy
from trawl.rollout.step_tensors import StepTensors, TensorPool, TensorRows
from trawl.rollout.steppers.guard import GuardedStepper
from trawl.rollout.steppers.tensors import TensorStepper
from trawl.rollout.writers.fixed_layout import FixedLayoutWriter
from trawl.supported import LIMIT_ALL_AT_ONCE


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

    _path = "tensor"
    _kind = "tensors"
    env: TensorEnv
    episodes: BatchEpisodeTracker

    def __init__(self, env: TensorEnv, policy: Policy, options: BatchOptions) -> None:
        _check_limit(env, options.limit)
        restarts = options.restarts
        super().__init__(env, policy, options, env.skips or restarts is not None)
        self.episodes = BatchEpisodeTracker(self.num_envs)
        next_rows = {key: self._zeros(leaf) for key, leaf in self.entries.roots.items()}
        self._staged = self._new_rows(next_rows, home=env.home, at_once=env.answers_at_once)
        self._steps = TensorStepper(env, options.limit, self._staged.stages)
        self.stepper = self._steps
        if restarts is not None:
            self.stepper = GuardedStepper(env, lambda: self._steps, restarts)
        self._begin_episodes(None)
        leaves = self._policy_leaves = self._steps.policy_leaves = self._discover()
        for key, leaf in leaves.read_later.items():
            self._staged.next[key] = self._zeros(leaf)
        plain = self._new_layout()
        layout = Layout(plain.leaves, plain.batch, plain.steps, plain.pools, agents=env.agents)
        self.pool = TensorPool(layout, env.home, options.recycle)
        self._binder = PolicyBinder(env, policy, leaves, self._readable, self._staged.next)

    def _zeros(self, leaf: Leaf) -> Tensor:
        shape = (self.num_envs, *leaf.shape)
        return torch.zeros(shape, dtype=leaf.dtype, device=self.env.home)

    # --- filling

    @override
    def _new_block(self) -> Block:
        return Block(self.layout, self.pool.lease())

    @override
    def _view_of(self, block: Block | None, next_rows: dict[Key, Tensor]) -> StepTensors:
        return StepTensors({} if block is None else block.tensors, next_rows)

    @override
    def bind(self, start: int, stop: int, random: bool) -> tuple[ActFn | None, StepFn]:
        staged = self._staged
        view = staged.view
        rows = TensorRows(staged.block, view, self._steps.newest)
        act = self._binder.bind(rows, start, stop, random)
        step = self.stepper.bind(view, self.episodes, start, stop)
        return act, staged.bind(step, start, stop)

    @override
    def abandon(self) -> None:
        super().abandon()
        self._steps.latest = None

    @override
    def _end_steps(self, block: Block, filled: int) -> None:
        self.env.check()
        self._binder.check()

    @override
    def _number(self, block: Block, done: Mask, counted: Mask | None) -> None:
        target, filled = block.tensors.get(TRAJ_IDS), len(done)
        skipped = None if counted is None else ~counted
        if target is None or target.device.type != "cpu":
            ids = torch.from_numpy(self.episodes.number(done, skipped))
            if target is not None:
                target[:filled].copy_(ids)
        else:
            self.episodes.write(target[:filled].numpy(), done, skipped)
        if target is not None:
            target[filled:] = NO_TRAJECTORY

    # --- between batches

    @override
    def _begin_episodes(self, mask: NDArray[Any] | None, **kwargs: Any) -> None:
        chosen = None if mask is None else torch.from_numpy(mask).to(self.env.home)
        super()._begin_episodes(chosen, **kwargs)


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
