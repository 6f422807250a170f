"""Log from which an episode of a PettingZoo environment is replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from trawl.envs.agent_arrays import AgentArrays
from trawl.envs.capture.replay import EpisodeLog
from trawl.envs.capture.step_log import digest
from trawl.errors import EnvStateError


class AgentEnv(Protocol):
    """Part of a :class:`~trawl.envs.PettingZooEnv` that a replay uses."""

    arrays: AgentArrays
    observation_codec: Any
    action_codec: Any

    def start_episode(self, **kwargs: Any) -> None:
        """Resets the environment."""

    def advance(self, actions: dict[str, Any]) -> None:
        """Takes a step."""


class AgentLog(EpisodeLog):
    """Origin of the current episode of several agents, and their actions since then.

    Args:
        owner: the environment, which takes the steps of a replay.
    """

    def __init__(self, owner: AgentEnv) -> None:
        super().__init__(owner.observation_codec, owner.action_codec)
        self._owner = owner

    @override
    def _play(self, env: Any, arguments: Mapping[str, Any]) -> tuple[list[Any], int]:
        owner, rewards = self._owner, 0
        owner.start_episode(**arguments)
        for step in range(self.steps):
            owner.advance(self.action(step))
            rewards = digest(np.concatenate(owner.arrays.reward_rows()), rewards)
            if owner.arrays.done and step + 1 < self.steps:
                raise EnvStateError(
                    f"{env} was replayed, but its episode ended after {step + 1} steps instead of "
                    f"going on for {self.steps}"
                )
        return self._encode(owner.arrays.observations), rewards
