"""Stepper for environments in their own processes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl import keys
from trawl.envs.parallel import ParallelEnv
from trawl.envs.step_buffers import AUTORESET, RESET, TERMINATED, TRUNCATED
from trawl.keys import MASK, Key, next_of
from trawl.memory import Array
from trawl.rollout.array_stepper import ArrayStepper, from_bfloat16
from trawl.rollout.batch_writer import StepFn
from trawl.rollout.episodes import EpisodeTracker, StepArrays


class ParallelStepper(ArrayStepper):
    """Steps environments in other processes, all of them at once.

    A process resets its environment in the step that ends an episode or reaches the limit on
    steps. The step then also returns the first observation of the next episode.

    Args:
        env: the parallel environment, which has a fixed layout.
    """

    def __init__(self, env: ParallelEnv) -> None:
        self.env = env
        self.num_envs = env.batch_size.numel()

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
        buffers, first, num_envs = self.env.buffers, view.first, self.num_envs
        assert buffers is not None
        finish_step, advance = self.env.finish_step, self.env.advance
        actions = self._actions(view, start, stop)
        observed = [
            (buffers.observed[key], view.rows(next_of(key), start, stop))
            for key in buffers.observed
        ]
        roots = [
            (array, buffers.reset_observed[key], view.following(key, start, stop))
            for key, array in buffers.observed.items()
        ]
        rewards, terminations, truncations, dones = (
            view.arrays[key][start:stop, :, 0]
            for key in (keys.REWARD, keys.TERMINATED, keys.TRUNCATED, keys.DONE)
        )
        masks = view.arrays.get(MASK)
        flags, given = buffers.flags, buffers.rewards
        nothing = bytes(num_envs)

        def cutoffs() -> list[int]:
            return [episodes.cutoff(first + index) - start for index in range(num_envs)]

        limits = cutoffs()
        nearest = min(limits)

        def note(t: int) -> None:
            """Handles the flags of step ``t``."""
            nonlocal limits, nearest
            bits = flags.copy()
            autoresets = np.flatnonzero(bits & AUTORESET)
            if masks is not None and autoresets.size:
                masks[start + t, first + autoresets] = False
                for index in autoresets:
                    episodes.skip(first + int(index), start + t)
            late = np.array([t >= limit for limit in limits])
            terminations[t] = bits & TERMINATED
            truncations[t] = (bits & TRUNCATED).astype(np.bool_) | late
            dones[t] = done = (bits & RESET).astype(np.bool_)
            for index in np.flatnonzero(done):
                episodes.end(first + int(index), start + t)
            for _, begun, rows in roots:
                rows[t][done] = begun[done]
            limits = cutoffs()
            nearest = min(limits)

        def step(t: int) -> None:
            finish_step()
            for target, rows in actions:
                target[...] = rows[t]
            if t >= nearest:
                buffers.cut[:] = [t >= limit for limit in limits]
                advance()
                buffers.cut[:] = False
            else:
                advance()
            rewards[t] = given
            for source, rows in observed:
                rows[t][...] = source
            for source, _, rows in roots:
                rows[t][...] = source
            if flags.tobytes() != nothing:
                note(t)

        return step

    def _actions(self, view: StepArrays, start: int, stop: int) -> list[tuple[Array, Any]]:
        """Returns each action's array in the shared memory, and the rows to be copied there."""
        assert self.env.buffers is not None
        rows: dict[Key, list[Array]] = {}
        for key in self.env.buffers.action_dtypes:
            rows[key] = view.rows(key, start, stop)
            if key in view.bfloat16:
                rows[key] = _Floats(rows[key])
        self.env.set_action_dtypes({key: arrays[0].dtype for key, arrays in rows.items()})
        return [(target, rows[key]) for key, target in self.env.buffers.actions.items()]


class _Floats(list[Array]):
    """Rows of bfloat16 that are converted to float32 when they are read."""

    def __getitem__(self, t: Any) -> Any:
        return from_bfloat16(super().__getitem__(t))
