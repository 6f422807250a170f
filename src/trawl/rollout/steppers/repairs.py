"""Restarts of environments in other processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from trawl.envs.processes.parallel import ParallelEnv
from trawl.rollout.steppers.restarts import EnvRestarts, FailureCounter


class ParallelRepairs:
    """Restarts the environments of a :class:`ParallelEnv` that fail, or whose process dies.

    Args:
        env: the environments.
        restarts: the collector's record of failures.
        first: index of the first environment in the batch.
    """

    def __init__(self, env: ParallelEnv, restarts: EnvRestarts, first: int = 0) -> None:
        env.processes.tolerant = True
        assert env.buffers is not None
        self._env, self._processes, self._buffers = env, env.processes, env.buffers
        per_env = env.buffers.rows_per_env
        self._counters = [
            FailureCounter(restarts, first + index * per_env, per_env)
            for index in range(env.num_workers)
        ]
        # Errors of environments whose group is not waited for yet, and environments without a
        # successful step since their last failure.
        self._errors: dict[int, Exception] = {}
        self._failing: set[int] = set()

    def restart(self, chosen: slice, row: int) -> list[int]:
        """Restarts the environments of a group that have failed in a step.

        Args:
            chosen: rows of the group's environments.
            row: row of the step in the batch.

        Returns:
            The rows of the failed environments, counted from the group's first row.

        Raises:
            Exception: the error of an environment that fails again and again.
        """
        self._errors |= self._processes.take_failures()
        if not (self._errors or self._failing):
            return []
        buffers = self._buffers
        group = range(chosen.start // buffers.rows_per_env, chosen.stop // buffers.rows_per_env)
        failed: set[int] = set()
        while found := {env: self._errors.pop(env) for env in group if env in self._errors}:
            failed |= found.keys()
            for env, error in found.items():
                self.begin(env, error, row)
            self._processes.wait_for_restarts()
            self._errors |= self._processes.take_failures()
        self.succeeded(env for env in group if env not in failed)
        places = [buffers.rows(env) for env in sorted(failed)]
        rows = [row for place in places for row in range(place.start, place.stop)]
        # The step left nothing valid there.
        buffers.discard(rows)
        return [row - chosen.start for row in rows]

    def begin(self, env: int, error: Exception, row: int, when: str | None = None) -> None:
        """Begins to restart an environment.

        Args:
            env: number of the environment.
            error: the error.
            row: row of the step in the batch.
            when: text that says when it failed; by default, the number of the step.

        Raises:
            Exception: ``error``, if the environment fails again and again.
        """
        self._failing.add(env)
        rebuild = partial(self._env.begin_restart, env)
        self._counters[env].restart(error, row, rebuild, when=when)

    def succeeded(self, envs: Iterable[int]) -> None:
        """Notes that environments have taken a step without failing."""
        if self._failing:
            for env in self._failing.intersection(envs):
                self._counters[env].failures = 0
                self._failing.discard(env)

    def failures(self) -> list[int]:
        """Returns the number of failures of each environment since its last successful step."""
        return [counter.failures for counter in self._counters]

    def load_failures(self, failures: Sequence[int]) -> None:
        """Restores what :meth:`failures` has returned."""
        for counter, count in zip(self._counters, failures, strict=True):
            counter.failures = count
        self._failing = {env for env, count in enumerate(failures) if count}
