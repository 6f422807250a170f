"""Entries that a batch takes from the infos of agents, and their layout."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from trawl.checks import did_you_mean
from trawl.envs.agent_groups import AgentGroup
from trawl.envs.agent_steps import AgentResults, ParallelSteps, TurnSteps
from trawl.envs.info_keys import (
    INFO_KEY,
    InfoEntry,
    InfoKeys,
    as_array,
    given_entries,
    names_of,
    placed_entries,
    seen_values,
)
from trawl.envs.infos import InfoLayout, InfoLeaf
from trawl.envs.masks import MASK_KEY, allowed_sample, flat_mask, mask_in
from trawl.memory import Array


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
