"""Choice of steppers, and a stepper that rebuilds its environment after a failure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.gym import GymEnv
from trawl.envs.parallel import ParallelEnv
from trawl.envs.pettingzoo import PettingZooEnv
from trawl.envs.serial import SerialEnv
from trawl.envs.tensor_env import TensorEnv
from trawl.keys import DONE, MASK
from trawl.rollout.agent_stepper import AgentStepper
from trawl.rollout.array_stepper import (
    ArrayStepper,
    EnvStepper,
    SerialStepper,
    SingleStepper,
    TensorRowsStepper,
    VectorStepper,
)
from trawl.rollout.batch_writer import StepFn
from trawl.rollout.dm_stepper import DMStepper, has_named_arrays
from trawl.rollout.env_restarts import EnvRestarts, FailureCounter
from trawl.rollout.episodes import EpisodeTracker, StepArrays, discard_step, truncate
from trawl.rollout.parallel_stepper import ParallelStepper


def make_stepper(env: Any, restarts: EnvRestarts | None) -> ArrayStepper:
    """Returns the stepper for an environment of fixed layout.

    Args:
        env: the environment.
        restarts: the collector's record of failures; None to raise errors instead of restarting.
    """
    if isinstance(env, SerialEnv):
        return SerialStepper([make_stepper(child, restarts) for child in env.envs])
    if isinstance(env, ParallelEnv):
        return ParallelStepper(env, restarts)
    return _unguarded_stepper(env) if restarts is None else RestartingStepper(env, restarts)


def _unguarded_stepper(env: GymEnv | PettingZooEnv | TensorEnv) -> EnvStepper:
    if isinstance(env, TensorEnv):
        return TensorRowsStepper(env)
    if isinstance(env, PettingZooEnv):
        return AgentStepper(env)
    if env.vector is not None:
        return VectorStepper(env)
    return DMStepper(env) if has_named_arrays(env) else SingleStepper(env)


class RestartingStepper(ArrayStepper):
    """Steps an environment on arrays, and rebuilds it after a failure.

    Args:
        env: the environment.
        restarts: the collector's record of failures.
    """

    def __init__(self, env: GymEnv | PettingZooEnv | TensorEnv, restarts: EnvRestarts) -> None:
        self.env = env
        self._stepper = _unguarded_stepper(env)
        self.num_envs = self._stepper.num_envs
        self._restarts = restarts
        self._counter: FailureCounter | None = None

    @override
    def reset(self, view: StepArrays, mask: NDArray[np.bool_] | None, **kwargs: Any) -> None:
        self._stepper.reset(view, mask, **kwargs)

    @override
    def bind(self, view: StepArrays, episodes: EpisodeTracker, start: int, stop: int) -> StepFn:
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
        view: StepArrays,
        episodes: EpisodeTracker,
        row: int,
    ) -> None:
        # Flags are written after a step and before the reset that follows. If a flag is set, the
        # step succeeded and the reset failed.
        taken = bool(view.arrays[DONE][row].any())
        counter.restart(error, row, lambda: self._rebuild(view), taken)
        if taken:
            _end_episodes(view, episodes, row)
        else:
            discard_step(view, episodes, row, range(self.num_envs), self._stepper.agent_groups)
        if self.env.log is not None:
            self.env.log.skipped = row + 1
        for key in self._stepper.root_keys:
            rows = view.arrays[key]
            if row + 1 < len(rows):
                rows[row + 1] = view.next_obs[key]

    def _rebuild(self, view: StepArrays) -> None:
        self.env.rebuild()
        self._stepper = _unguarded_stepper(self.env)
        self._stepper.reset(view, None)


def _end_episodes(view: StepArrays, episodes: EpisodeTracker, row: int) -> None:
    """Ends the episodes that were still running after the successful step in ``row``."""
    done, mask = view.arrays[DONE], view.arrays[MASK]
    for index in np.flatnonzero(mask[row] & ~done[row, :, 0]):
        truncate(view, row, int(index))
        episodes.end(view.first + int(index), row)
