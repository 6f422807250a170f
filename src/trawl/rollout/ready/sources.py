"""Sources of results in the order in which they come: environments in processes, and pools.

:class:`ReadySource` is the contract between them and the writer of their frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.batches.pool import Pool, PoolResults
from trawl.envs.gym import GymEnv
from trawl.envs.processes.buffers import AUTORESET, RESET, TERMINATED, TRUNCATED
from trawl.envs.processes.parallel import ParallelEnv
from trawl.envs.processes.ready import Ready, ReadyEnvs, Rows
from trawl.errors import EnvStateError, StateError, resetting
from trawl.keys import Key, as_key
from trawl.memory import Array, Mask
from trawl.rollout.ready.serving import Batching, ServingOptions, lag_limit
from trawl.rollout.restarts import EnvRestarts, FailureCounter, ParallelRepairs

NO_ROWS: Rows = np.empty(0, np.int64)
# By the flags of a step: the flags with RESET if the episode ended, and the next step's flags if
# that step will be the reset.
_ENDED = np.arange(16, dtype=np.uint8) & (TERMINATED | TRUNCATED) != 0
_WITH_RESET = np.where(_ENDED, np.arange(16) | RESET, np.arange(16)).astype(np.uint8)
_NEXT = np.where(_ENDED, AUTORESET, 0).astype(np.uint8)


class ReadyResults(NamedTuple):
    """Results of environments that have taken a step.

    All arrays have a row for each environment, in the same order.

    Attributes:
        rows: rows of the environments among all environments.
        results: rewards of the step, and observations and agents' flags after it, by key. A reward
            of one number has no dimension of its own, because indexing takes several times as long
            with another dimension.
        flags: one byte for each environment, with the bits that
            :class:`~trawl.envs.processes.buffers.SharedStepBuffers` describes.
    """

    rows: Rows
    results: Mapping[Key, Array]
    flags: NDArray[np.uint8]

    def only(self, chosen: slice | Array) -> ReadyResults:
        """Returns the results of some of the environments."""
        results = {key: array[chosen] for key, array in self.results.items()}
        return ReadyResults(self.rows[chosen], results, self.flags[chosen])


class ReadySource(Protocol):
    """Environments, each of which becomes ready at its own pace.

    The writer waits for results, takes and records them, and then sends actions.

    Attributes:
        broken: rows of environments that have failed. The writer clears it.
        restarted: rows of environments that were reset because they had failed, and that
            :meth:`take` has passed over. The writer clears it.
    """

    broken: list[int]
    restarted: list[int]

    def start(self) -> Mapping[Key, Array]:
        """Begins episodes in all environments.

        Returns:
            An observation for each row, with which the policy can be tried. A row whose
            environment is not ready yet has the observation of another one.
        """

    def set_action_dtypes(self, dtypes: Mapping[Key, np.dtype[Any]]) -> None:
        """Sets the dtypes of the actions that are sent."""

    def begin(self) -> None:
        """Notes the beginning of a batch."""

    def wait(self) -> None:
        """Waits until there are results to take, or an environment has failed."""

    def take(self, most: int, room: int) -> ReadyResults:
        """Returns results that were not taken yet.

        There may be none if the only results are to be delivered after others.

        Args:
            most: number of rows of results to return at most.
            room: number of rows that are left in the batch.
        """

    def begun(self, rows: Rows) -> Mapping[Key, Array]:
        """Returns the observations of resets, in rows that were reset in the step that was taken.

        There are none if resets take a step of their own.
        """

    def turn(self, room: int) -> Rows | None:
        """Returns rows for which the policy is to act now, in one call; None if there are none.

        There are none while there are results to take, so that the policy acts together for all
        environments that became ready together.

        Args:
            room: number of rows that are left in the batch.
        """

    def send(self, actions: Mapping[Key, Array], late: Mask | None) -> None:
        """Begins the steps of the rows that :meth:`turn` returned, with an action for each.

        Args:
            actions: the actions, by key.
            late: True for rows to be reset after the step even if their episode has not ended;
                None for no row.
        """

    def reset(self, mask: NDArray[np.bool_] | None, **kwargs: Any) -> Rows:
        """Resets all environments, or where ``mask`` is True. Their results are dropped.

        Returns:
            The rows whose first observations :meth:`begun` returns.
        """

    def recover(self) -> None:
        """Repairs what an exception that ended a batch may have left undone."""

    def settle(self) -> None:
        """Waits until no environment is stepping. The results are taken later.

        Nothing happens if the environments can't be captured.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what later batches depend on, except the environments, after :meth:`settle`.

        Raises:
            EnvStateError: if the environments can't be captured.
        """

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Compares a state with the environments.

        Raises:
            EnvStateError: if the environments can't be restored.
            StateError: if it is the state of environments that are distributed in another way.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned; other results are dropped."""


