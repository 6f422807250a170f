"""Entries that a batch takes from the infos of agents, and their layout."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from trawl.checks import did_you_mean
from trawl.envs.agent_groups import AgentGroup
from trawl.envs.agent_steps import AgentResults, ParallelSteps, TurnSteps
from trawl.envs.info_keys import (
    INFO_KEY,
    InfoEntry,
    InfoKeys,
    as_array,
    given_entries,
    placed_entries,
    space_of,
)
from trawl.envs.infos import InfoLayout, InfoLeaf
from trawl.envs.masks import MASK_KEY
from trawl.memory import Array

# Steps that are taken to see values: at most, and in any case.
_MOST, _LEAST = 1000, 3


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
    seen = _probe(groups, steps, missing) if any(missing.values()) else {}
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
        only = f"the infos of group {group!r} have only {sorted(seen)}"
        missing = [entry for entry in given if entry.located(seen) is None]
        for other, known in all_seen.items():
            if any(entry.located(known) for entry in missing):
                name = missing[0].path[0]
                return (
                    f"{only}, unlike those of group {other!r}: name the entries of each group, as "
                    f"in info_keys={{{other!r}: [{name!r}]}}"
                )
        return only

    placed = placed_entries(given, seen, describe)
    return InfoLayout(
        (path, key, value if isinstance(value, Space) else space_of(value))
        for path, key, value in placed
    ).leaves


def _probe(
    groups: Sequence[AgentGroup],
    steps: ParallelSteps | TurnSteps,
    missing: Mapping[str, Sequence[InfoEntry]],
) -> dict[str, dict[str, Any]]:
    """Returns examples of the infos of each group in a reset and some random steps."""
    owner = {agent: group.name for group in groups for agent in group.agents}
    actions: dict[str, Any] = {}
    for group in groups:
        for agent in group.agents:
            # A copy, because a space that has drawn samples is part of the state.
            actions[agent] = copy.deepcopy(group.acted.space)["action"]  # type: ignore[index]
            actions[agent].seed(len(actions))
    seen: dict[str, dict[str, Any]] = {group.name: {} for group in groups}
    results = steps.reset()
    for number in count():
        for agent, info in results.infos.items():
            for name, value in info.items() if agent in owner else ():
                known = seen[owner[agent]]
                known[name] = _merged(known[name], value) if name in known else value
        complete = all(
            entry.located(seen[group]) for group, entries in missing.items() for entry in entries
        )
        if number == _MOST or (number >= _LEAST and complete):
            return seen
        if results.over or not results.acting:
            results = steps.reset()
        else:
            results = steps.step(dict(_drawn(results, actions)))
    raise AssertionError


def _merged(old: Any, new: Any) -> Any:
    """Returns a value with a dtype that holds both values."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        both = {**old, **new}
        return {
            name: _merged(old[name], new[name]) if name in old and name in new else value
            for name, value in both.items()
        }
    one, other = as_array(old), as_array(new)
    if one is None or other is None:
        return new if one is None else old
    fits = one.shape == other.shape and one.dtype != other.dtype
    return one.astype(np.result_type(one, other)) if fits else old


def _drawn(results: AgentResults, actions: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields a random action of each agent that acts, which follows its mask."""
    for agent in results.acting:
        space, observed = actions[agent], results.observations.get(agent)
        mask = observed.get(MASK_KEY) if isinstance(observed, Mapping) else None
        mask = results.infos.get(agent, {}).get(MASK_KEY) if mask is None else mask
        follows = mask is not None and isinstance(space, spaces.Discrete)
        yield agent, space.sample(np.asarray(mask, np.int8)) if follows else space.sample()
