"""Environments in other processes that step each at its own pace."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trawl.envs.processes.parallel import ParallelEnv

Rows = NDArray[np.int64]
#: Function that begins to restart an environment, or raises the error that it is given.
Restart = Callable[[int, Exception], None]


class Ready(NamedTuple):
    """Process whose environments wait for actions.

    Attributes:
        process: number of the process.
        rows: rows of the environments that have taken a step.
        restarted: rows of the environments that were restarted instead.
    """

    process: int
    rows: Rows
    restarted: Rows

    def as_data(self) -> list[Any]:
        """Returns the fields as numbers and lists."""
        return [self.process, self.rows.tolist(), self.restarted.tolist()]

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> Ready:
        """Returns what :meth:`as_data` converted."""
        process, rows, restarted = data
        return cls(process, np.array(rows, np.int64), np.array(restarted, np.int64))


class ReadyEnvs:
    """Steps the environments of a :class:`ParallelEnv` without waiting for all of them.

    A process and its environments become ready together, once all of them have taken their step.

    Args:
        env: the environments, whose data has a fixed layout.
        least: number of environments to wait for.
        most: maximum number of environments that are returned at once.
        patience: seconds after the first ready environment in which the others are waited for.
        restart: function that is called if an environment fails; None to raise the error.
        succeeded: function that is called with the environments of a process that have taken a
            step.

    Attributes:
        most: maximum number of processes that are returned at once.
        rows: the rows of each process's environments.
        ready: processes that are ready, and that :meth:`wait` has not returned yet.
        broken: rows of the environments that have failed. The user of the object clears it.
    """

    def __init__(
        self,
        env: ParallelEnv,
        least: int,
        most: int,
        patience: float,
        restart: Restart | None = None,
        succeeded: Callable[[range], None] = lambda _: None,
    ) -> None:
        assert env.buffers is not None
        self._processes = env.processes
        self._restart, self._succeeded = restart, succeeded
        self._per_env = env.buffers.rows_per_env
        self._least, self._patience = least, patience
        self.most = max(1, most // env.envs_per_worker)
        if most >= env.num_workers:
            # The last process may have fewer environments.
            self.most = env.processes.count
        self._envs = [env.processes.started.envs_of(index) for index in range(env.processes.count)]
        self.rows: list[Rows] = [self._rows_of(envs) for envs in self._envs]
        self.broken: list[int] = []
        # The numbers of the steps that processes take, and that they have taken.
        self._numbers, self._answers = map(np.asarray, (env.buffers.numbers, env.buffers.answers))
        self._stepping = np.zeros(len(self.rows), np.bool_)
        self.ready: list[Ready] = []
        # Environments that have failed since their process became ready, by process.
        self._failed: dict[int, set[int]] = {}
        # Rows of environments that have failed since the last call of wait() or finish().
        self._found_broken: list[int] = []
        # Error that settle() has raised. The environment that it came from must be reset.
        self._error: Exception | None = None

    def _rows_of(self, envs: range | set[int]) -> Rows:
        """Returns the rows of environments, in order."""
        starts = np.array(sorted(envs), np.int64) * self._per_env
        return (starts[:, None] + np.arange(self._per_env)).ravel()

    def begin(self, processes: Sequence[int]) -> None:
        """Begins a step of some processes, with the actions in the shared memory.

        Processes that are stepping are left out.
        """
        idle = [process for process in processes if not self._stepping[process]]
        self._processes.begin_step(idle, self._stepping)

    def wake_late(self) -> None:
        """Wakes processes that are to take a step, in case an exception prevented that."""
        self._processes.wake_late()

    def wait(self) -> list[Ready]:
        """Waits until environments are ready, and returns their processes, in order.

        If more than ``most`` environments are ready, those that became ready first are returned.

        Raises:
            WorkerError: if an environment failed; it is also an instance of the original
                exception's type.
            WorkerDied: if a process has died.
        """
        if self._error is not None:
            raise self._error
        # Some environments may always be ready. The failures of others must be noticed, too.
        self._processes.wait_for_answers(0)
        self._look()
        while not self.ready:
            if not self._is_busy:
                raise RuntimeError("no environment is stepping, so none can become ready")
            self._processes.wait_for_answers()
            self._look()
        if self._lacks():
            deadline = time.perf_counter() + self._patience
            while self._lacks() and (left := deadline - time.perf_counter()) > 0:
                self._processes.wait_for_answers(None if left == math.inf else left)
                self._look()
        chosen, self.ready = self.ready[: self.most], self.ready[self.most :]
        return self._returned(chosen)

    def finish(self) -> list[Ready]:
        """Waits until no process is stepping, and returns those that are ready, in order.

        An environment whose step has failed is ready, too, without a frame.
        """
        self._error = None
        if self._restart is not None:
            self._processes.wait_for_answers(0)
            self._look()
        while self._is_busy:
            self._processes.finish_step()
            self._processes.wait_for_restarts()
            self._look()
        chosen, self.ready = self.ready, []
        return self._returned(chosen)

    def settle(self) -> None:
        """Waits until no process is stepping. Those that are ready are returned later.

        Raises:
            WorkerError: if an environment failed. Later calls of :meth:`wait` raise it as well.
            WorkerDied: if a process has died.
        """
        if self._error is not None:
            raise self._error
        try:
            # In case an exception prevented it.
            self._processes.wake_late()
            self._processes.wait_for_answers(0)
            self._look()
            while self._is_busy:
                self._processes.wait_for_answers()
                self._look()
        except Exception as error:
            self._error = error
            raise

    def state_dict(self) -> dict[str, Any]:
        """Returns which environments are ready, and which have failed, after :meth:`settle`."""
        return {
            "ready": [ready.as_data() for ready in self.ready],
            "broken": [*self.broken, *self._found_broken],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned; the steps under way are dropped."""
        self.finish()
        self.broken.clear()
        self.ready = [Ready.from_data(data) for data in state["ready"]]
        self._found_broken = list(state["broken"])

    @property
    def _is_busy(self) -> bool:
        """True while processes are stepping, or environments are being restarted."""
        return bool(self._stepping.any()) or bool(self._failed)

    def _returned(self, chosen: list[Ready]) -> list[Ready]:
        """Returns processes in order; the environments that were found to have failed are shown."""
        if self._found_broken:
            self.broken += sorted(self._found_broken)
            self._found_broken.clear()
        return sorted(chosen, key=lambda ready: ready.process)

    def _lacks(self) -> bool:
        """Returns True if more environments have to be waited for, and may become ready."""
        ready = sum(len(self._envs[ready.process]) for ready in self.ready)
        return ready < self._least and bool(self._stepping.any())

    def _look(self) -> None:
        """Notes the processes that have become ready, and the environments that have failed."""
        if self._restart is not None:
            self._look_for_failures(self._restart)
        answered = np.abs(self._answers) == self._numbers
        for process in np.flatnonzero(self._stepping & answered).tolist():
            if self._answers[process] < 0 and process not in self._failed:
                # The message with the error is there, but may not have been read yet.
                self._processes.wait_for_answers(0)
                if self._restart is None:
                    # The error was raised, and the next reset makes the environment usable again.
                    nothing = self.rows[process][:0]
                    self._stepping[process] = False
                    self.ready.append(Ready(process, nothing, nothing))
                    continue
                self._look_for_failures(self._restart)
            if process in self._failed and not self._is_restarted(process):
                continue
            self._stepping[process] = False
            failed = self._failed.pop(process, set())
            if failed:
                kept = set(self._envs[process]) - failed
                self.ready.append(Ready(process, self._rows_of(kept), self._rows_of(failed)))
            else:
                self._succeeded(self._envs[process])
                self.ready.append(Ready(process, self.rows[process], self.rows[process][:0]))

    def _is_restarted(self, process: int) -> bool:
        return self._processes.restarting.isdisjoint(self._envs[process])

    def _look_for_failures(self, restart: Restart) -> None:
        """Begins to restart the environments that have failed."""
        for env, error in self._processes.take_failures().items():
            process = env // len(self._envs[0])
            # A process that was ready may have died since. Its frames are still in shared memory,
            # but its environments have to begin anew.
            self._stepping[process] = True
            self.ready = [ready for ready in self.ready if ready.process != process]
            self._failed.setdefault(process, set()).add(env)
            self._found_broken += self._rows_of({env}).tolist()
            restart(env, error)
