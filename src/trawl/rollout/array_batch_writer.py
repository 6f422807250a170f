"""Batches of fixed layout: the environment and the policy write directly into one block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.envs.base import TensorDictEnv
from trawl.keys import (
    DONE,
    IS_INIT,
    MASK,
    REWARD,
    STEP_COUNT,
    TRAJ_IDS,
    Key,
    as_key,
    next_of,
    show_key,
)
from trawl.memory import Array
from trawl.rollout.array_env_restarts import make_stepper
from trawl.rollout.batch_writer import ActFn, BatchOptions, NoFixedLayout, StepFn
from trawl.rollout.block import Block, zeros
from trawl.rollout.checks import check_rewards, has_autoreset_steps
from trawl.rollout.episodes import EpisodeStart, EpisodeTracker, StartValue, StepArrays
from trawl.rollout.fixed_layout_writer import FixedLayoutWriter
from trawl.rollout.frame_entries import FLAG
from trawl.rollout.groups import GroupBinder
from trawl.rollout.layout import Layout, Leaf
from trawl.rollout.normalizer import BatchNormalizer, Normalizer
from trawl.rollout.parallel_stepper import ParallelStepper
from trawl.rollout.policy import Policy
from trawl.rollout.policy_binder import PolicyBinder
from trawl.rollout.policy_inputs import InputMemory, LatestObservation
from trawl.rollout.policy_leaves import PolicyLeaves, discover_leaves
from trawl.rollout.slab import SlabPool
from trawl.rollout.step_logs import StepLogs, keep_logs


class ArrayBatchWriter(FixedLayoutWriter):
    """Fills batches with the frames of an environment whose data has a fixed layout.

    Args:
        env: the environment; the constructor resets it.
        policy: the policy; the constructor calls it once to find out what it writes.
        options: options of the batches.

    Raises:
        NoFixedLayout: if the entries that the policy writes have no fixed layout.
    """

    def __init__(self, env: TensorDictEnv, policy: Policy, options: BatchOptions) -> None:
        self.batch = tuple(env.batch_size)
        self.stepper = make_stepper(env, options.restarts)
        logged = keep_logs(env)
        masked = has_autoreset_steps(env, options.limit) or options.restarts is not None
        super().__init__(env, policy, options, masked)
        self.episodes = EpisodeTracker(self.num_envs, options.limit)
        self._next_obs = self._new_next_obs()
        self._normalizer = self._new_normalizer()
        self.normalization = self._normalizer.normalization
        self._start()
        self._policy_leaves = self._discover()
        for key, leaf in self._policy_leaves.read_later.items():
            if key not in self._next_obs:
                self._next_obs[key] = self._new_row(leaf)
        # A policy without in_keys may read every entry.
        self.episodes.counts_ahead = not policy.in_keys or STEP_COUNT in policy.in_keys
        self._copies = InputMemory(self._new_latest())
        readable, leaves = self._readable, self._policy_leaves
        self._binder = PolicyBinder(env, policy, leaves, readable, self._next_obs)
        self._groups: GroupBinder | None = None
        if isinstance(self.stepper, ParallelStepper) and self.stepper.env.groups > 1:
            self._groups = GroupBinder(self.stepper, policy, leaves, readable, self._next_obs)
        layout = self._new_layout()
        self._bfloat16 = frozenset(k for k, leaf in layout.leaves.items() if _is_bfloat16(leaf))
        states = frozenset(leaves.states)
        self._logs = StepLogs(logged, self._first_rows(), states, self._bfloat16)
        self.pool = SlabPool(layout, options.recycle)
        self._block: Block | None = None
        self._given = False
        # What the policy reads and writes, and what the stepper writes.
        self._arrays: dict[Key, Array] = {}
        self._view = StepArrays({}, self._next_obs)

    # --- what a batch begins with

    def _new_next_obs(self) -> dict[Key, Array]:
        """Returns memory for the entries that a step passes on to the next step, by key."""
        entries = self.entries
        found = {key: self._new_row(leaf) for key, leaf in entries.observed.items()}
        # Agents that are absent stay done, while the flags at the root begin as False.
        found |= {key: self._new_row(leaf) for key, leaf in entries.flags.items() if len(key) > 1}
        if entries.marks_starts:
            found[IS_INIT] = self._new_row(FLAG)
            found[IS_INIT][:] = True
        return found

    def _new_row(self, leaf: Leaf) -> Array:
        return zeros((self.num_envs, *leaf.shape), leaf.dtype)

    def _new_normalizer(self) -> Normalizer:
        options, entries = self.options, self.entries
        if not options.normalize:
            return Normalizer()
        return BatchNormalizer(
            options.normalize, entries.observed, entries.rewards, self._next_obs, options.steps
        )

    def _new_latest(self) -> LatestObservation | None:
        observed, readable = self.entries.observed, self._readable
        # The policy does not read the environment's own array if it is normalised or stacked.
        own = [k for k in observed if k not in self._normalizer.keys and readable[k] == observed[k]]
        alone = not self.batch and len(observed) == len(own) == 1
        return LatestObservation(own[0]) if alone else None

    def _start(self) -> None:
        """Begins the first episodes."""
        self._reset_envs(None)

    def _reset_envs(self, mask: NDArray[np.bool_] | None, **kwargs: Any) -> None:
        self.stepper.reset(StepArrays({}, self._first_rows()), mask, **kwargs)
        self._normalizer.reset(mask)

    def _first_rows(self) -> dict[Key, Array]:
        """Returns the rows into which the stepper writes what the next batch begins with."""
        return self._next_obs | self._normalizer.raw_next

    # --- entries of a batch

    @property
    def _readable(self) -> dict[Key, Leaf]:
        """The entries that exist before the policy acts, as the policy reads them."""
        return self.entries.roots

    def _new_layout(self) -> Layout:
        leaves = self.entries.leaves(self._policy_leaves, self._normalizer.more_leaves)
        return Layout(leaves, self.batch, self.options.steps)

    def _discover(self) -> PolicyLeaves:
        """Calls the policy once to find out what it writes."""
        leaves = discover_leaves(self.env, self.policy, self._first_root(), self._readable)
        observed = self.entries.observed
        for key in leaves.states:
            if key in self._normalizer.keys:
                raise ValueError(
                    f"the policy writes {show_key(next_of(key))}, so the environment's own values "
                    "can't be normalised: leave the key out of NormalizeObservation(keys=...)"
                )
            if key in observed and leaves.written[next_of(key)] != observed[key]:
                raise NoFixedLayout(f"the policy writes {show_key(key)} with another layout")
        if isinstance(self.stepper, ParallelStepper):
            self.stepper.written = frozenset(leaves.states) & observed.keys()
        return leaves

    def _first_root(self) -> TensorDict:
        """Returns a copy of what the policy reads in the first step."""
        root = TensorDict({}, self.batch, device=self.env.device)
        for key, leaf in self.entries.roots.items():
            shape = (*self.batch, *leaf.shape)
            if key in self._next_obs:
                root.set(key, torch.from_numpy(self._next_obs[key].copy()).reshape(shape))
            else:
                root.set(key, torch.zeros(shape, dtype=leaf.dtype))
        return root

    # --- filling

    def _arrays_of(self, block: Block) -> dict[Key, Array]:
        """Returns the arrays that a step writes, with time first."""
        return block.flat_rows

    @override
    def begin(self, block: Block | None = None) -> None:
        self._given = block is not None
        self._logs.begin()
        self._block = block = block or Block(self.pool.lease())
        self._arrays = arrays = self._arrays_of(block)
        entries, next_obs = self.entries, self._next_obs
        view = StepArrays(arrays, next_obs, bfloat16=self._bfloat16)
        for key in entries.flags:
            arrays[key][...] = False
            arrays[next_of(key)][...] = False
        if entries.masked:
            arrays[MASK][...] = True
        self._view = self._normalizer.begin(view, self.in_groups, self.most_frames)
        for key in self._passed_on:
            arrays[key][0] = next_obs[key]
        for key in entries.flags.keys() & next_obs.keys():
            next_obs[key][...] = False
        if entries.marks_starts:
            for rows in (arrays[IS_INIT][1:], arrays[next_of(IS_INIT)]):
                rows[...] = False
            next_obs[IS_INIT][:] = False
        self.episodes.begin(view, self._episode_starts())

    @property
    def _passed_on(self) -> Iterable[Key]:
        """Keys of entries of which a batch has the values that a step passes on to the next."""
        memories = self._policy_leaves.memories
        return (key for key in self._next_obs if key not in memories)

    def _episode_starts(self) -> list[EpisodeStart]:
        """Returns the objects that are called when an episode begins in the batch."""
        arrays, next_obs, leaves = self._arrays, self._next_obs, self._policy_leaves
        starts: list[EpisodeStart] = []
        starts += [StartValue(arrays[key], next_obs[key], 0) for key in leaves.states]
        starts += [StartValue(None, next_obs[key], 0) for key in leaves.memories]
        if self.entries.marks_starts:
            starts.append(StartValue(arrays[IS_INIT], next_obs[IS_INIT], True))
        return starts

    @override
    def bind(self, start: int, stop: int, random: bool) -> tuple[ActFn | None, StepFn]:
        assert self._block is not None
        if self._groups is not None and not (random or self.policy.draws_from(self.env)):
            view, episodes, normalizer = self._view, self.episodes, self._normalizer
            return self._groups.bind(self._block, view, episodes, normalizer, start, stop)
        self._copies.begin()
        act = self._binder.bind(self._block.part(self._copies), start, stop, random)
        self._view.latest = self._copies.latest
        step = self.stepper.bind(self._view, self.episodes, start, stop)
        everyone = slice(0, self.num_envs)
        return act, self._normalizer.bind(step, self._view, everyone, start, stop)

    @property
    @override
    def waited(self) -> float:
        return 0.0 if self._groups is None else self._groups.waited

    @property
    @override
    def in_groups(self) -> bool:
        return self._groups is not None

    @override
    def finish(self, filled: int) -> TensorDictBase | None:
        assert self._block is not None
        if self._groups is not None:
            self._groups.finish()
        block, self._block = self._block, None
        arrays, self._arrays = self._arrays, {}
        self._view = StepArrays({}, self._next_obs)
        self._logs.finish(block.flat_rows, self.episodes, filled)
        self.episodes.finish(filled)
        if filled < self.options.steps:
            # The row after the last step is the first row of the next batch.
            for key in self._passed_on:
                self._next_obs[key][...] = arrays[key][filled]
            block.clear_from(filled, but=TRAJ_IDS)
        if filled:
            self.policy.check_samples(block.tensors, filled)
        actions = {as_key(key): block.flat_rows[as_key(key)] for key in self.env.action_keys}
        rewards = _mean_rewards(block, list(self.entries.rewards), filled)
        check_rewards(rewards, lambda: actions)
        counted = block.flat_rows[MASK][:filled] if self.entries.masked else None
        self.sums.add(rewards, block.flat_rows[DONE][:filled, :, 0], counted)
        self._normalizer.finish(filled, filled < self.options.steps)
        return self._finished(block, filled)

    def _finished(self, block: Block, filled: int) -> TensorDictBase | None:
        """Returns the batch, or None if it is in the block that was passed to :meth:`begin`."""
        if self._given:
            block.flush()
            return None
        return self._deliver(block)

    @property
    @override
    def layout(self) -> Layout:
        return self.pool.layout

    def _deliver(self, block: Block) -> TensorDictBase:
        return block.deliver(self.hidden, self.env.device)

    # --- between batches

    @override
    def reset(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        self._reset_envs(mask, **kwargs)
        self.sums.reset(mask)
        chosen = np.ones(self.num_envs, dtype=np.bool_) if mask is None else mask
        for index in np.flatnonzero(chosen):
            self.episodes.restart(int(index))
        for key in (*self._policy_leaves.states, *self._policy_leaves.memories):
            self._next_obs[key][chosen] = 0
        if self.entries.marks_starts:
            self._next_obs[IS_INIT][chosen] = True

    @override
    def _saved_rows(self) -> dict[str, Tensor]:
        rows = {show_key(key): row for key, row in self._next_obs.items()}
        rows |= self._normalizer.saved_rows()
        return {name: torch.from_numpy(row) for name, row in rows.items()}

    def fake(self) -> TensorDictBase:
        """Returns a batch of zeros."""
        block = Block(self.pool.lease())
        block.clear()
        return self._deliver(block)

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "env_path": "array",
            **self.policy.describe(),
            "batches_held": self.pool.leased,
            "memory_bytes": self.pool.nbytes,
        }


def _is_bfloat16(leaf: Leaf) -> bool:
    return leaf.dtype is torch.bfloat16


def _mean_rewards(block: Block, keys: Sequence[Key], filled: int) -> Array:
    """Returns the reward of each step; if agents have their own, the mean of all agents."""
    if REWARD in keys:
        return block.flat_rows[REWARD][:filled, :, 0]
    parts = [block.flat_rows[key][:filled] for key in keys]
    parts = [rows.reshape(*rows.shape[:2], -1) for rows in parts]
    mean: Array = np.concatenate(parts, -1).mean(-1)
    return mean
