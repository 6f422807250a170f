"""Stepper for environments in their own processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.agents.groups import flagged_groups
from trawl.envs.processes.buffers import AUTORESET, RESET, TERMINATED, TRUNCATED
from trawl.envs.processes.parallel import ParallelEnv
from trawl.keys import Key, next_of
from trawl.memory import Array
from trawl.rollout.batches import StepFn
from trawl.rollout.episodes import EpisodeTracker, StepArrays, VectorEnds, discard_step
from trawl.rollout.restarts import EnvRestarts, ParallelRepairs
from trawl.rollout.steppers.arrays import ArrayStepper, from_bfloat16

_FLAGS = TERMINATED, TRUNCATED, RESET


class ParallelStepper(ArrayStepper):
    """Steps environments in other processes, all of them at once or in groups.

    A process resets its environment in the step that ends an episode or reaches the limit on
    steps. The step then also returns the first observation of the next episode.

    Args:
        env: the parallel environment, which has a fixed layout.
        restarts: the collector's record of failures; None to raise errors instead of restarting.
    """

    def __init__(self, env: ParallelEnv, restarts: EnvRestarts | None = None) -> None:
        self.env = env
        self.num_envs = env.batch_size.numel()
        self.agent_groups = flagged_groups(env)
        self._restarts = restarts
        self._repairs: ParallelRepairs | None = None
        #: Observations that the policy writes, under ``"next"``. Only resets give others.
        self.written: frozenset[Key] = frozenset()

    @override
    def reset(self, view: StepArrays, mask: NDArray[np.bool_] | None, **kwargs: Any) -> None:
        if mask is not None and not mask.any():
            return
        chosen = np.ones(self.num_envs, dtype=np.bool_) if mask is None else mask
        self.env.begin(mask, **kwargs)
        assert self.env.buffers is not None
        for key, begun in self.env.buffers.reset_observed.items():
            view.next_obs[key][chosen] = begun[chosen]

    @override
    def bind(self, view: StepArrays, episodes: EpisodeTracker, start: int, stop: int) -> StepFn:
        ((send, receive),) = self.bind_groups(view, episodes, start, stop, 1)

        def step(t: int) -> None:
            send(t)
            receive(t)

        return step

    def bind_groups(
        self, view: StepArrays, episodes: EpisodeTracker, start: int, stop: int, groups: int
    ) -> list[tuple[StepFn, StepFn]]:
        """Returns two functions of ``t`` for each group of environments.

        The first function begins step ``start + t`` of the group, and the second one ends it.

        Args:
            view: arrays of the batch.
            episodes: tracker of the environments' episodes.
            start: the first row.
            stop: the row after the last row.
            groups: number of groups.
        """
        self.env.processes.finish_step()
        if self._restarts is not None and self._repairs is None:
            self._repairs = ParallelRepairs(self.env, self._restarts, view.first)
        actions = self._actions(view, start, stop)
        return [
            self._bind_group(view, episodes, start, stop, actions, self.env.stepper(group, groups))
            for group in range(groups)
        ]

    def _bind_group(
        self,
        whole: StepArrays,
        episodes: EpisodeTracker,
        start: int,
        stop: int,
        actions: Sequence[tuple[Array, Array, bool]],
        stepper: tuple[slice, Callable[[bool], None], Callable[[], None]],
    ) -> tuple[StepFn, StepFn]:
        buffers, (chosen, begin, wait) = self.env.buffers, stepper
        assert buffers is not None
        count = chosen.stop - chosen.start
        view = whole.part(chosen.start, count)
        written = [(target[chosen], rows[:, chosen], short) for target, rows, short in actions]
        observed = [
            (array[chosen], rows)
            for key, array in buffers.observed.items()
            if key not in self.written
            for rows in (view.rows(next_of(key), start, stop), view.following(key, start, stop))
        ]
        rewards = [
            (array[chosen], view.arrays[next_of(key)][start:stop])
            for key, array in buffers.rewards.items()
        ]
        flags, cut, groups = buffers.flags[chosen], buffers.cut[chosen], self.agent_groups
        nothing, repairs = bytes(count), self._repairs
        ends = VectorEnds(view, episodes, start, stop, groups)
        copy_begun = _copier(
            (array[chosen], view.following(key, start, stop))
            for key, array in buffers.reset_observed.items()
        )

        def send(t: int) -> None:
            for target, rows, short in written:
                target[...] = from_bfloat16(rows[t]) if short else rows[t]
            if t >= ends.nearest:
                cut[:] = ends.late(t)
            begin(True)

        def receive(t: int) -> None:
            wait()
            failed = [] if repairs is None else repairs.restart(chosen, start + t)
            if t >= ends.nearest:
                cut[:] = False
            for source, values in rewards:
                values[t] = source
            for source, rows in observed:
                rows[t][...] = source
            if flags.tobytes() != nothing:
                bits = flags.copy()
                ends.skip(t, bits & AUTORESET != 0)
                terminated, truncated, done = (bits & bit != 0 for bit in _FLAGS)
                ends.end(t, terminated, truncated, done)
                copy_begun(t, done)
            if failed:
                discard_step(view, episodes, start + t, failed, groups)
                copy_begun(t, failed)
                ends.find_limits()

        return send, receive

    def _actions(self, view: StepArrays, start: int, stop: int) -> list[tuple[Array, Array, bool]]:
        """Returns each action's array in the shared memory, and the rows to be copied there.

        A flag says that the rows are of bfloat16, which have to be converted.
        """
        assert self.env.buffers is not None
        rows = {key: view.arrays[key][start:stop] for key in self.env.buffers.action_dtypes}
        dtypes = {
            key: np.dtype(np.float32) if key in view.bfloat16 else array.dtype
            for key, array in rows.items()
        }
        self.env.set_action_dtypes(dtypes)
        targets = self.env.buffers.actions
        return [(targets[key], array, key in view.bfloat16) for key, array in rows.items()]


def _copier(begun: Iterable[tuple[Array, list[Array]]]) -> Callable[[int, Any], None]:
    """Returns a function that lets the next step begin with the first observations of episodes.

    Args:
        begun: the first observations in the shared memory, and the rows of the next steps.
    """
    pairs = list(begun)

    def copy(t: int, envs: Any) -> None:
        for first, rows in pairs:
            rows[t][envs] = first[envs]

    return copy
