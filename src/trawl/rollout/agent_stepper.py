"""Stepper of PettingZoo environments."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.outcomes import RESET_GIVES
from trawl.envs.pettingzoo import PettingZooEnv, decoder
from trawl.errors import resetting
from trawl.keys import DONE_KEYS, next_of
from trawl.rollout.array_stepper import ArrayStepper, from_bfloat16
from trawl.rollout.batch_writer import StepFn
from trawl.rollout.episodes import EpisodeTracker, StepArrays


class AgentStepper(ArrayStepper):
    """Steps one PettingZoo environment.

    Args:
        env: the environment.
    """

    num_envs = 1

    def __init__(self, env: PettingZooEnv) -> None:
        self.env = env

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
        env, arrays, index, view = self.env, self.env.arrays, view.first, view.single()
        advance, begin_episode = env.advance, env.begin_episode
        observed = [
            (array, view.rows(next_of(key), start, stop), view.following(key, start, stop))
            for key, array in arrays.observations.items()
        ]
        rewards = [
            (array, view.rows(next_of(key), start, stop)) for key, array in arrays.rewards.items()
        ]
        flags = [
            (array, view.rows(next_of(key), start, stop)) for key, array in arrays.flags.items()
        ]
        # The flags of agents that are absent are passed on to the next step.
        passed = [
            (array, view.following(key, start, stop))
            for key, array in arrays.flags.items()
            if key not in _ROOT
        ]
        read_actions = self._action_reader(view, start, stop)
        cutoff = episodes.cutoff(index) - start

        def step(t: int) -> None:
            nonlocal cutoff
            advance(read_actions(t))
            if t >= cutoff:
                arrays.cut_off()
            for array, rows in rewards:
                rows[t][...] = array
            if arrays.flagged:
                for array, rows in flags:
                    rows[t][...] = array
            if arrays.done:
                for array, rows, _ in observed:
                    rows[t][...] = array
                episodes.end(index, start + t)
                cutoff = episodes.cutoff(index) - start
                begin_episode()
                for array, _, following in observed:
                    following[t][...] = array
            else:
                for array, rows, following in observed:
                    rows[t][...] = following[t][...] = array
            if arrays.flagged:
                for array, following in passed:
                    following[t][...] = array

        return step

    def _action_reader(self, view: StepArrays, start: int, stop: int) -> Any:
        """Returns a function that reads row ``t``'s action of each agent."""
        parts = []
        for group in self.env.agent_groups:
            keys = [(group.name, *leaf.key) for leaf in group.acted.leaves]
            leaves = [(key in view.bfloat16, view.rows(key, start, stop)) for key in keys]
            parts.append((group.agents, decoder(group.acted), leaves))

        def read(t: int) -> dict[str, Any]:
            actions: dict[str, Any] = {}
            for agents, decode, leaves in parts:
                rows = [from_bfloat16(own[t]) if cast else own[t] for cast, own in leaves]
                actions.update(zip(agents, decode(rows), strict=True))
            return actions

        return read


_ROOT = [(key,) for key in DONE_KEYS]
