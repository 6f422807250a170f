"""Restarts of an environment that fails while it is stepped in rows: it is rebuilt and goes on.

See :mod:`trawl.rollout.restarts`. The guard is the same for arrays and for tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from trawl.envs.logged import LoggedEnv
from trawl.keys import DONE
from trawl.rollout.batches import StepFn
from trawl.rollout.episodes import EpisodeTracker, discard_step, end_open
from trawl.rollout.restarts import EnvRestarts, FailureCounter
from trawl.rollout.steppers.arrays import EnvStepper


class GuardedStepper(EnvStepper[Any]):
    """Steps an environment, and rebuilds it after a failure.

    Args:
        env: the environment.
        make: function that returns a stepper for the environment as it is now.
        restarts: the collector's record of failures.
    """

    def __init__(
        self, env: Any, make: Callable[[], EnvStepper[Any]], restarts: EnvRestarts
    ) -> None:
        self._env, self._make, self._restarts = env, make, restarts
        self._stepper = make()
        self.num_envs, self.root_keys = self._stepper.num_envs, self._stepper.root_keys
        self._counter: FailureCounter | None = None

    @override
    def reset(self, view: Any, mask: Any, **kwargs: Any) -> None:
        self._stepper.reset(view, mask, **kwargs)

    @override
    def bind(self, view: Any, episodes: EpisodeTracker, start: int, stop: int) -> StepFn:
        if self._counter is None:
            self._counter = FailureCounter(self._restarts, view.first, self.num_envs)
        counter = self._counter
        step_env = self._stepper.bind(view, episodes, start, stop)

        def step(t: int) -> None:
            nonlocal step_env
            try:
                step_env(t)
            except Exception as error:
                self._recover(counter, error, view, episodes, start + t)
                # The old function is bound to the old environment.
                step_env = self._stepper.bind(view, episodes, start, stop)
            else:
                counter.failures = 0

        return step

    def _recover(
        self,
        counter: FailureCounter,
        error: Exception,
        view: Any,
        episodes: EpisodeTracker,
        row: int,
    ) -> None:
        # Flags are written after a step and before the reset that follows. If a flag is set, the
        # step succeeded and the reset failed.
        taken = bool(view.arrays[DONE][row].any())
        counter.restart(error, row, lambda: self._rebuild(view, row), taken)
        envs = range(self.num_envs)
        if taken:
            end_open(view, episodes, row, envs)
        else:
            discard_step(view, episodes, row, envs, self._stepper.agent_groups)
        if isinstance(self._env, LoggedEnv) and self._env.log is not None:
            self._env.log.skipped = row + 1

    def _rebuild(self, view: Any, row: int) -> None:
        # If the first reset fails, the environment could not be rebuilt.
        self._env.rebuild()
        self._stepper = self._make()
        self._stepper.begin_after(view, row)
