"""Batches of frames from environments that step each at its own pace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from typing_extensions import override

from trawl import keys
from trawl.envs.agents.groups import flagged_groups
from trawl.envs.batches.pool import Pool
from trawl.envs.gym import GymEnv
from trawl.envs.processes.buffers import AUTORESET, RESET, TERMINATED, TRUNCATED
from trawl.envs.processes.parallel import ParallelEnv
from trawl.envs.processes.ready import Rows
from trawl.errors import add_note
from trawl.keys import (
    DONE,
    ENV_INDEX,
    IS_INIT,
    NO_TRAJECTORY,
    STEP_COUNT,
    TRAJ_IDS,
    Key,
    as_key,
    next_of,
    show_key,
)
from trawl.memory import Array
from trawl.rollout.batches import BatchOptions
from trawl.rollout.block import Block
from trawl.rollout.checks import check_rewards
from trawl.rollout.cuts import is_late, mark_rows
from trawl.rollout.layout import Layout, Leaf
from trawl.rollout.policy.device_transfer import transfer_to
from trawl.rollout.policy.policy import Policy
from trawl.rollout.policy.random_actions import ReadyActions
from trawl.rollout.ready.serving import ServingOptions, ServingRecord
from trawl.rollout.ready.sources import (
    NO_ROWS,
    ReadyPool,
    ReadyProcesses,
    ReadyResults,
    ReadySource,
)
from trawl.rollout.steppers.arrays import from_bfloat16
from trawl.rollout.writers.arrays import ArrayBatchWriter


class ReadyBatchWriter(ArrayBatchWriter):
    """Fills batches with the frames of environments, in the order in which they are completed.

    A batch has a single dimension. A frame is kept in arrays with one row for each environment
    until the environment has taken its step, and is then copied to the next row of the batch.

    Args:
        env: the environments: a :class:`ParallelEnv`, or a :class:`GymEnv` around a
            :class:`~trawl.envs.batches.pool.Pool`. The constructor resets them.
        policy: the policy; the constructor calls it once to find out what it writes.
        options: options of the batches.
        serving: options for acting in environments that are ready.
        version: function that returns the policy's current version.

    Attributes:
        record: record of the policy's calls.
    """

    env: ParallelEnv | GymEnv
    _kind = "arrival"

    def __init__(
        self,
        env: ParallelEnv | GymEnv,
        policy: Policy,
        options: BatchOptions,
        serving: ServingOptions,
        version: Callable[[], int],
    ) -> None:
        self._serving, self._version = serving, version
        policy.varies = serving.batching.size is None
        super().__init__(env, policy, options)
        self.record = ServingRecord()
        written = self._policy_leaves.written
        # The part of each environment's frame that is known before its step. What is passed on to
        # the next one is overwritten only once the frame is complete.
        self._begun = dict(self._next)
        for key, leaf in written.items():
            if key not in self._begun:
                self._begun[key] = self._new_row(leaf)
        if serving.version_key is not None:
            self._begun[serving.version_key] = np.zeros(self.num_envs, np.int64)
        own = self._begun.keys() - self._next.keys()
        self._staged.more_saved = {f"begun {show_key(key)}": self._begun[key] for key in own}
        self._agent_groups = flagged_groups(env)
        # The id of each environment's trajectory.
        self._ids = np.array(self.episodes.ids)
        # Row of ``_begun`` that each frame of this batch comes from. Numpy sorts small integers
        # faster.
        self._sources = np.zeros(options.steps, np.min_scalar_type(self.num_envs))
        # Row of each environment's last frame in this batch; -1 if there is none.
        self._last = np.full(self.num_envs, -1)
        self._transfer = transfer_to(policy.device or env.device)
        self._random_actions = ReadyActions(env, self._policy_leaves, self._begun)

    @override
    def _start(self) -> None:
        self._next, self._stages = self._staged.next, self._staged.stages
        self._source, self._first = self._new_source(), self._staged.first
        for key, begun in self._source.start().items():
            self._first[key][...] = begun
        self._stages.restart(None)

    @override
    def _new_next(self) -> dict[Key, Array]:
        found, roots = super()._new_next(), self.entries.roots
        if STEP_COUNT in roots:
            found[STEP_COUNT] = self._new_row(roots[STEP_COUNT])
        return found

    def _new_source(self) -> ReadySource:
        if isinstance(self.env, ParallelEnv):
            options = self.options
            return ReadyProcesses(
                self.env, self._serving, options.restarts, options.steps, self._version
            )
        pool = self.env.vector
        assert isinstance(pool, Pool)
        return ReadyPool(self.env, pool, self.options.restarts)

    @override
    def _new_layout(self) -> Layout:
        # Steps that are no experience are left out, so there is nothing to mask.
        self.entries.masked = False
        layout = super()._new_layout()
        leaves = layout.leaves
        for key in (ENV_INDEX, self._serving.version_key):
            if key in leaves:
                raise ValueError(
                    f"the collector writes the entry {show_key(key)}, but the environment or the "
                    "policy has it already: rename it there, or change policy_version_key"
                )
            if key is not None:
                leaves[key] = Leaf((), torch.int64)
        return Layout(leaves, (), self.options.steps, layout.pools)

    # --- filling

    @override
    def _begin_rows(self) -> None:
        rows = {key: array[:, 0] for key, array in self._staged.block.flat_rows.items()}
        for key in (key for key in rows if key not in self._begun):
            if rows[key].dtype == np.bool_:
                rows[key][...] = False
        self._rows = rows
        self._ids = np.array(self.episodes.ids)
        self._last[:] = -1
        self._source.begin()
        self._notes_resets = bool(self._emptied or self._stages.stages)
        stacked = self.layout.pools
        self._copied = [
            (array, rows[key])
            for key, array in self._begun.items()
            if key in rows and key not in stacked
        ]
        states, arrays = self._policy_leaves.states, self._staged.view.arrays
        # What a step returns, where it goes, and where the next step begins with it.
        self._results: list[tuple[Key, Array, Array | None]] = [
            (key[1:], arrays[key][:, 0, 0 if leaf.shape == (1,) else ...], None)
            for key, leaf in self.entries.rewards.items()
        ]
        self._results += [
            (key, arrays[next_of(key)][:, 0], self._first[key])
            for key in self.entries.shown
            if key not in states
        ]

    def recover(self) -> None:
        """Repairs what an exception that ended a batch may have left undone."""
        self._source.recover()

    def bind_policy(self, random: bool) -> None:
        """Prepares the policy for the calls until the end of the batch."""
        self._random = random or self.policy.draws_from(self.env)
        begun = self._begun
        if not self._random:
            size, transfer = self._serving.batching.size, self._transfer
            self._act_for = self._binder.bind_some(self._next, begun, size, transfer)
        self._action_keys = [as_key(key) for key in self.env.action_keys]
        self._source.set_action_dtypes(
            {
                key: np.dtype(np.float32) if key in self._bfloat16 else begun[key].dtype
                for key in self._action_keys
            }
        )

    def advance(self, filled: int, stop: int) -> int:
        """Records frames that are complete, and begins the next steps of their environments.

        Args:
            filled: number of rows that are filled.
            stop: number of rows to fill at most.

        Returns:
            The number of rows that are filled now.
        """
        self._act_where_ready(stop - filled)
        source, before = self._source, perf_counter()
        source.wait()
        self.record.waited += perf_counter() - before
        if source.broken:
            self._break_off()
        room = stop - filled
        results = source.take(int(min(room, self._stages.renew_within(filled))), room)
        if source.restarted:
            self._start_episodes(np.array(source.restarted))
            source.restarted.clear()
        filled = self._record_frames(results, filled)
        self._act_where_ready(stop - filled)
        return filled

    def _break_off(self) -> None:
        """Ends the trajectories of environments that have failed with their last frames."""
        broken = self._source.broken.copy()
        self._source.broken.clear()
        for index in broken:
            last = self._last[index]
            if last < 0:
                self.sums.end(index)
                self.episodes.cut(index)
            else:
                # A trajectory that has ended with this frame keeps its flags.
                mark_rows(self._rows, last, ~self._rows[DONE][last, 0], self._agent_groups)
        self._start_trajectories(np.array(broken))

    def _record_frames(self, results: ReadyResults, start: int) -> int:
        """Writes the frames of environments into the batch; returns the number of filled rows."""
        everyone, columns, flags = results
        chosen, flagged = everyone, flags.tobytes() != bytes(len(flags))
        kept, resets = None, NO_ROWS
        if flagged:
            kept = (flags & AUTORESET == 0).nonzero()[0]
            if len(kept) < len(flags):
                # Resets are no frames. Their results only become the beginning of the next frames.
                if self._notes_resets:
                    resets = everyone[(flags & AUTORESET).nonzero()[0]]
                chosen, flags = everyone[kept], flags[kept]
            else:
                kept = None
        stop = start + len(chosen)
        self._stages.record(chosen, start)
        for source, target in self._copied:
            source.take(chosen, 0, target[start:stop], "clip")
        if self.options.restarts is not None:
            self._last[chosen] = np.arange(start, stop)
        rows, limit = self._rows, self.options.limit
        self._sources[start:stop] = chosen
        rows[ENV_INDEX][start:stop] = chosen
        if TRAJ_IDS in rows:
            rows[TRAJ_IDS][start:stop] = self._ids[chosen]
        for key, target, following in self._results:
            column = columns[key]
            if following is not None:
                following[everyone] = column
            target[start:stop] = column if kept is None else column[kept]
        for key in self._policy_leaves.states:
            self._next[key][chosen] = self._begun[next_of(key)][chosen]
        if self.entries.marks_starts:
            self._next[IS_INIT][chosen] = False
        if limit is not None:
            self._next[STEP_COUNT][chosen] += 1
            rows[next_of(STEP_COUNT)][start:stop] = self._next[STEP_COUNT][chosen]
        self._stages.pass_on(chosen, start)
        if len(resets):
            self._forget(resets)
            self._stages.begin_episodes(resets)
        if flagged:
            self._record_ends(chosen, flags, start, stop)
        return stop

    def _record_ends(self, chosen: Rows, bits: NDArray[np.uint8], start: int, stop: int) -> None:
        """Writes the flags of frames, and begins new trajectories where they ended."""
        resets = bits & RESET
        ended = resets.nonzero()[0]
        if not len(ended):
            return
        rows = self._rows
        rows[keys.TERMINATED][start:stop, 0] = bits & TERMINATED
        rows[keys.TRUNCATED][start:stop, 0] = bits & TRUNCATED
        rows[DONE][start:stop, 0] = resets
        if self.options.limit is not None:
            late = is_late(self.options.limit, self._next[STEP_COUNT][chosen, 0])
            mark_rows(rows, slice(start, stop), late, self._agent_groups)
        self._start_trajectories(chosen[ended])
        self._start_episodes(chosen[ended])

    def _start_trajectories(self, chosen: Rows) -> None:
        """Begins new trajectories."""
        self._forget(chosen)
        for index in chosen.tolist():
            self.episodes.restart(index)
            self._ids[index] = self.episodes.ids[index]

    def _start_episodes(self, chosen: Rows) -> None:
        """Makes the observations of resets the beginning of the next frames."""
        for key, begun in self._source.begun(chosen).items():
            self._first[key][chosen] = begun
        self._stages.begin_episodes(chosen)

    @override
    def _forget(self, chosen: Array) -> None:
        for row, value in self._emptied:
            row[chosen] = value

    @cached_property
    def _emptied(self) -> list[tuple[Any, bool]]:
        """The rows of :meth:`_forgotten`, and the states of the policy, found once."""
        states = [(self._next[key], False) for key in self._policy_leaves.states]
        return self._forgotten() + states

    # --- acting

    def _act_where_ready(self, room: int) -> None:
        """Acts for environments, and begins their steps, as long as some are to get actions.

        Args:
            room: number of rows that are left in the batch.
        """
        # If the policy raises, the source returns the same rows again.
        while (chosen := self._source.turn(room)) is not None:
            self._act(chosen)

    def _act(self, chosen: Rows) -> None:
        """Acts for some environments, and begins their steps."""
        before = perf_counter()
        if self._serving.version_key is not None:
            self._begun[self._serving.version_key][chosen] = self._version()
        if self._random:
            self._random_actions.write(chosen)
        else:
            self._act_for(chosen)
        actions = {key: self._begun[key][chosen] for key in self._action_keys}
        for key in self._bfloat16.intersection(actions):
            actions[key] = from_bfloat16(actions[key])
        late, limit = None, self.options.limit
        if limit is not None:
            late = is_late(limit, self._next[STEP_COUNT][chosen, 0] + 1)
        self._source.send(actions, late)
        self.record.add(len(chosen), perf_counter() - before)

    # --- the end of a batch

    @override
    def finish(self, filled: int) -> TensorDictBase | None:
        given = self._given
        batch = super().finish(filled)
        return batch if batch is None or given is not None else batch[:filled]

    @property
    @override
    def _passed_on(self) -> list[Key]:
        return []  # an environment's newest entries are kept as soon as they arrive

    @override
    def _end_steps(self, block: Block, filled: int) -> None:
        self._last[:] = -1
        if TRAJ_IDS in self._rows:
            self._rows[TRAJ_IDS][filled:] = NO_TRAJECTORY

    @override
    def _count(self, block: Block, filled: int) -> None:
        if filled:
            self.policy.check_samples(block.tensors, filled)
        rewards = self._rewards(block, filled)
        self._check_rewards(rewards)
        self.sums.add_rows(self._sources[:filled], rewards[:, 0], self._rows[DONE][:filled, 0])

    def _check_rewards(self, rewards: Array) -> None:
        try:
            check_rewards(rewards)
        except ValueError as error:
            row = int(np.flatnonzero(np.isnan(rewards[:, 0]))[0])
            add_note(error, f"row {row} is from environment {self._rows[ENV_INDEX][row]}")
            raise

    # --- between batches

    @override
    def reset(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        begun = self._source.reset(mask, **kwargs)
        if self._source.broken:
            self._break_off()
        self.sums.reset(mask)
        if mask is None:
            self._random_actions.forget()
        chosen = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        self._start_trajectories(chosen)
        self._start_episodes(begun)
        self._source.restarted.clear()
        self._stages.restart(mask)

    def settle(self) -> None:
        """Waits until no environment is stepping."""
        self._source.settle()

    @override
    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {
            **super().state_dict(),
            "source": self._source.state_dict(),
            "random_actions": self._random_actions.state_dict(),
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "source" in state:
            self._source.check_state(state["source"])
        # Raises an error if there is no such entry.
        super().load_state_dict(state)
        self._source.load_state_dict(state["source"])
        self._random_actions.load_state_dict(state["random_actions"])

    @override
    def _deliver(self, block: Block) -> TensorDictBase:
        batch = super()._deliver(block)
        # Rows next to each other are of different environments, so the dimension is not time.
        batch.names = None
        return batch