class ReadyProcesses(ReadySource):
    """The environments of a :class:`ParallelEnv`.

    A process and its environments become ready together.

    Args:
        env: the environments, whose data has a fixed layout.
        serving: options for acting in environments that are ready.
        restarts: the collector's record of failures; None to raise errors.
        steps: number of rows of a batch.
        version: function that returns the policy's current version.
    """

    def __init__(
        self,
        env: ParallelEnv,
        serving: ServingOptions,
        restarts: EnvRestarts | None,
        steps: int,
        version: Callable[[], int],
    ) -> None:
        assert env.buffers is not None
        self._env, self._buffers = env, env.buffers
        self._results = dict(env.buffers.observed)
        for key, array in env.buffers.rewards.items():
            self._results[key] = array[:, 0] if array.shape[1:] == (1,) else array
        self.restarted: list[int] = []
        self._repairs = None if restarts is None else ParallelRepairs(env, restarts)
        self._envs = self._ready_envs(serving.batching, restarts)
        self._ends_idle = serving.ends_idle
        self._limit = lag_limit(serving.max_lag, steps, self._envs.rows, version)
        # True if the results that are due have to wait for others, which the limit puts first.
        self._held = False
        # Ready processes whose frames wait to be recorded, and processes to act for.
        self._due: list[Ready] = []
        self._waiting = list(range(len(self._envs.rows)))
        # Processes that :meth:`turn` has returned.
        self._turn: list[int] = []

    def _ready_envs(self, batching: Batching, restarts: EnvRestarts | None) -> ReadyEnvs:
        args = self._env, batching.least, batching.most, batching.patience
        repairs = self._repairs
        if restarts is None or repairs is None:
            return ReadyEnvs(*args)

        def restart(index: int, error: Exception) -> None:
            repairs.begin(index, error, 0, when=f"after {restarts.steps_done} frames of all")

        return ReadyEnvs(*args, restart, repairs.succeeded)

    @property
    def broken(self) -> list[int]:  # type: ignore[override]
        """Rows of environments that have failed."""
        return self._envs.broken

    @override
    def start(self) -> Mapping[Key, Array]:
        self._env.begin(None)
        return self._buffers.reset_observed

    @override
    def set_action_dtypes(self, dtypes: Mapping[Key, np.dtype[Any]]) -> None:
        if self._buffers.action_dtypes != dtypes:
            self._envs.settle()
            self._env.set_action_dtypes(dtypes)

    @override
    def begin(self) -> None:
        self._held = False
        if self._limit is not None:
            self._limit.begin()

    @override
    def wait(self) -> None:
        if not self._due or self._held:
            self._add_due(self._envs.wait())

    def _add_due(self, found: list[Ready]) -> None:
        """Adds ready processes; one that was restarted meanwhile has nothing else to do."""
        again = {ready.process for ready in found}
        self._due = [*(ready for ready in self._due if ready.process not in again), *found]
        self._waiting = [process for process in self._waiting if process not in again]

    @override
    def take(self, most: int, room: int) -> ReadyResults:
        taken: list[Rows] = []
        limit, self._held = self._limit, False
        if limit is not None:
            self._due.sort(key=lambda ready: limit.slack(ready.process))
        while self._due and most:
            process, rows, restarted = self._due[0]
            if limit is not None:
                self._held = not limit.may_record(process, room)
                if self._held:
                    break
                limit.recorded(process)
            if len(rows) > most:
                self._due[0] = Ready(process, rows[most:], restarted)
                taken.append(rows[:most])
                break
            del self._due[0]
            taken.append(rows)
            self._waiting.append(process)
            self.restarted += restarted.tolist()
            most, room = most - len(rows), room - len(rows)
        buffers, chosen = self._buffers, np.concatenate([NO_ROWS, *taken])
        results = {key: array[chosen] for key, array in self._results.items()}
        return ReadyResults(chosen, results, buffers.flags[chosen])

    @override
    def begun(self, rows: Rows) -> Mapping[Key, Array]:
        return {key: array[rows] for key, array in self._buffers.reset_observed.items()}

    @override
    def turn(self, room: int) -> Rows | None:
        if self._limit is not None:
            count = self._limit.to_act_for(self._waiting, room)
        else:
            count = 0 if self._due else len(self._waiting)
        if self._ends_idle and count:
            count = self._fitting(count, room)
        if not count:
            return None
        self._turn = self._waiting[: min(count, self._envs.most)]
        return np.concatenate([self._envs.rows[index] for index in self._turn])

    def _fitting(self, count: int, room: int) -> int:
        """Returns for how many of the waiting processes a batch has room, at most ``count``."""
        rows = self._envs.rows
        waiting = sum(len(rows[process]) for process in self._waiting)
        # The last step of a process with several environments may have too many frames.
        fitting = int(room > 0 and waiting == len(self._buffers.flags))
        # Processes that do not wait are stepping, or their frames are not recorded yet.
        room -= len(self._buffers.flags) - waiting
        for number, process in enumerate(self._waiting[:count], 1):
            room -= len(rows[process])
            if room < 0:
                break
            fitting = number
        return fitting

    @override
    def send(self, actions: Mapping[Key, Array], late: Mask | None) -> None:
        rows = np.concatenate([self._envs.rows[index] for index in self._turn])
        if late is not None:
            self._buffers.cut[rows] = late
        for key, target in self._buffers.actions.items():
            target[rows] = actions[key]
        self._envs.begin(self._turn)
        if self._limit is not None:
            self._limit.acted(self._turn)
        del self._waiting[: len(self._turn)]

    @override
    def reset(self, mask: NDArray[np.bool_] | None, **kwargs: Any) -> Rows:
        self._add_due(self._envs.finish())
        count = len(self._buffers.flags)
        chosen = np.ones(count, np.bool_) if mask is None else mask
        self._env.begin(mask, **kwargs)
        # What a process has done since is dropped for the environments that were reset.
        kept: list[Ready] = []
        begun = [np.flatnonzero(chosen)]
        for process, rows, restarted in [] if mask is None else self._due:
            begun.append(restarted)
            left = rows[~chosen[rows]]
            if len(left):
                kept.append(Ready(process, left, restarted))
        self._due = kept
        waits = {ready.process for ready in kept}
        if self._limit is not None:
            self._limit.keep(sorted(waits))
        self._waiting = [index for index in range(len(self._envs.rows)) if index not in waits]
        return np.concatenate(begun)

    @override
    def recover(self) -> None:
        self._envs.wake_late()

    # --- state

    @override
    def settle(self) -> None:
        self._envs.settle()

    @override
    def state_dict(self) -> dict[str, Any]:
        rows = self._unread()
        return {
            "processes": [len(rows) for rows in self._envs.rows],
            "envs": self._envs.state_dict(),
            "due": [ready.as_data() for ready in self._due],
            "waiting": list(self._waiting),
            "restarted": list(self.restarted),
            "unread": [one.tolist() for one in rows],
            "results": self._buffers.read_results(*rows),
            "limit": None if self._limit is None else self._limit.state_dict(),
            "failures": None if self._repairs is None else self._repairs.failures(),
        }

    def _unread(self) -> tuple[Rows, Rows]:
        """Returns the rows whose steps, and the rows whose resets are still to be read."""
        waiting = [*self._due, *self._envs.ready]
        rows = np.concatenate([NO_ROWS, *(ready.rows for ready in waiting)])
        ended = rows[self._buffers.flags[rows] & RESET != 0]
        begun = [ended, *(ready.restarted for ready in waiting)]
        return rows, np.concatenate([*begun, np.array(self.restarted, np.int64)])

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        mine, its = [len(rows) for rows in self._envs.rows], state["processes"]
        if mine != its:
            raise StateError(
                f"the state is one of processes with {its} environments, but the collector has "
                f"processes with {mine}: create_env_fn and envs_per_worker must be the same"
            )
        for name, option, own in (
            ("limit", "max_policy_lag", self._limit),
            ("failures", "on_env_error='restart'", self._repairs),
        ):
            if (own is None) != (state[name] is None):
                with_, without = ("state", "collector")[:: 1 if own is None else -1]
                raise StateError(f"the {with_} is one with {option}, but the {without} is not")

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._envs.load_state_dict(state["envs"])
        self._due = [Ready.from_data(data) for data in state["due"]]
        self._waiting, self.restarted = list(state["waiting"]), list(state["restarted"])
        self._turn, self._held = [], False
        rows, begun = (np.array(one, np.int64) for one in state["unread"])
        self._buffers.write_results(rows, begun, state["results"])
        if self._limit is not None:
            self._limit.load_state_dict(state["limit"])
        if self._repairs is not None:
            self._repairs.load_failures(state["failures"])


