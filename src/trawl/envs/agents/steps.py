"""Steps of PettingZoo environments, parallel and AEC, in one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trawl.envs.outcomes import reset_results, step_results

_NOT_STARTED = "the environment has no agents after a reset"


class AgentResults(NamedTuple):
    """Results of a step or a reset, each by agent.

    Attributes:
        observations: observations of the agents that are present.
        rewards: their rewards.
        terminations: True for agents that reached a terminal state.
        truncations: True for agents that were cut off.
        infos: further data.
        acting: agents that act next.
        over: True if no agent is left.
    """

    observations: Mapping[str, Any]
    rewards: Mapping[str, Any]
    terminations: Mapping[str, Any]
    truncations: Mapping[str, Any]
    infos: Mapping[str, Any]
    acting: tuple[str, ...]
    over: bool


class ParallelSteps:
    """Steps of an environment whose agents act at the same time.

    Args:
        env: a ``pettingzoo.ParallelEnv``.
    """

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, **kwargs: Any) -> AgentResults:
        """Begins an episode."""
        observations, infos = reset_results(self.env.reset(**kwargs), self.env)
        acting = tuple(self.env.agents)
        if not acting:
            raise RuntimeError(f"{self.env}: {_NOT_STARTED}")
        return AgentResults(observations, {}, {}, {}, infos, acting, False)

    def step(self, actions: dict[str, Any]) -> AgentResults:
        """Takes a step with the actions of the agents that act."""
        found = step_results(self.env.step(actions), self.env)
        observations, rewards, terminations, truncations, infos = found
        acting = tuple(self.env.agents)
        return AgentResults(
            observations, rewards, terminations, truncations, infos, acting, not acting
        )


class TurnSteps:
    """Steps of an environment whose agents act in turn.

    PettingZoo asks for an action of None from each agent that has terminated. These steps carry no
    data, so they are taken here.

    Args:
        env: a ``pettingzoo.AECEnv``.
    """

    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, **kwargs: Any) -> AgentResults:
        """Begins an episode."""
        self.env.reset(**kwargs)
        if not self.env.agents:
            raise RuntimeError(f"{self.env}: {_NOT_STARTED}")
        return self._read()

    def step(self, actions: dict[str, Any]) -> AgentResults:
        """Takes the step of the agent whose turn it is."""
        self.env.step(actions[self.env.agent_selection])
        return self._read()

    def _read(self) -> AgentResults:
        env, agents = self.env, list(self.env.agents)
        terminations = {agent: env.terminations[agent] for agent in agents}
        truncations = {agent: env.truncations[agent] for agent in agents}
        observations = {agent: env.observe(agent) for agent in agents}
        rewards = {agent: env.rewards[agent] for agent in agents}
        infos = {agent: env.infos.get(agent, {}) for agent in agents}
        over = all(terminations[agent] or truncations[agent] for agent in agents)
        # A dead step changes these entries, so it is taken after they have been read.
        while not over and self._selected_is_done():
            env.step(None)
            over = not env.agents
        acting = (env.agent_selection,)
        return AgentResults(observations, rewards, terminations, truncations, infos, acting, over)

    def _selected_is_done(self) -> bool:
        env = self.env
        agent = env.agent_selection
        return bool(env.agents and (env.terminations[agent] or env.truncations[agent]))


def is_pettingzoo(env: object) -> bool:
    """Returns True if an object has PettingZoo's interface, parallel or AEC."""
    return not isinstance(env, type) and all(
        hasattr(env, name) for name in ("possible_agents", "observation_space", "reset", "step")
    )


def is_turn_based(env: object) -> bool:
    """Returns True if a PettingZoo environment has the AEC interface."""
    return hasattr(type(env), "last") and hasattr(type(env), "observe")
