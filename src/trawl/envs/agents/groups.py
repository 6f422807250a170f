"""Groups of agents, and the entries that each group has in a TensorDict, actions and infos."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from trawl.checks import did_you_mean
from trawl.envs.agents.steps import AgentResults, ParallelSteps, TurnSteps
from trawl.envs.entries.info_keys import (
    INFO_KEY,
    InfoEntry,
    InfoKeys,
    as_array,
    given_entries,
    names_of,
    placed_entries,
    seen_values,
)
from trawl.envs.entries.infos import InfoLayout, InfoLeaf
from trawl.envs.entries.masks import MASK_KEY, allowed_sample, choices, flat_mask, mask_in
from trawl.envs.entries.spaces import SpaceCodec, SpaceLeaf
from trawl.envs.specs import Categorical
from trawl.envs.tensor_env import TensorEnv
from trawl.keys import DONE_KEYS, RESET_MASK, as_key, show_key
from trawl.memory import Array


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


_RESERVED = (
    *DONE_KEYS,
    "reward",
    "state",
    "next",
    "collector",
    RESET_MASK,
    "step_count",
    "is_init",
)


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


def flagged_groups(env: Any) -> list[str]:
    """Returns the names of the groups whose agents have flags of their own."""
    found = map(as_key, env.full_done_spec.keys(True, True))
    return list(dict.fromkeys(key[0] for key in found if len(key) > 1))


# --- actions


class AgentActions:
    """Decodes the actions of all agents.

    Args:
        groups: the groups of agents.
        categorical: True if discrete actions are indices, whatever they are in a batch.

    Attributes:
        leaves: the entries of the actions, with the agents in front.
        fixed: True, because the actions of agents have a fixed layout.
        plain: False, because an action is no array.
    """

    fixed = True
    plain = False

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


# --- infos


def first_infos(group: AgentGroup, first: AgentResults) -> list[InfoLeaf]:
    """Returns the leaves of each number and array that an agent of a group has after a reset."""
    found: dict[str, Array] = {}
    for agent in group.agents:
        for name, value in first.infos.get(agent, {}).items():
            array = as_array(value)
            if array is None or name == MASK_KEY:
                continue
            if isinstance(value, float) and not isinstance(value, np.floating):
                array = array.astype(np.float32)
            found.setdefault(str(name), array)
    return [
        InfoLeaf((name,), (INFO_KEY, name), array.shape, array.dtype, np.zeros_like(array))
        for name, array in found.items()
    ]


def chosen_infos(
    groups: Sequence[AgentGroup], steps: ParallelSteps | TurnSteps, info_keys: Any
) -> dict[str, list[InfoLeaf]]:
    """Returns the leaves of the infos that ``info_keys`` names, by group.

    Args:
        groups: the groups of agents.
        steps: the environment, which is reset and stepped if a layout is not given.
        info_keys: the argument of :class:`~trawl.envs.PettingZooEnv`.

    Raises:
        TypeError: if ``info_keys`` has the wrong type.
        ValueError: if ``info_keys`` has a name that no info of a group has.
    """
    wanted = _by_group(groups, info_keys)
    missing = {
        group: [entry for entry in entries if entry.space is None]
        for group, entries in wanted.items()
    }
    seen = seen_values(_takes(groups, steps), missing) if any(missing.values()) else {}
    return {name: _leaves_of(name, entries, seen) for name, entries in wanted.items()}


def _by_group(groups: Sequence[AgentGroup], info_keys: InfoKeys) -> dict[str, list[InfoEntry]]:
    """Returns the entries that are named for each group."""
    names = [group.name for group in groups]
    if isinstance(info_keys, Mapping) and any(key in names for key in info_keys):
        other = [key for key in info_keys if key not in names]
        if other:
            raise ValueError(
                f"info_keys has names of groups, and also {other}: it must have only names of "
                f"groups ({names}), or only names of infos"
            )
        return {name: given_entries(info_keys.get(name, [])) for name in names}
    if isinstance(info_keys, Mapping):
        unknown = [key for key, given in info_keys.items() if isinstance(given, (list, tuple))]
        if unknown:
            raise ValueError(
                f"info_keys has lists of names for {unknown}, but the groups are {names}"
                f"{did_you_mean(unknown, names, 1)}"
            )
    return {name: given_entries(info_keys) for name in names}


def _leaves_of(
    group: str, given: Sequence[InfoEntry], all_seen: Mapping[str, Mapping[str, Any]]
) -> list[InfoLeaf]:
    seen = all_seen.get(group, {})

    def describe() -> str:
        only = f"the infos of group {group!r} have only {names_of(seen)}"
        missing = [entry for entry in given if entry.located(seen) is None]
        for other, known in all_seen.items():
            if any(entry.located(known) for entry in missing):
                name = missing[0].path[0]
                return (
                    f"{only}, unlike those of group {other!r}: name the entries of each group, as "
                    f"in info_keys={{{other!r}: [{name!r}]}}"
                )
        return only

    return InfoLayout(placed_entries(given, seen, describe)).leaves


def _takes(
    groups: Sequence[AgentGroup], steps: ParallelSteps | TurnSteps
) -> Generator[list[tuple[str, Mapping[str, Any]]]]:
    """Yields the infos of a reset and of random steps, each with the group of its agent."""
    owner = {agent: group.name for group in groups for agent in group.agents}
    actions: dict[str, Any] = {}
    for group in groups:
        for agent in group.agents:
            # A copy, because a space that has drawn samples is part of the state.
            actions[agent] = copy.deepcopy(group.acted.space)["action"]  # type: ignore[index]
            actions[agent].seed(len(actions))
    results = steps.reset()
    while True:
        yield [(owner[agent], info) for agent, info in results.infos.items() if agent in owner]
        if results.over or not results.acting:
            results = steps.reset()
            continue
        masks = {
            agent: mask_in(results.observations.get(agent), results.infos.get(agent, {}))
            for agent in results.acting
        }
        results = steps.step(
            {
                agent: allowed_sample(actions[agent], None if mask is None else flat_mask(mask))
                for agent, mask in masks.items()
            }
        )
