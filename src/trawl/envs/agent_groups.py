"""Groups of agents, and the entries that each group has in a TensorDict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces

from trawl.envs.masks import MASK_KEY, choices
from trawl.envs.spaces import SpaceCodec
from trawl.envs.specs import Categorical, Composite, Spec, Unbounded
from trawl.envs.tensor_env import TensorEnv
from trawl.keys import DONE_KEYS, show_key


class AgentGroup:
    """Agents with equal spaces, whose entries are stacked.

    Args:
        name: name of the group, the first part of its keys.
        agents: names of the agents, in the order of their rows.
        env: the PettingZoo environment.
        categorical: True if a discrete action is an index, False if it is a one-hot vector.

    Attributes:
        observed: codec of one agent's observation, without its action mask.
        acted: codec of one agent's action.
        masked: True if the observation space has an action mask.

    Raises:
        ValueError: if the spaces differ between the agents, or have no fixed layout.
    """

    def __init__(self, name: str, agents: Sequence[str], env: Any, categorical: bool) -> None:
        self.name, self.agents = name, list(agents)
        observed = [_without_mask(env.observation_space(agent)) for agent in agents]
        acted = [env.action_space(agent) for agent in agents]
        self.masked = observed[0][1]
        self.observed = SpaceCodec(spaces.Dict({"observation": observed[0][0]}), "observation")
        self.acted = SpaceCodec(spaces.Dict({"action": acted[0]}), "action", categorical)
        for kind, found in (("observation", observed), ("action", acted)):
            for agent, space in zip(agents, found, strict=True):
                if space != found[0]:
                    raise ValueError(
                        f"the agents of group {name!r} need equal spaces, but the {kind} space of "
                        f"{agents[0]!r} is {_shown(found[0])}, and that of {agent!r} is "
                        f"{_shown(space)}: put them into different groups (group_map=)"
                    )
        for codec in (self.observed, self.acted):
            for leaf in codec.loose:
                raise ValueError(
                    f"{show_key((name, *leaf.key))} has no fixed layout: {leaf.space}. Use "
                    "torchrl.envs.PettingZooWrapper(env) for such spaces"
                )

    @property
    def num_choices(self) -> int | None:
        """Number of entries in an action mask; None if the action can't have a mask."""
        leaves = self.acted.leaves
        sizes = choices(leaves[0].spec) if len(leaves) == 1 else None
        return None if sizes is None else sum(sizes)

    def specs(self, codec: SpaceCodec) -> Composite:
        """Returns the specs of a codec's entries, with the agents in front."""
        return codec.composite((len(self.agents),))

    @property
    def reward_spec(self) -> Composite:
        """Spec of the rewards, one for each agent."""
        count = len(self.agents)
        return Composite({"reward": Unbounded((count, 1))}, (count,))

    @property
    def done_spec(self) -> Composite:
        """Specs of the agents' flags."""
        count = len(self.agents)
        flags: dict[str, Spec | Composite] = {
            key: Categorical(2, (count, 1), torch.bool) for key in DONE_KEYS
        }
        return Composite(flags, (count,))


def _without_mask(space: Any) -> tuple[Any, bool]:
    """Returns a space without its action mask, and True if it had one."""
    if not isinstance(space, spaces.Dict) or MASK_KEY not in space.spaces:
        return space, False
    rest = {name: child for name, child in space.spaces.items() if name != MASK_KEY}
    return spaces.Dict(rest), True


def _shown(space: Any) -> Any:
    return space[0] if isinstance(space, tuple) else space


def make_groups(group_map: Any, agents: Sequence[str], parallel: bool) -> dict[str, list[str]]:
    """Returns the agents of each group.

    Args:
        group_map: a mapping from names of groups to lists of agents, a member of TorchRL's
            ``MarlGroupMapType``, or None for the default groups.
        agents: names of all agents.
        parallel: True for the default groups of a parallel environment: agents whose names differ
            only in the number at the end, such as ``agent_0`` and ``agent_1``. Otherwise, each
            agent is a group.

    Raises:
        TypeError: if ``group_map`` is none of the above.
        ValueError: if ``group_map`` names an unknown agent, or an agent not exactly once.
    """
    if group_map is None:
        found: dict[str, list[str]] = {}
        for agent in agents:
            stem, _, number = agent.rpartition("_")
            numbered = parallel and stem and number.isdecimal()
            found.setdefault(stem if numbered else agent, []).append(agent)
        return found
    if hasattr(group_map, "get_group_map"):
        group_map = group_map.get_group_map(list(agents))
    if not isinstance(group_map, Mapping):
        raise TypeError(
            "group_map must be a mapping from names of groups to lists of agents, or a "
            f"MarlGroupMapType, but it is {group_map!r}"
        )
    for name, members in group_map.items():
        if isinstance(members, str) or not isinstance(members, Sequence):
            raise TypeError(
                f"group_map[{name!r}] must be a list of agents, but it is {members!r}: pass "
                f"[{members!r}]"
            )
    named = [agent for members in group_map.values() for agent in members]
    unknown = sorted(set(named) - set(agents))
    if unknown:
        raise ValueError(
            f"group_map names agents that the environment does not have: {unknown}. Its agents "
            f"are {list(agents)}"
        )
    wrong = [agent for agent in agents if named.count(agent) != 1]
    if wrong:
        raise ValueError(
            f"group_map must name each agent exactly once, but it names {wrong[0]!r} "
            f"{named.count(wrong[0])} times"
        )
    bad = [name for name, members in group_map.items() if name in _RESERVED or not members]
    if bad:
        raise ValueError(f"group_map has an empty group, or a reserved name: {bad[0]!r}")
    return {str(name): list(members) for name, members in group_map.items()}


_RESERVED = (*DONE_KEYS, "reward", "state", "next", "collector", "_reset", "step_count", "is_init")


def groups_of(env: Any) -> set[str]:
    """Returns the keys of the groups of agents, whose entries have a dimension for the agents."""
    if isinstance(env, TensorEnv):
        return set(env.agents)
    axes = len(env.batch_size)
    return {
        str(key)
        for key, spec in env.full_observation_spec.items()
        # TorchRL's composite specs have other classes.
        if hasattr(spec, "items") and len(spec.shape) > axes
    }
