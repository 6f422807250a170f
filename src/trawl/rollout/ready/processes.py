"""Environments in other processes as a source of results in the order in which they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.processes.buffers import RESET
from trawl.envs.processes.parallel import ParallelEnv
from trawl.envs.processes.ready import Ready, ReadyEnvs, Rows
from trawl.errors import StateError
from trawl.keys import Key
from trawl.memory import Array, Mask
from trawl.rollout.ready.serving import Batching, ServingOptions, lag_limit
from trawl.rollout.ready.source import NO_ROWS, ReadyResults, ReadySource
from trawl.rollout.steppers.restarts import EnvRestarts, ParallelRepairs


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
