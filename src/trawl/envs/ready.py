"""Environments in other processes that step each at its own pace."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from trawl.envs.parallel import ParallelEnv

Rows = NDArray[np.int64]


class ReadyEnvs:
    """Steps the environments of a :class:`ParallelEnv` without waiting for all of them.

    A process and its environments become ready together, once all of them have taken their step.

    Args:
        env: the environments, whose data has a fixed layout.
        least: number of environments to wait for.
        most: maximum number of environments that are returned at once.
        patience: seconds after the first ready environment in which the others are waited for.

    Attributes:
        rows: the rows of each process's environments.
    """

    def __init__(self, env: ParallelEnv, least: int, most: int, patience: float) -> None:
        assert env.buffers is not None
        self._env = env
        per_env = env.batch_size.numel() // env.num_workers
        self._least, self._patience = least, patience
        self._most = max(1, most // env.envs_per_worker)
        size = env.envs_per_worker * per_env
        count = env.batch_size.numel()
        self.rows: list[Rows] = [
            np.arange(first, min(first + size, count)) for first in range(0, count, size)
        ]
        self._envs_of = [len(rows) // per_env for rows in self.rows]
        # The numbers of the steps that processes take, and that they have taken.
        self._numbers, self._answers = map(np.asarray, (env.buffers.numbers, env.buffers.answers))
        self._stepping = np.zeros(len(self.rows), np.bool_)
        self._ready: list[int] = []

    def begin(self, processes: Sequence[int]) -> None:
        """Begins a step of some processes, with the actions in the shared memory."""
        self._stepping[processes] = True
        self._env.begin_step(processes)

    def wait(self) -> list[int]:
        """Waits until environments are ready, and returns their processes, in order.

        If more than ``most`` environments are ready, those that became ready first are returned.

        Raises:
            WorkerError: if an environment failed; it is also an instance of the original
                exception's type.
            WorkerDied: if a process has died.
        """
        # Some environments may always be ready. The failures of others must be noticed, too.
        self._env.wait_for_answers(0)
        self._look()
        while not self._ready:
            self._env.wait_for_answers()
            self._look()
        if self._lacks():
            deadline = time.perf_counter() + self._patience
            while self._lacks() and (left := deadline - time.perf_counter()) > 0:
                self._env.wait_for_answers(None if left == math.inf else left)
                self._look()
        chosen, self._ready = self._ready[: self._most], self._ready[self._most :]
        return sorted(chosen)

    def finish(self) -> list[int]:
        """Waits until no process is stepping, and returns those that are ready."""
        self._env.finish_step()
        self._look()
        chosen, self._ready = self._ready, []
        return chosen

    def _lacks(self) -> bool:
        """Returns True if more environments have to be waited for, and may become ready."""
        ready = sum(self._envs_of[index] for index in self._ready)
        return ready < self._least and bool(self._stepping.any())

    def _look(self) -> None:
        """Notes the processes that have become ready."""
        found = np.flatnonzero(self._stepping & (self._answers == self._numbers))
        self._stepping[found] = False
        self._ready += found.tolist()

    def envs(self, processes: Iterable[int]) -> int:
        """Returns the number of environments in some processes."""
        return sum(self._envs_of[index] for index in processes)
