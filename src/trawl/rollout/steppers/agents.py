"""Stepper of PettingZoo environments."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.agents.pettingzoo import PettingZooEnv
from trawl.envs.outcomes import RESET_GIVES
from trawl.errors import resetting
from trawl.keys import DONE_KEYS, Key, next_of
from trawl.memory import Array
from trawl.rollout.batches import StepFn
from trawl.rollout.episodes import EpisodeEnds, EpisodeTracker, StepArrays
from trawl.rollout.steppers.arrays import EnvStepper, action_reader


class AgentStepper(EnvStepper[StepArrays]):
    """Steps one PettingZoo environment.

    Args:
        env: the environment.
    """

    num_envs = 1

    def __init__(self, env: PettingZooEnv) -> None:
        self.env = env
        arrays = env.arrays
        self.root_keys = [*arrays.observations, *(key for key in arrays.flags if key not in _ROOT)]
        self.agent_groups = list(env.group_map)

    @override
    def reset(self, view: StepArrays, mask: NDArray[np.bool_] | None, **kwargs: Any) -> None:
        if mask is not None and not mask[0]:
            return
        with resetting(self.env, f"; {RESET_GIVES}"):
            self.env.begin_episode(**kwargs)
        arrays = self.env.arrays
        for key, array in {**arrays.observations, **arrays.flags}.items():
            if key in view.next_obs:
                view.next_obs[key][0] = array

    @override
    def bind(self, view: StepArrays, episodes: EpisodeTracker, start: int, stop: int) -> StepFn:
        env, arrays, view = self.env, self.env.arrays, view.single()
        advance, begin_episode = env.advance, env.begin_episode
        # Indexing an array takes less time than making a list of its rows, each used only once.
        observed, rewards, flags = (
            [(array, view.arrays[next_of(key)][start:stop]) for key, array in found.items()]
            for found in (arrays.observations, arrays.rewards, arrays.flags)
        )
        # Entries that are passed on to the next step, with the flags of agents that are absent.
        passed = {k: array for k, array in arrays.flags.items() if k not in _ROOT}
        roots = _Roots(view, arrays.observations, start, stop)
        flag_roots = _Roots(view, passed, start, stop)
        inner, inner_flags, inside = roots.inner, flag_roots.inner, roots.inside
        read_actions = action_reader(env.action_codec, view, start, stop)
        ends = EpisodeEnds(view, episodes, start, stop, self.agent_groups)
        cutoff = ends.cutoff()

        def step(t: int) -> None:
            nonlocal cutoff
            advance(read_actions(t))
            for array, rows in rewards:
                rows[t] = array
            for array, rows in observed:
                rows[t] = array
            if arrays.flagged:
                for array, rows in flags:
                    rows[t] = array
            if arrays.done or t >= cutoff:
                cutoff = ends.end_marked(t)
                begin_episode()
            if t >= inside:
                roots.write_last()
                flag_roots.write_last()
                return
            for array, rows in inner:
                rows[t] = array
            if arrays.flagged:
                for array, rows in inner_flags:
                    rows[t] = array

        return step


class _Roots:
    """Entries from which the next steps begin.

    Args:
        view: the arrays of the environment.
        found: the arrays with the newest values, by key.
        start: first row of the chunk.
        stop: row after the last one of the chunk.

    Attributes:
        inner: each array, and the rows after those of the chunk.
        inside: number of these rows; a step at the end of the batch has no row after it.
    """

    def __init__(self, view: StepArrays, found: dict[Key, Array], start: int, stop: int) -> None:
        self.inner = [
            (array, view.arrays[key][start + 1 : stop + 1]) for key, array in found.items()
        ]
        self.inside = min((len(rows) for _, rows in self.inner), default=0)
        self._last = [(array, view.next_obs[key]) for key, array in found.items()]

    def write_last(self) -> None:
        """Writes the entries with which the next batch begins."""
        for array, target in self._last:
            target[...] = array


_ROOT = [(key,) for key in DONE_KEYS]
