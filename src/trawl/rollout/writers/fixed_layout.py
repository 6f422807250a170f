"""Batches of fixed layout: the environment and the policy write directly into one block."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from trawl.envs.agents.groups import groups_of
from trawl.envs.base import TensorDictEnv
from trawl.keys import DONE, DONE_KEYS, IS_INIT, MASK, STEP_COUNT, TRAJ_IDS, Key, as_key, next_of
from trawl.memory import Array, Mask
from trawl.rollout.batches import BatchOptions
from trawl.rollout.block import BatchMemory, Block
from trawl.rollout.checks import check_rewards
from trawl.rollout.episode_sums import EpisodeSums
from trawl.rollout.layout import FLAG, Layout, Leaf
from trawl.rollout.ops import write
from trawl.rollout.policy.device_transfer import moved
from trawl.rollout.policy.leaves import PolicyLeaves, discover_leaves
from trawl.rollout.policy.policy import Policy
from trawl.rollout.stages.stage import RowKind, StageSetup
from trawl.rollout.stages.staged_rows import StagedRows
from trawl.rollout.steppers.arrays import Stepper
from trawl.rollout.writers.batch_writer import BatchWriter

#: Layout of a flag that belongs to an environment, not to one of its agents.
_FLAGS: Mapping[Key, Leaf] = {(name,): FLAG for name in DONE_KEYS}
_NOTHING: Mapping[Key, Leaf] = MappingProxyType({})


class FrameEntries:
    """Entries of the frames in a batch, by key.

    Args:
        env: the environment.
        policy: the policy.
        options: options of the batches.
        masked: True if some rows of a batch hold no frame.

    Attributes:
        observed: the observations.
        flags: the flags that mark the end of an episode. Several agents have flags of their own.
        shown: the entries that an environment shows after each step and reset: the observations,
            and the flags of agents, because those who are absent stay done.
        rewards: the rewards, under ``"next"``. Several agents may have rewards of their own.
        roots: the entries that exist before the policy acts.
        hidden: keys of entries that are left out of batches. They are flags that the environment
            doesn't have and, with ``compact``, entries that repeat.
        marks_starts: True if frames have the flag ``is_init``, and the environment does not write
            it.
        masked: True if frames have a mask.
    """

    def __init__(
        self, env: TensorDictEnv, policy: Policy, options: BatchOptions, masked: bool
    ) -> None:
        axes = len(env.batch_size)
        self.masked = masked
        self.observed = _leaves(env.full_observation_spec, axes)
        shown = _leaves(env.full_done_spec, axes)
        # Every episode ends by these flags, even if the environment does not have all of them.
        self.flags = {**_FLAGS, **shown}
        of_agents = {key: leaf for key, leaf in shown.items() if len(key) > 1}
        self.shown = {**self.observed, **of_agents}
        rewards = _leaves(env.full_reward_spec, axes)
        self.rewards = {next_of(key): leaf for key, leaf in rewards.items()}
        self.marks_starts = (
            options.marks_starts(policy.reads_is_init) and IS_INIT not in self.observed
        )
        self.roots = {**self.observed, **self.flags}
        if options.limit is not None:
            self.roots[STEP_COUNT] = Leaf((1,), torch.int64)
        if self.marks_starts:
            self.roots[IS_INIT] = FLAG
        self._has_ids = options.track_traj_ids
        unshown = set() if options.truncates else set(self.flags) - set(shown)
        repeated = set(self.roots) - set(self.flags) if options.compact else set()
        self.hidden = frozenset([*unshown, *map(next_of, repeated | unshown)])

    def leaves(self, policy: PolicyLeaves, more: Mapping[Key, Leaf] = _NOTHING) -> dict[Key, Leaf]:
        """Returns the layout of a frame.

        Args:
            policy: entries that the policy writes.
            more: further entries.
        """
        found = {
            **self.roots,
            **policy.root_states,
            **policy.written,
            **{next_of(key): leaf for key, leaf in self.roots.items()},
            **self.rewards,
            **more,
        }
        if self._has_ids:
            found[TRAJ_IDS] = Leaf((), torch.int64)
        if self.masked:
            found[MASK] = Leaf((), torch.bool)
        return found


class FixedLayoutWriter(BatchWriter):
    """Fills batches with frames of a fixed layout.

    Args:
        env: the environment.
        policy: the policy.
        options: options of the batches.
        masked: True if some rows of a batch hold no frame.

    Attributes:
        options: options of the batches.
        entries: the entries of frames.
        stepper: object that steps the environment.
        pool: memory of batches.
    """

    # Name of the way to fill batches, for ``stats()``, and kind of the rows.
    _path: ClassVar[str]
    _kind: ClassVar[RowKind]
    stepper: Stepper[Any]
    pool: BatchMemory
    _staged: StagedRows
    _policy_leaves: PolicyLeaves
    # The block in which a worker's batch is wanted.
    _given: Block | None = None

    def __init__(
        self, env: TensorDictEnv, policy: Policy, options: BatchOptions, masked: bool
    ) -> None:
        self.env = env
        self.policy = policy
        self.options = options
        self.warnings: Sequence[str] = ()
        self.num_envs = env.batch_size.numel()
        self.sums = EpisodeSums(self.num_envs)
        self.entries = FrameEntries(env, policy, options, masked)

    @property
    @override
    def hidden(self) -> frozenset[Key]:
        return self.entries.hidden

    def _new_rows(self, next_rows: dict[Key, Any], **place: Any) -> StagedRows:
        """Returns the rows of batches, and the stages.

        Args:
            next_rows: the entries that a step passes on to the next step, by key.
            **place: further fields of :class:`~trawl.rollout.stages.stage.StageSetup`.
        """
        env, entries = self.env, self.entries
        observed, groups, batch = entries.observed, groups_of(env), tuple(env.batch_size)
        parts = observed, observed, entries.rewards, groups, batch, next_rows, entries.masked
        staged = StagedRows(StageSetup(self.options, self._kind, *parts, **place))
        self.normalization = staged.stages.normalization
        return staged

    # --- layout

    @property
    def _readable(self) -> Mapping[Key, Leaf]:
        """The entries that exist before the policy acts, as the policy reads them."""
        return self._staged.stages.readable(self.entries.roots)

    def _discover(self) -> PolicyLeaves:
        """Calls the policy once to find out what it writes."""
        batch = tuple(self.env.batch_size)
        root = TensorDict({}, batch, device=self.env.device)
        for key, leaf in self._readable.items():
            first = self._staged.first_read(key)
            if first is None:
                first = torch.zeros((self.num_envs, *leaf.shape), dtype=leaf.dtype)
            root.set(key, first.reshape((*batch, *leaf.shape)))
        leaves = discover_leaves(self.env, self.policy, root, self._readable)
        self._staged.stages.check_policy(leaves)
        return leaves

    def _new_layout(self) -> Layout:
        stages = self._staged.stages
        leaves = stages.in_batch(self.entries.leaves(self._policy_leaves, stages.more_leaves))
        return Layout(leaves, tuple(self.env.batch_size), self.options.steps, stages.pools)

    @property
    @override
    def layout(self) -> Layout:
        return self.pool.layout

    # --- filling

    @override
    def begin(self, block: Block | None = None) -> None:
        staged = self._staged
        staged.stages.renew(self.most_frames, self.in_groups)
        self._given = block
        block = self._new_block()
        staged.begin(block, self._view_of(block, staged.next))
        self._begin_rows()

    def _begin_rows(self) -> None:
        """Fills the rows with what they have before the first step."""
        view, entries = self._staged.view, self.entries
        arrays, next_rows = view.arrays, view.next_obs
        for key in entries.flags:
            write(arrays[key], False)
            write(arrays[next_of(key)], False)
        if entries.masked:
            write(arrays[MASK], True)
        self._staged.pass_on(self._passed_on)
        for key in entries.flags.keys() & next_rows.keys():
            write(next_rows[key], False)
        if entries.marks_starts:
            for rows in (arrays[IS_INIT][1:], arrays[next_of(IS_INIT)], next_rows[IS_INIT]):
                write(rows, False)

    @abstractmethod
    def _new_block(self) -> Block:
        """Returns memory to fill."""

    @abstractmethod
    def _view_of(self, block: Block | None, next_rows: dict[Key, Any]) -> Any:
        """Returns what a stepper writes: the rows of a block, and those after the last step."""

    @property
    def _passed_on(self) -> list[Key]:
        """Keys of entries of which a batch has the values that a step passes on to the next."""
        memories = self._policy_leaves.memories
        return [key for key in self._staged.next if key not in memories]

    @override
    def finish(self, filled: int) -> TensorDictBase | None:
        staged = self._staged
        self._end_steps(staged.block, filled)
        staged.keep(self._passed_on, filled)
        self._count(staged.block, filled)
        block = staged.finish(filled)
        given, self._given = self._given, None
        if given is None:
            return self._deliver(block)
        if block.grown:
            # What a worker sends lies on the host, like what it writes to shared memory.
            return moved(block.deliver(self.hidden, self.env.device), torch.device("cpu"))
        if given is block:
            block.flush()
        else:
            block.copy_to(given.lease)
        return None

    @override
    def abandon(self) -> None:
        self._given = None
        self._staged.abandon()
        self.episodes.abandon()

    @abstractmethod
    def _end_steps(self, block: Block, filled: int) -> None:
        """Waits for steps that are under way, and completes the rows of a block."""

    def _count(self, block: Block, filled: int) -> None:
        """Checks what was filled, and adds it to the statistics and the trajectories."""
        if filled:
            self.policy.check_samples(block.tensors, filled)
        rewards = self._rewards(block, filled)
        done = block.on_host(DONE, filled)[..., 0]
        counted = block.on_host(MASK, filled) if self.entries.masked else None
        check_rewards(rewards, lambda: self._actions(block, filled))
        self.sums.add(rewards, done, counted, self.most_frames)
        self._number(block, done, counted)

    def _number(self, block: Block, done: Mask, counted: Mask | None) -> None:
        """Writes the ids of trajectories that were not written while the batch was filled."""

    def _rewards(self, block: Block, filled: int) -> Array:
        """Returns the reward of each step; if it has several numbers, their mean."""
        parts = [
            (rows := block.on_host(key, filled)).reshape(*rows.shape[:2], math.prod(leaf.shape))
            for key, leaf in self.entries.rewards.items()
        ]
        if len(parts) == 1 and parts[0].shape[-1] == 1:
            return parts[0][..., 0]
        mean: Array = np.concatenate(parts, -1).mean(-1, dtype=np.float64)
        return mean

    def _actions(self, block: Block, filled: int) -> dict[Key, Array]:
        keys = map(as_key, self.env.action_keys)
        found = {key: block.tensors[key][:filled].cpu().float() for key in keys}
        return {k: value.reshape(filled, self.num_envs, -1).numpy() for k, value in found.items()}

    def _deliver(self, block: Block) -> TensorDictBase:
        return block.deliver(self.hidden, self.env.device, self.pool)

    # --- between batches

    def _begin_episodes(self, mask: Any, **kwargs: Any) -> None:
        """Begins episodes in all environments, or in those of the mask, in the next batch."""
        view = self._view_of(None, self._staged.first)
        self._staged.begin_episodes(self.stepper, view, mask, **kwargs)
        self._forget(slice(None) if mask is None else mask)

    def _forget(self, chosen: Any) -> None:
        """Passes nothing on from one episode to the next in some environments."""
        for row, value in self._forgotten():
            row[chosen] = value

    def _forgotten(self) -> list[tuple[Any, bool]]:
        """The rows with what is not passed on to the next episode, and the values that it gets."""
        entries = self.entries
        return [
            (row, key == IS_INIT)
            for key, row in self._staged.next.items()
            if key not in entries.shown
        ]

    @override
    def reset(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        self._begin_episodes(mask, **kwargs)
        self.sums.reset(mask)
        self.episodes.restart_all(mask)

    def fake(self) -> TensorDictBase:
        """Returns a batch of zeros."""
        block = Block(self.layout, self.pool.lease())
        block.clear()
        return self._deliver(block)

    @override
    def describe(self) -> dict[str, Any]:
        return {"env_path": self._path, **self.policy.describe(), **self.pool.describe()}

    @override
    def state_dict(self) -> dict[str, Any]:
        rows = self._staged.state_dict()
        episodes, sums = self.episodes.state_dict(), self.sums.state_dict()
        return {"rows": rows, "episodes": episodes, "sums": sums}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._staged.load_state_dict(state["rows"])
        self.episodes.load_state_dict(state["episodes"])
        self.sums.load_state_dict(state["sums"])


def _leaves(spec: Any, axes: int) -> dict[Key, Leaf]:
    return {
        as_key(key): Leaf(tuple(leaf.shape[axes:]), leaf.dtype)
        for key, leaf in spec.items(True, True)
    }