class ReadyPool(ReadySource):
    """The sub-environments of a :class:`~trawl.envs.batches.pool.Pool`.

    The sub-environments whose results are received together get their actions together.

    Args:
        env: the environment around the pool.
        pool: the pool.
        restarts: the collector's record of failures; None to raise errors.
    """

    def __init__(self, env: GymEnv, pool: Pool, restarts: EnvRestarts | None) -> None:
        self._env, self._pool = env, pool
        self._failures = None if restarts is None else FailureCounter(restarts, 0, pool.num_envs)
        self.broken: list[int] = []
        self.restarted: list[int] = []
        self._leaves = env.observation_codec.leaves
        self._keys = [as_key(leaf.key) for leaf in self._leaves]
        self._acted = [as_key(leaf.key) for leaf in env.action_codec.leaves]
        count = pool.num_envs
        self._stepping = np.zeros(count, np.bool_)
        # Sub-environments that have taken no step since the last failure.
        self._unproven = np.zeros(count, np.bool_)
        # The flag of steps that are only resets, for each sub-environment's next result.
        self._resetting = np.zeros(count, np.uint8)
        # Sub-environments to be reset after their step.
        self._late: Mask | None = None
        # Sub-environments to be reset once they are ready; their results are dropped.
        self._stale = np.zeros(count, np.bool_)
        self._has_stale = False
        # First observations of episodes that the last step has begun.
        self._begun: dict[Key, Array] = {}
        self._due: ReadyResults | None = None
        # Rows that were received and have no action yet.
        self._turn = NO_ROWS

    @override
    def start(self) -> Mapping[Key, Array]:
        self.reset(None)
        self.wait()
        assert self._due is not None
        count, found = self._pool.num_envs, dict[Key, Array]()
        for key, leaf in zip(self._keys, self._leaves, strict=True):
            array = self._due.results[key]
            leaf.check(array, (len(array),))
            found[key] = np.resize(array, (count, *array.shape[1:]))
        return found

    @override
    def set_action_dtypes(self, dtypes: Mapping[Key, np.dtype[Any]]) -> None:
        """Does nothing: each action is converted when it is sent."""

    @override
    def begin(self) -> None:
        """Does nothing: the pool determines which environments get actions."""

    @override
    def wait(self) -> None:
        while self._due is None:
            try:
                self._receive()
            except Exception as error:
                self._restart(error)

    def _receive(self) -> None:
        results = self._pool.receive()
        self._stepping[results.rows] = False
        if self._has_stale:
            results = self._without_stale(results)
        if len(results.rows):
            due = self._with_flags(results)
            self._turn = results.rows
            if self._late is not None:
                self._turn = self._turn[~self._stepping[self._turn]]
            if self._failures is not None and self._failures.failures:
                self._note_success(self._failures, due)
            self._due = due

    def _note_success(self, failures: FailureCounter, results: ReadyResults) -> None:
        """Clears the count of failures once each sub-environment has taken a step again."""
        self._unproven[results.rows[results.flags & AUTORESET == 0]] = False
        if not self._unproven.any():
            failures.failures = 0

    def _restart(self, error: Exception) -> None:
        """Makes the pool anew after an error; what its environments were doing is lost."""
        if self._failures is None:
            raise error
        when = f"after {self._failures.restarts.steps_done} frames of all"
        self._failures.restart(error, 0, self._rebuild, when=when)
        self.broken += range(self._pool.num_envs)

    def _rebuild(self) -> None:
        self._env.rebuild()
        pool = self._env.vector
        assert isinstance(pool, Pool)
        self._pool, self._due, self._late = pool, None, None
        self._stepping[:] = self._stale[:] = self._has_stale = False
        self._unproven[:] = True
        self.reset(None)

    def _without_stale(self, results: PoolResults) -> PoolResults:
        """Resets sub-environments that wait for it, and drops their results."""
        stale = self._stale[results.rows]
        if not stale.any():
            return results
        self._send_reset(results.rows[stale], {})
        self._stale[results.rows] = False
        self._has_stale = bool(self._stale.any())
        return results.only(~stale)

    def _with_flags(self, results: PoolResults) -> ReadyResults:
        rows, leaves, rewards, terminated, truncated, begun = results
        # The bits are TERMINATED and TRUNCATED.
        flags: NDArray[np.uint8] = terminated.view(np.uint8) | self._resetting[rows]
        flags |= truncated.view(np.uint8) << 1
        if flags.tobytes() != bytes(len(flags)):
            self._resetting[rows] = _NEXT[flags] if self._pool.resets_next else 0
            flags = _WITH_RESET[flags]
        if self._late is not None:
            late = self._late[rows] & (flags & (RESET | AUTORESET) == 0)
            flags[late] |= RESET
            if late.any():
                self._send_reset(rows[late], {})
        if begun is not None:
            self._note_begun(rows, begun)
        found = dict(zip(self._keys, leaves, strict=True))
        found["reward",] = rewards
        return ReadyResults(rows, found, flags)

    def _note_begun(self, rows: Rows, begun: list[Array]) -> None:
        for key, values in zip(self._keys, begun, strict=True):
            if key not in self._begun:
                shape = (self._pool.num_envs, *values.shape[1:])
                self._begun[key] = np.zeros(shape, values.dtype)
            self._begun[key][rows] = values

    @override
    def take(self, most: int, room: int) -> ReadyResults:
        due = self._due
        assert due is not None
        if len(due.rows) <= most:
            self._due = None
            return due
        self._due = due.only(slice(most, None))
        return due.only(slice(most))

    @override
    def begun(self, rows: Rows) -> Mapping[Key, Array]:
        return {key: array[rows] for key, array in self._begun.items()}

    @override
    def turn(self, room: int) -> Rows | None:
        return self._turn if self._due is None and len(self._turn) else None

    @override
    def send(self, actions: Mapping[Key, Array], late: Mask | None) -> None:
        rows = self._turn
        if late is not None:
            self._late = (
                np.zeros(self._pool.num_envs, np.bool_) if self._late is None else self._late
            )
            self._late[rows] = late
        action = self._env.action_codec.decode([actions[key] for key in self._acted])
        try:
            self._pool.send(action, rows)
        except Exception as error:
            self._restart(error)
        else:
            self._turn = NO_ROWS
            self._stepping[rows] = True

    @override
    def reset(self, mask: NDArray[np.bool_] | None, **kwargs: Any) -> Rows:
        seeds = self._env.pop_seeds()
        if seeds is not None:
            kwargs.setdefault("seed", seeds[0])
        with resetting(self._env):
            if self._pool.can_restart:
                chosen = np.ones_like(self._stepping) if mask is None else mask
                # Before the flags below change, because it may raise.
                stepping = self._stepping.copy()
                self._reset_some(chosen, kwargs)
                self._stale |= chosen & stepping
                self._has_stale = bool(self._stale.any())
            elif mask is None or mask.all():
                self._reset_all(kwargs)
            elif mask.any():
                name = type(self._pool.env).__name__
                raise ValueError(f"{name} can't reset only some of its sub-environments: reset all")
        return NO_ROWS

    def _reset_some(self, mask: NDArray[np.bool_], kwargs: dict[str, Any]) -> None:
        self._send_reset(np.flatnonzero(mask & ~self._stepping), kwargs)
        self._turn = self._turn[~mask[self._turn]]
        if self._due is not None:
            due = self._due.only(~mask[self._due.rows])
            self._due = due if len(due.rows) else None

    def _reset_all(self, kwargs: dict[str, Any]) -> None:
        pool = self._pool
        if self._stepping.any() and pool.num_envs % pool.ready_envs:
            raise ValueError(
                f"{type(pool.env).__name__} can be reset again only if batch_size divides "
                f"num_envs, but they are {pool.ready_envs} and {pool.num_envs}: it returns no "
                "results of fewer environments, so it can't finish the steps that are under way"
            )
        self._due, self._turn = None, NO_ROWS
        while self._stepping.any():
            self._stepping[pool.receive().rows] = False
        self._send_reset(np.arange(pool.num_envs), kwargs)

    def _send_reset(self, rows: Rows, kwargs: dict[str, Any]) -> None:
        self._pool.send_reset(rows, **kwargs)
        self._stepping[rows] = True
        self._resetting[rows] = AUTORESET

    @override
    def recover(self) -> None:
        """Does nothing: received results are kept, and actions that were not sent will be."""

    @override
    def settle(self) -> None:
        """Does nothing: the sub-environments can't be called."""

    @override
    def state_dict(self) -> dict[str, Any]:
        raise EnvStateError(f"the state of {self._env!r} can't be captured")

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        raise EnvStateError(f"no state can be restored in {self._env!r}")

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
