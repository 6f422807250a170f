"""Batches of fixed layout: the environment and the policy write directly into one block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.envs.base import TensorDictEnv
from trawl.envs.parallel import ParallelEnv
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
from trawl.rollout.array_policy import PolicyBinder, PolicyLeaves, converter, leaf_of
from trawl.rollout.batch_writer import ActFn, BatchOptions, BatchWriter, NoFixedLayout, StepFn
from trawl.rollout.block import Block, zeros
from trawl.rollout.checks import (
    check_actions,
    check_rewards,
    check_same_layout,
    has_autoreset_steps,
)
from trawl.rollout.episode_sums import EpisodeSums
from trawl.rollout.episodes import EpisodeStart, EpisodeTracker, StartValue, StepArrays
from trawl.rollout.groups import Group, GroupsInTurn
from trawl.rollout.layout import Layout, Leaf
from trawl.rollout.normalizer import BatchNormalizer
from trawl.rollout.parallel_stepper import ParallelStepper
from trawl.rollout.policy import Policy
from trawl.rollout.policy_inputs import LatestObservation
from trawl.rollout.slab import SlabPool
from trawl.rollout.step_logs import StepLogs, keep_logs

_FLAG = Leaf((1,), torch.bool)


class ArrayBatchWriter(BatchWriter):
    """Fills batches with the frames of an environment whose data has a fixed layout.

    Args:
        env: the environment; the constructor resets it.
        policy: the policy; the constructor calls it once to find out what it writes.
        options: options of the batches.

    Raises:
        NoFixedLayout: if the entries that the policy writes have no fixed layout.
    """

    def __init__(self, env: TensorDictEnv, policy: Policy, options: BatchOptions) -> None:
        self.env = env
        self.policy = policy
        self.options = options
        self.warnings: Sequence[str] = ()
        self.batch = tuple(env.batch_size)
        self.num_envs = math.prod(self.batch)
        self.stepper = make_stepper(env, options.restarts)
        logged = keep_logs(env)
        self.episodes = EpisodeTracker(self.num_envs, options.limit)
        self.sums = EpisodeSums(self.num_envs)
        self._masked = has_autoreset_steps(env, options.limit) or options.restarts is not None
        self._observed = _leaves(env.full_observation_spec, len(self.batch))
        # Several agents have flags and rewards of their own.
        self._flags = _leaves(env.full_done_spec, len(self.batch))
        rewards = _leaves(env.full_reward_spec, len(self.batch))
        self._rewards = {next_of(key): leaf for key, leaf in rewards.items()}
        asked = policy.reads_is_init if options.is_init is None else options.is_init
        self._marks_starts = asked and IS_INIT not in self._observed
        self._roots = self._root_leaves()
        self._next_obs = self._new_next_obs()
        for key in self._flags:
            # Agents that are absent stay done, while the flags at the root begin as False.
            if len(key) > 1:
                self._next_obs[key] = self._new_row(self._flags[key])
        if self._marks_starts:
            self._next_obs[IS_INIT] = self._new_row(_FLAG)
            self._next_obs[IS_INIT][:] = True
        self._normalizer = self._new_normalizer()
        self._start()
        self._policy_leaves = self._discover()
        # A policy without in_keys may read every entry.
        self.episodes.counts_ahead = not policy.in_keys or STEP_COUNT in policy.in_keys
        self._latest = self._new_latest()
        self._binder = PolicyBinder(
            env, policy, self._policy_leaves, self._readable, self._next_obs, latest=self._latest
        )
        self._group_binders = self._bind_parts()
        self._in_turn: GroupsInTurn | None = None
        layout = self._new_layout()
        self._bfloat16 = frozenset(k for k, leaf in layout.leaves.items() if _is_bfloat16(leaf))
        states = frozenset(self._policy_leaves.states)
        self._logs = StepLogs(logged, self._first_rows(), states, self._bfloat16)
        self.pool = SlabPool(layout, options.recycle)
        self._block: Block | None = None
        self._given = False
        # What the policy reads and writes, and what the stepper writes.
        self._arrays: dict[Key, Array] = {}
        self._view = StepArrays({}, self._next_obs)

    def _new_next_obs(self) -> dict[Key, Array]:
        """Returns memory for the observations after the last step."""
        return {key: self._new_row(leaf) for key, leaf in self._observed.items()}

    def _new_latest(self) -> LatestObservation | None:
        # The environment's last observation is not what the policy reads if it is normalised.
        alone = not self.batch and len(self._observed) == 1 and self._normalizer is None
        return LatestObservation(next(iter(self._observed))) if alone else None

    def _start(self) -> None:
        """Begins the first episodes."""
        self._reset_envs(None)

    def _reset_envs(self, mask: NDArray[np.bool_] | None, **kwargs: Any) -> None:
        self.stepper.reset(StepArrays({}, self._first_rows()), mask, **kwargs)
        if self._normalizer is not None:
            self._normalizer.reset(mask)

    def _first_rows(self) -> dict[Key, Array]:
        """Returns the rows into which the stepper writes what the next batch begins with."""
        own = {} if self._normalizer is None else self._normalizer.raw_next
        return self._next_obs | own

    def _new_normalizer(self) -> BatchNormalizer | None:
        options = self.options
        if not options.normalize:
            return None
        normalizer = BatchNormalizer(
            options.normalize, self._observed, self._rewards, self._next_obs, options.steps
        )
        self.normalization = normalizer.normalization
        return normalizer

    def _bind_parts(self) -> list[tuple[range, PolicyBinder]]:
        """Returns the range and the binder of each group of environments, if there are several."""
        env, found = self.env, []
        if not isinstance(env, ParallelEnv) or env.groups == 1:
            return []
        size, rows = self.batch[0] // env.groups, self.num_envs // env.groups
        for group in range(env.groups):
            chosen = slice(group * rows, (group + 1) * rows)
            next_obs = {key: array[chosen] for key, array in self._next_obs.items()}
            part = range(group * size, (group + 1) * size)
            leaves, readable = self._policy_leaves, self._readable
            found.append((part, PolicyBinder(env, self.policy, leaves, readable, next_obs, part)))
        return found

    # --- entries of a batch

    def _root_leaves(self) -> dict[Key, Leaf]:
        """Returns the entries that exist before the policy acts."""
        leaves = {**self._observed, **self._flags}
        if self.options.limit is not None:
            leaves[STEP_COUNT] = Leaf((1,), torch.int64)
        if self._marks_starts:
            leaves[IS_INIT] = _FLAG
        return leaves

    @property
    def _readable(self) -> dict[Key, Leaf]:
        """The entries that exist before the policy acts, as the policy reads them."""
        return self._roots

    def _all_leaves(self) -> dict[Key, Leaf]:
        written = self._policy_leaves.written
        leaves = dict(self._roots)
        leaves.update({key: written[next_of(key)] for key in self._policy_leaves.states})
        leaves.update(written)
        leaves.update({next_of(key): leaf for key, leaf in self._roots.items()})
        leaves.update(self._rewards)
        if self._normalizer is not None:
            leaves.update(self._normalizer.more_leaves)
        if self.options.track_traj_ids:
            leaves[TRAJ_IDS] = Leaf((), torch.int64)
        if self._masked:
            leaves[MASK] = Leaf((), torch.bool)
        return leaves

    def _new_layout(self) -> Layout:
        return Layout(self._all_leaves(), self.batch, self.options.steps)

    def _new_row(self, leaf: Leaf) -> Array:
        return zeros((self.num_envs, *leaf.shape), leaf.dtype)

    def _discover(self) -> PolicyLeaves:
        """Calls the policy once to find out what it writes."""
        with torch.no_grad():
            found = self.policy.discover(self._first_root())
        carried = self.env.carried if isinstance(self.env, ParallelEnv) else frozenset()
        given = {next_of(key) for key in self._roots if key not in carried}
        found = {key: value for key, value in found.items() if key not in given}
        self.policy.writes = tuple(found)
        check_actions(self.env, self.policy.module, found)
        written = {key: leaf_of(key, value, self.batch) for key, value in found.items()}
        for key in written.keys() & self._roots.keys():
            if written[key] != self._readable[key]:
                raise NoFixedLayout(f"the policy overwrites {show_key(key)} with another layout")
        states = [key[1:] for key in written if key[0] == "next"]
        known = {*self._roots, *states}
        memories = [
            key for key in self.policy.remembered(written) if key not in known and key[0] != "next"
        ]
        if isinstance(self.stepper, ParallelStepper):
            self.stepper.written = frozenset(known.intersection(states, self._observed))
        for key in states:
            if self._normalizer is not None and key in self._normalizer.keys:
                raise ValueError(
                    f"the policy writes {show_key(next_of(key))}, so the environment's own values "
                    "can't be normalised: leave the key out of NormalizeObservation(keys=...)"
                )
            if key in self._observed:
                if written[next_of(key)] != self._observed[key]:
                    raise NoFixedLayout(f"the policy writes {show_key(key)} with another layout")
                continue
            self._next_obs[key] = self._new_row(written[next_of(key)])
        for key in memories:
            self._next_obs[key] = self._new_row(written[key])
        convert = {key: converter(value) for key, value in found.items()}
        return PolicyLeaves(written, states, memories, convert)

    def _first_root(self) -> TensorDict:
        root = TensorDict({}, self.batch, device=self.env.device)
        for key, leaf in self._readable.items():
            shape = (*self.batch, *leaf.shape)
            if key in self._next_obs:
                root.set(key, torch.from_numpy(self._first_value(key)).reshape(shape))
            else:
                root.set(key, torch.zeros(shape, dtype=leaf.dtype))
        return root

    def _first_value(self, key: Key) -> Array:
        """Returns a copy of an observation with which the first step begins."""
        return self._next_obs[key].copy()

    # --- filling

    def _arrays_of(self, block: Block) -> dict[Key, Array]:
        """Returns the arrays that a step writes, with time first."""
        return block.flat_rows

    @override
    def begin(self, block: Block | None = None) -> None:
        self._given = block is not None
        self._logs.begin()
        self._block = block = block or Block(self.pool.lease())
        self._arrays = self._arrays_of(block)
        view = StepArrays(self._arrays, self._next_obs, bfloat16=self._bfloat16)
        for key in self._flags:
            view.arrays[key][...] = False
            view.arrays[next_of(key)][...] = False
        if self._masked:
            view.arrays[MASK][...] = True
        self._view = self._stepper_view(view)
        memories = self._policy_leaves.memories
        for key, next_obs in self._next_obs.items():
            if key not in memories:
                view.arrays[key][0] = next_obs
        for key in self._flags.keys() & self._next_obs.keys():
            self._next_obs[key][...] = False
        starts = [
            StartValue(view.arrays[key], self._next_obs[key], 0)
            for key in self._policy_leaves.states
        ]
        starts += [StartValue(None, self._next_obs[key], 0) for key in memories]
        if self._marks_starts:
            for rows in (view.arrays[IS_INIT][1:], view.arrays[next_of(IS_INIT)]):
                rows[...] = False
            self._next_obs[IS_INIT][:] = False
            starts.append(StartValue(view.arrays[IS_INIT], self._next_obs[IS_INIT], True))
        self.episodes.begin(view, [*starts, *self._more_starts])

    @property
    def _more_starts(self) -> Sequence[EpisodeStart]:
        """Objects that are called when an episode begins, in addition to entries of the batch."""
        return ()

    def _stepper_view(self, view: StepArrays) -> StepArrays:
        """Returns the arrays that the stepper writes, for the arrays that the policy reads."""
        if self._normalizer is None:
            return view
        arrays = self._normalizer.begin(view.arrays, self.in_groups)
        return StepArrays(arrays, self._first_rows(), bfloat16=self._bfloat16)

    @override
    def bind(self, start: int, stop: int, random: bool) -> tuple[ActFn | None, StepFn]:
        assert self._block is not None
        if self._group_binders and not (random or self.policy.draws_from(self.env)):
            return self._bind_groups(self._block, start, stop)
        act = self._binder.bind(self._block, start, stop, random)
        self._view.latest = self._latest if self._binder.reads_latest else None
        step = self.stepper.bind(self._view, self.episodes, start, stop)
        return act, self._normalized(step, slice(0, self.num_envs), start, stop)

    def _normalized(self, step: StepFn, part: slice, start: int, stop: int) -> StepFn:
        if self._normalizer is None:
            return step
        return self._normalizer.bind(step, self._view, part, start, stop)

    @property
    @override
    def waited(self) -> float:
        return 0.0 if self._in_turn is None else self._in_turn.waited

    @property
    @override
    def in_groups(self) -> bool:
        return bool(self._group_binders)

    def _bind_groups(self, block: Block, start: int, stop: int) -> tuple[ActFn, StepFn]:
        assert isinstance(self.stepper, ParallelStepper)
        count = len(self._group_binders)
        steps = self.stepper.bind_groups(self._view, self.episodes, start, stop, count)
        rows = self.num_envs // count
        groups = []
        for number, ((part, binder), (send, receive)) in enumerate(
            zip(self._group_binders, steps, strict=True)
        ):
            act = binder.bind_policy(block.part(part.start, part.stop), start, stop)
            own = slice(number * rows, (number + 1) * rows)
            groups.append(Group(act, send, self._normalized(receive, own, start, stop)))
        self._in_turn = GroupsInTurn(groups, stop - start)
        return self._in_turn.act, self._in_turn.step

    @override
    def finish(self, filled: int) -> TensorDictBase | None:
        assert self._block is not None
        if self._in_turn is not None:
            self._in_turn.finish()
        block, self._block = self._block, None
        arrays, self._arrays = self._arrays, {}
        self._view = StepArrays({}, self._next_obs)
        self._logs.finish(block.flat_rows, self.episodes, filled)
        self.episodes.finish(filled)
        if filled < self.options.steps:
            self._carry_on_from(arrays, filled)
            block.clear_from(filled, but=TRAJ_IDS)
        if filled:
            self.policy.check_samples(lambda key: block.tensor(key, filled))
        actions = {as_key(key): block.flat_rows[as_key(key)] for key in self.env.action_keys}
        rewards = self._rewards_of(block, filled)
        check_rewards(rewards, lambda: actions)
        counted = block.flat_rows[MASK][:filled] if self._masked else None
        self.sums.add(rewards, block.flat_rows[DONE][:filled, :, 0], counted)
        if self._normalizer is not None:
            self._normalizer.finish(filled, filled < self.options.steps)
        return self._finished(block, filled)

    def _finished(self, block: Block, filled: int) -> TensorDictBase | None:
        """Returns the batch, or None if it is in the block that was passed to :meth:`begin`."""
        if self._given:
            block.flush()
            return None
        return self._deliver(block)

    def _rewards_of(self, block: Block, filled: int) -> Array:
        """Returns the reward of each step; if agents have their own, the mean of all agents."""
        if REWARD in self._rewards:
            return block.flat_rows[REWARD][:filled, :, 0]
        lead = (filled, self.num_envs, -1)
        parts = [block.flat_rows[key][:filled].reshape(lead) for key in self._rewards]
        mean: Array = np.concatenate(parts, -1).mean(-1)
        return mean

    def _carry_on_from(self, arrays: Mapping[Key, Array], row: int) -> None:
        """Makes the row after the last step the first row of the next batch."""
        for key, next_obs in self._next_obs.items():
            if key not in self._policy_leaves.memories:
                next_obs[...] = arrays[key][row]

    @property
    @override
    def layout(self) -> Layout:
        return self.pool.layout

    @property
    @override
    def hidden(self) -> set[Key]:
        repeated = self._roots.keys() - self._flags.keys() if self.options.compact else ()
        return set(map(next_of, repeated))

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
        if self._marks_starts:
            self._next_obs[IS_INIT][chosen] = True

    @override
    def state_dict(self) -> dict[str, Any]:
        rows = {name: row.clone() for name, row in self._saved_rows().items()}
        episodes, sums = self.episodes.state_dict(), self.sums.state_dict()
        return {"rows": rows, "episodes": episodes, "sums": sums}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self._saved_rows()
        check_same_layout(own, state["rows"])
        for name, row in own.items():
            row.copy_(state["rows"][name])
        self.episodes.load_state_dict(state["episodes"])
        self.sums.load_state_dict(state["sums"])

    def _saved_rows(self) -> dict[str, Tensor]:
        """Returns tensors that share the memory of the entries that a state has."""
        rows = {show_key(key): row for key, row in self._next_obs.items()}
        if self._normalizer is not None:
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


def _leaves(spec: Any, batch: int) -> dict[Key, Leaf]:
    return {
        as_key(key): Leaf(tuple(leaf.shape[batch:]), leaf.dtype)
        for key, leaf in spec.items(True, True)
    }
