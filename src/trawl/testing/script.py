"""A script says what environments do; environments of every kind can play it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Numbers in an observation: environment, episode, step in it, and the last action, or -1.
FIELDS = 4


class ScriptedFailure(Exception):
    """A failure that a script asks for."""


@dataclass(frozen=True)
class Script:
    """Table of all that environments do, whatever kind they are of.

    Everything that an environment returns says which environment, episode and step it is from,
    so that a lost, repeated, torn or moved frame is seen.

    Attributes:
        lengths: number of steps of each episode. Environment ``i`` begins with entry ``i``; after
            the last entry, the list starts again.
        ends: flags at the end of each episode: ``"terminated"``, ``"truncated"`` or ``"both"``, in
            the order of ``lengths``.
        actions: number of actions.
        levels: True if infos have an entry ``"level"``.
        late: True if those of resets don't have it.
        masks: True if infos have an entry ``"action_mask"``, which allows one action.
        failures: steps that fail, as ``(environment, episode, step)``. Step 0 is the reset.

    Examples:
        >>> from trawl.testing import Script
        >>> script = Script(lengths=[2, 5], ends=["terminated", "truncated"])
        >>> script.length(env=0, episode=1), script.flags(env=0, episode=0, step=2)
        (5, (True, False))
        >>> script.observation(env=0, episode=1, step=3, action=2).tolist()
        [0.0, 1.0, 3.0, 2.0]
    """

    lengths: Sequence[int] = (3, 1, 4, 2)
    ends: Sequence[str] = ("terminated", "truncated", "both")
    actions: int = 4
    levels: bool = False
    late: bool = False
    masks: bool = False
    failures: frozenset[tuple[int, int, int]] = frozenset()

    def length(self, env: int, episode: int) -> int:
        """Returns the number of steps of an episode."""
        return self.lengths[(env + episode) % len(self.lengths)]

    def flags(self, env: int, episode: int, step: int) -> tuple[bool, bool]:
        """Returns ``terminated`` and ``truncated`` after a step, counted from 1."""
        end = self.ends[(env + episode) % len(self.ends)]
        over = step >= self.length(env, episode)
        return over and end != "truncated", over and end != "terminated"

    def observation(
        self, env: int, episode: int, step: int, action: int, agent: int = 0
    ) -> NDArray[np.float32]:
        """Returns the observation after a step; step 0 is the reset, whose action is -1."""
        return np.array([env + agent / 4, episode, step, action], np.float32)

    def reward(self, env: int, episode: int, step: int, action: int, agent: int = 0) -> float:
        """Returns the reward of a step."""
        return float(100 * env + 20 * agent + 10 * (episode % 5) + 4 * step + action) / 8

    def level(self, env: int, episode: int, step: int) -> float:
        """Returns the entry ``"level"`` of the info after a step."""
        return 1000.0 * env + 100 * episode + step + 0.5

    def legal(self, env: int, episode: int, step: int) -> int:
        """Returns the action that the mask allows after a step."""
        return (env + 2 * episode + step) % self.actions


class Player:
    """One environment of a script, whose episodes are numbered from 0.

    Args:
        script: the script.
        env: number of the environment.
        agents: number of agents; None if there are none.

    Attributes:
        episode: number of the episode.
        count: number of steps in the episode.
    """

    def __init__(self, script: Script, env: int = 0, agents: int | None = None) -> None:
        self.script = script
        self.env = env
        self.agents = agents
        self.episode = -1
        self.count = 0

    def reset(self) -> None:
        """Begins the next episode.

        Raises:
            ScriptedFailure: if the script says so.
        """
        self.episode += 1
        self.count = 0
        self._fail()

    def step(self, actions: Sequence[int]) -> tuple[list[float], bool, bool]:
        """Takes a step, with an action for each agent.

        Returns:
            The rewards of the agents, ``terminated`` and ``truncated``.

        Raises:
            ScriptedFailure: if the script says so.
        """
        self.count += 1
        self._fail()
        rewards = [self.script.reward(*self.now, a, i) for i, a in enumerate(actions)]
        return rewards, *self.script.flags(*self.now)

    @property
    def now(self) -> tuple[int, int, int]:
        """The environment, the episode and the step."""
        return self.env, self.episode, self.count

    def observe(self, action: int = -1, agent: int = 0) -> NDArray[np.float32]:
        """Returns an agent's observation, whose last action is given."""
        return self.script.observation(*self.now, action, agent)

    def info(self) -> dict[str, Any]:
        """Returns the info after a step or a reset."""
        found: dict[str, Any] = {}
        if self.script.levels and not (self.script.late and self.count == 0):
            found["level"] = np.float32(self.script.level(*self.now))
        if self.script.masks:
            mask = np.zeros(self.script.actions, np.int8)
            mask[self.script.legal(*self.now)] = 1
            found["action_mask"] = mask
        return found

    def _fail(self) -> None:
        if self.now in self.script.failures:
            raise ScriptedFailure("environment {} fails in episode {} at step {}".format(*self.now))
