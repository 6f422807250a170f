"""Actions of the agents of a PettingZoo environment, as one list of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trawl.envs.agent_groups import AgentGroup
from trawl.envs.spaces import SpaceCodec, SpaceLeaf
from trawl.envs.specs import Categorical
from trawl.memory import Array


class AgentActions:
    """Decodes the actions of all agents.

    Args:
        groups: the groups of agents.
        categorical: True if discrete actions are indices, whatever they are in a batch.

    Attributes:
        leaves: the entries of the actions, with the agents in front.
        fixed: True, because the actions of agents have a fixed layout.
    """

    fixed = True

    def __init__(self, groups: Sequence[AgentGroup], categorical: bool = False) -> None:
        self._groups = groups
        self.leaves: list[SpaceLeaf] = []
        self._parts: list[tuple[list[str], Callable[[Sequence[Array]], list[Any]], slice]] = []
        for group in groups:
            codec = SpaceCodec(group.acted.space, "action", True) if categorical else group.acted
            first = len(self.leaves)
            for leaf in codec.leaves:
                key, spec = (group.name, *leaf.key), leaf.spec.expand(len(group.agents))
                self.leaves.append(SpaceLeaf(key, (), leaf.space, spec))
            self._parts.append((group.agents, _decoder(codec), slice(first, len(self.leaves))))

    def compact(self) -> AgentActions:
        """Returns a codec of the same actions, with discrete actions as indices."""
        return AgentActions(self._groups, categorical=True)

    def decode(self, rows: Sequence[Array]) -> dict[str, Any]:
        """Returns the action of each agent, given arrays in the order of ``leaves``."""
        actions: dict[str, Any] = {}
        for agents, decode, own in self._parts:
            actions.update(zip(agents, decode(rows[own]), strict=True))
        return actions


def _decoder(codec: SpaceCodec) -> Callable[[Sequence[Array]], list[Any]]:
    """Returns a function from rows of actions, one row for each agent, to a list of actions."""
    leaves, decode = codec.leaves, codec.decode
    (first, *more) = leaves
    if not more and first.path == ("action",) and isinstance(first.spec, Categorical):
        start = int(first.space.start)  # type: ignore[attr-defined]
        if start == 0:
            return lambda rows: rows[0].tolist()
        return lambda rows: (rows[0] + start).tolist()
    return lambda rows: [
        decode(agent)["action"] for agent in zip(*(list(row) for row in rows), strict=True)
    ]
