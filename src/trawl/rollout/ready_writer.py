"""Batches of frames from environments that step each at its own pace."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from typing_extensions import override

from trawl import keys
from trawl.envs.parallel import ParallelEnv
from trawl.envs.ready import Ready, ReadyEnvs, Rows
from trawl.envs.step_buffers import AUTORESET, RESET, TERMINATED, TRUNCATED
from trawl.errors import add_note
from trawl.keys import DONE, ENV_INDEX, IS_INIT, REWARD, TRAJ_IDS, Key, as_key, next_of, show_key
from trawl.memory import Array
from trawl.rollout.array_batch_writer import ArrayBatchWriter
from trawl.rollout.array_stepper import from_bfloat16
from trawl.rollout.batch_writer import BatchOptions
from trawl.rollout.block import Block
from trawl.rollout.checks import check_rewards
from trawl.rollout.device_transfer import transfer_to
from trawl.rollout.lag_limit import lag_limit
from trawl.rollout.layout import Layout, Leaf
from trawl.rollout.parallel_repairs import ParallelRepairs
from trawl.rollout.policy import Policy
from trawl.rollout.random_actions import RandomActions
from trawl.rollout.ready_policy import ReadyPolicy
from trawl.rollout.serving import ServingOptions, ServingRecord


class ReadyBatchWriter(ArrayBatchWriter):
    """Fills batches with the frames of environments, in the order in which they are completed.

    A batch has a single dimension. A frame is kept in arrays with one row for each environment
    until the environment has taken its step, and is then copied to the next row of the batch.

    Args:
        env: the environments, in other processes or threads; the constructor resets them.
        policy: the policy; the constructor calls it once to find out what it writes.
        options: options of the batches.
        serving: options for acting in environments that are ready.
        version: function that returns the policy's current version.

    Attributes:
        record: record of the policy's calls.
    """

    env: ParallelEnv

    def __init__(
        self,
        env: ParallelEnv,
        policy: Policy,
        options: BatchOptions,
        serving: ServingOptions,
        version: Callable[[], int],
    ) -> None:
        self._serving, self._version = serving, version
        policy.varies = serving.batching.size is None
        super().__init__(env, policy, options)
        self.record = ServingRecord()
        self._envs = self._ready_envs(serving)
        self._limit = lag_limit(serving.max_lag, options.steps, self._envs.rows, version)
        written = self._policy_leaves.written
        # The part of each environment's frame that is known before its step. Entries of
        # ``_next_obs`` are overwritten only once the frame is complete.
        self._begun = dict(self._next_obs)
        for key, leaf in written.items():
            if key not in self._begun:
                self._begun[key] = self._new_row(leaf)
        if serving.version_key is not None:
            self._begun[serving.version_key] = np.zeros(self.num_envs, np.int64)
        # Processes to act for that have no frame to record, and ready processes whose frames wait
        # to be recorded.
        self._idle = list(range(len(self._envs.rows)))
        self._due: list[Ready] = []
        # Processes of ready environments whose frames are recorded.
        self._recorded: list[int] = []
        # Row of each environment's last frame in this batch; -1 if there is none.
        self._last = np.full(self.num_envs, -1)
        self._transfer = transfer_to(policy.device or env.device)
        self._random_actions = RandomActions(env, written)

    def _ready_envs(self, serving: ServingOptions) -> ReadyEnvs:
        restarts, env, batching = self.options.restarts, self.env, serving.batching
        args = env, batching.least, batching.most, batching.patience
        if restarts is None:
            return ReadyEnvs(*args)
        repairs = ParallelRepairs(env, restarts)

        def restart(index: int, error: Exception) -> None:
            repairs.begin(index, error, 0, when=f"after {restarts.steps_done} frames of all")

        return ReadyEnvs(*args, restart, repairs.succeeded)

    @override
    def _new_layout(self) -> Layout:
        # Steps that are no experience are left out, so there is nothing to mask.
        self._masked = False
        leaves = self._all_leaves()
        for key in (ENV_INDEX, self._serving.version_key):
            if key in leaves:
                raise ValueError(
                    f"the collector writes the entry {show_key(key)}, but the environment or the "
                    "policy has it already: rename it there, or change policy_version_key"
                )
            if key is not None:
                leaves[key] = Leaf((), torch.int64)
        return Layout(leaves, (), self.options.steps)

    # --- filling

    @override
    def begin(self, block: Block | None = None) -> None:
        self._given = block is not None
        self._block = block = block or Block(self.pool.lease())
        rows = {key: array[:, 0] for key, array in block.flat_rows.items()}
        for key in (key for key in rows if key not in self._begun):
            if rows[key].dtype == np.bool_:
                rows[key][...] = False
        buffers = self.env.buffers
        assert buffers is not None
        self._rows = rows
        self._last[:] = -1
        if self._limit is not None:
            self._limit.begin()
        self._copied = [(self._begun[key], rows[key]) for key in self._begun if key in rows]
        states = self._policy_leaves.states
        self._observed_rows = [
            (array, rows[next_of(key)], self._next_obs[key])
            for key, array in buffers.observed.items()
            if key not in states
        ]

    def wake_late(self) -> None:
        """Wakes environments that are to take a step, after an exception ended a batch."""
        self._envs.wake_late()

    def bind_policy(self, random: bool) -> None:
        """Prepares the policy for the calls until the end of the batch."""
        self._random = random or self.policy.draws_from(self.env)
        if not self._random:
            self._calls = ReadyPolicy(
                self.policy,
                self.env.device,
                self._policy_leaves,
                self._roots,
                self._next_obs,
                self._begun,
                self._serving.batching.size,
                self._transfer,
            )
        self._actions = self._action_targets()

    def _action_targets(self) -> list[tuple[Array, Key]]:
        """Returns each action's array in the shared memory, with its key."""
        buffers = self.env.buffers
        assert buffers is not None
        dtypes = {
            key: np.dtype(np.float32) if key in self._bfloat16 else self._begun[key].dtype
            for key in buffers.action_dtypes
        }
        if buffers.action_dtypes != dtypes:
            self._add_due(self._envs.finish())
            self.env.set_action_dtypes(dtypes)
        return [(buffers.actions[key], key) for key in dtypes]

    def advance(self, filled: int, stop: int) -> int:
        """Records frames that are complete, and begins the next steps of their environments.

        Args:
            filled: number of rows that are filled.
            stop: number of rows to fill at most.

        Returns:
            The number of rows that are filled now.
        """
        if self._limit is not None:
            # The limit may have kept the policy from acting for some of them.
            self._idle, self._recorded = [*self._idle, *self._recorded], []
        self._act_for(self._idle, stop - filled)
        chosen, processes = self._take_due(stop - filled)
        if not len(chosen) and not processes:
            before = perf_counter()
            self._add_due(self._envs.wait())
            self.record.waited += perf_counter() - before
            if self._envs.broken:
                self._break_off()
            chosen, processes = self._take_due(stop - filled)
        self._recorded += processes
        filled = self._record_frames(chosen, filled)
        if not self._due or self._limit is not None:
            # All environments that became ready together get their actions together.
            self._act_for(self._recorded, stop - filled)
        return filled

    def _add_due(self, found: list[Ready]) -> None:
        """Adds ready processes; one that was restarted meanwhile has nothing else to do."""
        again = {ready.process for ready in found}
        self._due = [*(ready for ready in self._due if ready.process not in again), *found]
        self._recorded = [process for process in self._recorded if process not in again]
        self._idle = [process for process in self._idle if process not in again]

    def _take_due(self, most: int) -> tuple[Rows, list[int]]:
        """Returns up to ``most`` rows to be recorded, and the processes to act for afterwards."""
        taken: list[Rows] = []
        processes: list[int] = []
        limit = self._limit
        if limit is not None:
            self._due.sort(key=lambda ready: limit.slack(ready.process))
        while self._due and most:
            process, rows, restarted = self._due[0]
            if limit is not None:
                if not limit.may_record(process, most):
                    break
                limit.recorded(process)
            if len(rows) > most:
                self._due[0] = Ready(process, rows[most:], restarted)
                taken.append(rows[:most])
                break
            del self._due[0]
            taken.append(rows)
            processes.append(process)
            most -= len(rows)
            if len(restarted):
                self._copy_begun(restarted)
        return np.concatenate(taken) if taken else np.empty(0, np.int64), processes

    def _break_off(self) -> None:
        """Ends the trajectories of environments that have failed with their last frames."""
        broken, self._envs.broken = self._envs.broken, []
        for index in broken:
            last = self._last[index]
            if last >= 0:
                for key in (keys.TRUNCATED, keys.DONE):
                    # A trajectory that has ended with this frame keeps its flags.
                    self._rows[key][last] |= not self._rows[keys.DONE][last]
        self._forget(np.array(broken))

    def _record_frames(self, chosen: Rows, start: int) -> int:
        """Writes the frames of environments into the batch; returns the number of filled rows."""
        buffers = self.env.buffers
        assert buffers is not None
        bits = buffers.flags[chosen]
        if (bits & AUTORESET).any():
            self._begin_after_autoreset(chosen[bits & AUTORESET != 0])
            chosen, bits = chosen[bits & AUTORESET == 0], bits[bits & AUTORESET == 0]
        stop = start + len(chosen)
        for source, target in self._copied:
            source.take(chosen, 0, target[start:stop], "clip")
        self._last[chosen] = np.arange(start, stop)
        rows = self._rows
        rows[REWARD][start:stop, 0] = buffers.rewards[chosen]
        rows[ENV_INDEX][start:stop] = chosen // buffers.rows_per_env
        if TRAJ_IDS in rows:
            ids = self.episodes.ids
            rows[TRAJ_IDS][start:stop] = [ids[index] for index in chosen]
        for source, target, _ in self._observed_rows:
            target[start:stop] = source[chosen]
        ended = (bits & RESET).astype(np.bool_)
        if ended.any():
            rows[keys.TERMINATED][start:stop, 0] = bits & TERMINATED != 0
            rows[keys.TRUNCATED][start:stop, 0] = bits & TRUNCATED != 0
            rows[DONE][start:stop, 0] = ended
        self._go_on(chosen)
        if ended.any():
            self._start_episodes(chosen[ended])
        return stop

    def _begin_after_autoreset(self, chosen: Rows) -> None:
        """Makes the results of steps that were only resets the beginning of the next frames."""
        self._copy_observed(chosen)
        for key in self._policy_leaves.memories:
            self._next_obs[key][chosen] = 0

    def _copy_observed(self, chosen: Rows) -> None:
        for source, _, following in self._observed_rows:
            following[chosen] = source[chosen]

    def _go_on(self, chosen: Rows) -> None:
        """Makes the results of environments' steps the beginning of their next frames."""
        self._copy_observed(chosen)
        for key in self._policy_leaves.states:
            self._next_obs[key][chosen] = self._begun[next_of(key)][chosen]
        if self._marks_starts:
            self._next_obs[IS_INIT][chosen] = False

    def _start_episodes(self, chosen: Rows) -> None:
        """Begins new trajectories of environments that were reset by their step."""
        self._forget(chosen)
        self._copy_begun(chosen)

    def _copy_begun(self, chosen: Any) -> None:
        """Makes the observations of resets the beginning of the next frames."""
        buffers = self.env.buffers
        assert buffers is not None
        for key, begun in buffers.reset_observed.items():
            self._next_obs[key][chosen] = begun[chosen]

    def _forget(self, chosen: Rows) -> None:
        """Begins new trajectories, in which the policy remembers nothing."""
        for key in (*self._policy_leaves.states, *self._policy_leaves.memories):
            self._next_obs[key][chosen] = 0
        if self._marks_starts:
            self._next_obs[IS_INIT][chosen] = True
        for index in chosen:
            self.episodes.restart(int(index))

    # --- acting

    def _act_for(self, processes: list[int], room: int) -> None:
        """Acts for the environments of processes, and removes the processes from the list.

        Args:
            processes: the processes.
            room: number of rows that are left in the batch.
        """
        limit = self._limit
        count = len(processes) if limit is None else limit.to_act_for(processes, room)
        while count > 0:
            now = processes[: min(count, self._envs.most)]
            # If the policy raises, the processes are still in the list.
            self._act(now)
            del processes[: len(now)]
            count -= len(now)

    def _act(self, processes: list[int]) -> None:
        """Acts for the environments of some processes, and begins their steps."""
        before = perf_counter()
        chosen = np.concatenate([self._envs.rows[index] for index in processes])
        if self._serving.version_key is not None:
            self._begun[self._serving.version_key][chosen] = self._version()
        if self._random:
            self._act_randomly(chosen)
        else:
            self._calls.call(chosen)
        for target, key in self._actions:
            values = self._begun[key][chosen]
            target[chosen] = from_bfloat16(values) if key in self._bfloat16 else values
        self._envs.begin(processes)
        if self._limit is not None:
            self._limit.acted(processes)
        self.record.add(len(chosen), perf_counter() - before)

    def _act_randomly(self, chosen: Rows) -> None:
        """Draws random actions, and sets the policy's other entries to zero."""
        actions = {as_key(key) for key in self.env.action_keys}
        for key in self._policy_leaves.written:
            if key not in actions:
                self._begun[key][chosen] = 0
        for key, values in self._random_actions.draw(chosen).items():
            self._begun[key][chosen] = values

    # --- the end of a batch

    @override
    def finish(self, filled: int) -> TensorDictBase | None:
        assert self._block is not None
        block, self._block = self._block, None
        block.clear_from(filled, but=TRAJ_IDS)
        if filled:
            self.policy.check_samples(lambda key: block.tensor(key, filled))
        self._last[:] = -1
        self._check_rewards(filled)
        if self._given:
            block.flush()
            return None
        return self._deliver(block)[:filled]

    def _check_rewards(self, filled: int) -> None:
        rewards = self._rows[REWARD][:filled]
        try:
            check_rewards(rewards)
        except ValueError as error:
            row = int(np.flatnonzero(np.isnan(rewards[:, 0]))[0])
            add_note(error, f"row {row} is from environment {self._rows[ENV_INDEX][row]}")
            raise

    # --- between batches

    @override
    def reset(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        waiting = self._envs.finish()
        if self._envs.broken:
            self._break_off()
        self._add_due(waiting)
        if mask is None:
            self._due = []
            self._random_actions.forget()
        chosen = np.ones(self.num_envs, np.bool_) if mask is None else mask
        self.env.begin(mask, **kwargs)
        self._forget(np.flatnonzero(chosen))
        self._copy_begun(chosen)
        # What a process has done since is dropped for the environments that were reset.
        for number, (process, rows, restarted) in enumerate(self._due):
            self._due[number] = Ready(process, rows[~chosen[rows]], restarted)
            if len(restarted):
                self._copy_begun(restarted)
        self._due = [ready for ready in self._due if len(ready.rows)]
        self._recorded = []
        waits = {ready.process for ready in self._due}
        if self._limit is not None:
            self._limit.keep(sorted(waits))
        self._idle = [index for index in range(len(self._envs.rows)) if index not in waits]

    @override
    def _deliver(self, block: Block) -> TensorDictBase:
        batch = super()._deliver(block)
        # Rows next to each other are of different environments, so the dimension is not time.
        batch.names = None
        return batch
