"""Stepper for environments in their own processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl import keys
from trawl.envs.parallel import ParallelEnv
from trawl.envs.step_buffers import AUTORESET, RESET, TERMINATED, TRUNCATED, SharedStepBuffers
from trawl.keys import MASK, Key, next_of
from trawl.memory import Array
from trawl.rollout.array_stepper import ArrayStepper, from_bfloat16
from trawl.rollout.batch_writer import StepFn
from trawl.rollout.env_restarts import EnvRestarts
from trawl.rollout.episodes import EpisodeTracker, StepArrays, discard_step
from trawl.rollout.parallel_repairs import ParallelRepairs


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
        actions: Sequence[tuple[Array, Array | _Floats]],
        stepper: tuple[slice, Callable[[bool], None], Callable[[], None]],
    ) -> tuple[StepFn, StepFn]:
        buffers, (chosen, begin, wait) = self.env.buffers, stepper
        assert buffers is not None
        count = chosen.stop - chosen.start
        view = whole.part(chosen.start, count)
        written = [(target[chosen], rows[:, chosen]) for target, rows in actions]
        observed = [
            (array[chosen], rows)
            for key, array in buffers.observed.items()
            if key not in self.written
            for rows in (view.rows(next_of(key), start, stop), view.following(key, start, stop))
        ]
        rewards = view.arrays[keys.REWARD][start:stop, :, 0]
        flags, given, cut = buffers.flags[chosen], buffers.rewards[chosen], buffers.cut[chosen]
        nothing, repairs = bytes(count), self._repairs
        ends = _GroupEnds(view, episodes, buffers, chosen, start, stop)
        nearest = ends.nearest

        def send(t: int) -> None:
            for target, rows in written:
                target[...] = rows[t]
            if t >= nearest:
                cut[:] = ends.late(t)
            begin(True)

        def receive(t: int) -> None:
            nonlocal nearest
            wait()
            failed = [] if repairs is None else repairs.restart(chosen, start + t)
            if t >= nearest:
                cut[:] = False
            rewards[t] = given
            for source, rows in observed:
                rows[t][...] = source
            if flags.tobytes() != nothing:
                ends.write(t)
                nearest = ends.nearest
            if failed:
                ends.discard(t, failed)
                nearest = ends.nearest

        return send, receive

    def _actions(
        self, view: StepArrays, start: int, stop: int
    ) -> list[tuple[Array, Array | _Floats]]:
        """Returns each action's array in the shared memory, and the rows to be copied there."""
        assert self.env.buffers is not None
        rows: dict[Key, Array | _Floats] = {}
        dtypes: dict[Key, np.dtype[Any]] = {}
        for key in self.env.buffers.action_dtypes:
            array = view.arrays[key][start:stop]
            rows[key] = _Floats(array) if key in view.bfloat16 else array
            dtypes[key] = np.dtype(np.float32) if key in view.bfloat16 else array.dtype
        self.env.set_action_dtypes(dtypes)
        return [(target, rows[key]) for key, target in self.env.buffers.actions.items()]


class _GroupEnds:
    """Ends of the episodes of a group of environments, in a chunk of rows.

    Args:
        view: the arrays of the group.
        episodes: tracker of all environments' episodes.
        buffers: the memory that the processes share.
        chosen: rows of the group in the shared memory.
        start: the first row of the chunk.
        stop: the row after its last row.

    Attributes:
        nearest: the first step of the chunk that may bring an episode to the limit.
    """

    def __init__(
        self,
        view: StepArrays,
        episodes: EpisodeTracker,
        buffers: SharedStepBuffers,
        chosen: slice,
        start: int,
        stop: int,
    ) -> None:
        self._view, self._episodes, self._start = view, episodes, start
        self._flags = buffers.flags[chosen]
        self._begun = [
            (array[chosen], view.following(key, start, stop))
            for key, array in buffers.reset_observed.items()
        ]
        self._terminations, self._truncations, self._dones = (
            view.arrays[key][start:stop, :, 0]
            for key in (keys.TERMINATED, keys.TRUNCATED, keys.DONE)
        )
        self._masks = view.arrays.get(MASK)
        self._find_limits()

    def _find_limits(self) -> None:
        first, start = self._view.first, self._start
        envs = range(first, first + len(self._flags))
        self._limits = [self._episodes.cutoff(env) - start for env in envs]
        self.nearest = min(self._limits)

    def late(self, t: int) -> list[bool]:
        """Returns True for each environment whose episode is at the limit after step ``t``."""
        return [t >= limit for limit in self._limits]

    def write(self, t: int) -> None:
        """Writes the flags of step ``t``, ends episodes, and begins the next ones."""
        bits, first, row = self._flags.copy(), self._view.first, self._start + t
        autoresets = np.flatnonzero(bits & AUTORESET)
        if self._masks is not None and autoresets.size:
            self._masks[row, autoresets] = False
            for index in autoresets:
                self._episodes.skip(first + int(index), row)
        self._terminations[t] = bits & TERMINATED
        self._truncations[t] = (bits & TRUNCATED).astype(np.bool_) | np.array(self.late(t))
        self._dones[t] = done = (bits & RESET).astype(np.bool_)
        for index in np.flatnonzero(done):
            self._episodes.end(first + int(index), row)
        self._copy_begun(t, done)
        self._find_limits()

    def discard(self, t: int, failed: list[int]) -> None:
        """Discards step ``t`` of environments that have failed, and begins new episodes."""
        discard_step(self._view, self._episodes, self._start + t, failed)
        self._copy_begun(t, failed)
        self._find_limits()

    def _copy_begun(self, t: int, envs: Any) -> None:
        """Makes the first observations of episodes those with which the next step begins."""
        for begun, rows in self._begun:
            rows[t][envs] = begun[envs]


class _Floats:
    """Rows of bfloat16 that are converted to float32 when they are read."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            return _Floats(self._array[index])
        return from_bfloat16(self._array[index])
