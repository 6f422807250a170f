"""Arrays with the newest results of a PettingZoo environment, one row for each agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trawl.envs.agents.groups import AgentGroup
from trawl.envs.agents.steps import AgentResults
from trawl.envs.entries.infos import InfoLeaf
from trawl.envs.entries.masks import MASK_KEY, flat_mask, mask_in
from trawl.envs.entries.spaces import MissingPart
from trawl.envs.outcomes import reward_of
from trawl.errors import add_note
from trawl.keys import DONE_KEYS, Key
from trawl.memory import Array
from trawl.schema.checks import UNKNOWN, one_of

AGENT_MASK = "mask"


class AgentArrays:
    """The newest results of an environment.

    The arrays stay the same objects, so that a reader can look them up once.

    Args:
        groups: the groups of agents.
        infos: entries of ``info`` that are kept, by group.
        masked: names of the groups with an action mask.
        use_mask: True to mark the agents that act.
        done_on_any: True if the episode ends with the first agent that is done, False if it ends
            with the last one.

    Attributes:
        observations: arrays of the observations, masks and infos, by key. Text and other values
            without a fixed layout are in arrays of objects.
        rewards: arrays of the rewards, by key.
        flags: arrays of the flags, by key; those of the episode are at the root.
        flagged: True if a flag of an agent is set.
        done: True if the episode has ended.
        acting: agents that act in the next step.
    """

    def __init__(
        self,
        groups: Sequence[AgentGroup],
        infos: Mapping[str, Sequence[InfoLeaf]],
        masked: Sequence[str],
        use_mask: bool,
        done_on_any: bool,
    ) -> None:
        self.observations: dict[Key, Array] = {}
        self.rewards: dict[Key, Array] = {}
        self.flags: dict[Key, Array] = {(key,): np.zeros(1, np.bool_) for key in DONE_KEYS}
        self.flagged = self.done = False
        self._use_mask, self._any = use_mask, done_on_any
        self._slots: dict[str, _AgentSlot] = {}
        # Agents with an action mask or infos.
        self._informed: list[tuple[str, _AgentSlot]] = []
        for group in groups:
            self._add(group, infos.get(group.name, ()), group.name in masked)
        self._present: frozenset[str] = frozenset()
        self.acting: tuple[str, ...] = ()

    def _add(self, group: AgentGroup, infos: Sequence[InfoLeaf], masked: bool) -> None:
        name, count = group.name, len(group.agents)
        observed = self.observations
        for leaf in group.observed.leaves:
            observed[(name, *leaf.key)] = np.zeros((count, *leaf.spec.shape), leaf.dtype)
        for info in infos:
            loose = info.dtype is None
            array = np.empty((count, *info.shape), object if loose else info.dtype)
            array[...] = info.blank
            observed[(name, *info.key)] = array
        if masked:
            observed[name, MASK_KEY] = np.ones((count, group.num_choices or 0), np.bool_)
        if self._use_mask:
            observed[name, AGENT_MASK] = np.zeros(count, np.bool_)
        self.rewards[name, "reward"] = np.zeros((count, 1), np.float32)
        for key in DONE_KEYS:
            self.flags[name, key] = np.zeros((count, 1), np.bool_)
        for index, agent in enumerate(group.agents):
            slot = _AgentSlot(self, group, agent, index, infos, masked)
            self._slots[agent] = slot
            if infos or masked:
                self._informed.append((agent, slot))

    def reward_rows(self) -> list[Array]:
        """Returns the rewards of each group, one for each agent."""
        return [rewards[:, 0] for rewards in self.rewards.values()]

    def state_dict(self) -> dict[str, Any]:
        """Returns the newest results as plain data."""
        arrays = {"observations": self.observations, "rewards": self.rewards, "flags": self.flags}
        return {
            **{
                name: [torch.from_numpy(array.copy()) for array in _fixed(found)]
                for name, found in arrays.items()
            },
            "present": sorted(self._present),
            "acting": list(self.acting),
            "flagged": self.flagged,
            "done": self.done,
        }

    def check_agents(self, state: Mapping[str, Any]) -> None:
        """Checks that a state has no other agents than the environment.

        Raises:
            StateError: if it has.
        """
        for name in ("present", "acting"):
            for agent in state[name]:
                one_of(*self._slots)(agent, f"the agents in {name!r}", UNKNOWN)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores results that :meth:`state_dict` returned."""
        for name in ("observations", "rewards", "flags"):
            for array, saved in zip(_fixed(getattr(self, name)), state[name], strict=True):
                array[...] = saved.numpy()
        self._present, self.acting = frozenset(state["present"]), tuple(state["acting"])
        for agent, slot in self._slots.items():
            # A state has no text. The next step writes the text of the agents that are present.
            if agent not in self._present:
                slot.clear()
        self.flagged, self.done = state["flagged"], state["done"]

    def begin(self, results: AgentResults) -> None:
        """Writes the results of a reset."""
        for flags in self.flags.values():
            flags[...] = False
        for rewards in self.rewards.values():
            rewards[...] = 0
        self.flagged = self.done = False
        self._present, self.acting = frozenset(self._slots), ()
        self._write(results.observations, results.infos, results.acting)
        # An episode has just begun, even if some agents are not there yet.
        self._set_root(False, False)

    def update(self, results: AgentResults) -> None:
        """Writes the results of a step."""
        observations, rewards, terminations, truncations, infos, acting, over = results
        self._write(observations, infos, acting)
        slots = self._slots
        if rewards.keys() == self._present and len(rewards) == len(slots):
            for agent, reward in rewards.items():
                slots[agent].set_reward(reward)
        else:
            for agent, slot in slots.items():
                slot.set_reward(rewards.get(agent, 0) if agent in self._present else 0)
        ended = any(terminations.values()) or any(truncations.values())
        if ended or self.flagged or over:
            self._set_flags(terminations, truncations, over)

    def _write(
        self, observations: Mapping[str, Any], infos: Mapping[str, Any], acting: tuple[str, ...]
    ) -> None:
        if observations.keys() != self._present:
            self._change_agents(observations)
        slots = self._slots
        if acting != self.acting:
            self.acting = acting
            if self._use_mask:
                for agent, slot in slots.items():
                    slot.acts[...] = agent in acting
        for agent, value in observations.items():
            slots[agent].write(value)
        for agent, slot in self._informed:
            if agent in observations:
                slot.write_info(observations[agent], infos.get(agent, _NOTHING), agent in acting)

    def _change_agents(self, observations: Mapping[str, Any]) -> None:
        """Clears the rows of agents that are no longer present."""
        unknown = observations.keys() - self._slots.keys()
        if unknown:
            raise RuntimeError(
                f"the environment returned data of agents {sorted(unknown)}, which are not among "
                f"its possible_agents, {sorted(self._slots)}"
            )
        self._present = frozenset(observations)
        self.flagged = False
        for agent, slot in self._slots.items():
            gone = agent not in self._present
            self.flagged |= gone
            if gone:
                slot.clear()
            for flag in slot.flags:
                flag[...] = gone

    def _set_flags(
        self, terminations: Mapping[str, Any], truncations: Mapping[str, Any], over: bool
    ) -> None:
        present, all_terminated, all_truncated = self._present, True, True
        for agent, slot in self._slots.items():
            if agent in present:
                terminated = bool(terminations.get(agent, False))
                truncated = bool(truncations.get(agent, False))
                slot.set_flags(terminated, truncated)
                all_terminated &= terminated
                all_truncated &= truncated
        self.flagged = True
        if self._any:
            terminated, truncated = any(terminations.values()), any(truncations.values())
            over |= terminated or truncated
        else:
            over |= all(slot.is_done for slot in self._slots.values())
            terminated, truncated = over and all_terminated, over and all_truncated
        self._set_root(bool(terminated), bool(truncated or (over and not terminated)))

    def _set_root(self, terminated: bool, truncated: bool) -> None:
        self.done = terminated or truncated
        for key, flag in zip(DONE_KEYS, (self.done, terminated, truncated), strict=True):
            self.flags[key,][...] = flag


_NOTHING: dict[str, Any] = {}


def _fixed(arrays: Mapping[Key, Array]) -> list[Array]:
    """Returns the arrays whose values have a fixed layout."""
    return [array for array in arrays.values() if array.dtype != object]


class _AgentSlot:
    """Rows of one agent.

    Attributes:
        acts: row of the mask of agents; an array without a reader if there is no mask.
        flags: rows of the flags, in the order of ``DONE_KEYS``.
    """

    def __init__(
        self,
        arrays: AgentArrays,
        group: AgentGroup,
        agent: str,
        index: int,
        infos: Sequence[InfoLeaf],
        masked: bool,
    ) -> None:
        self._agent, self._group, self._index = agent, group.name, index
        self._codec = group.observed
        own = {key: one for key, one in arrays.observations.items() if key[0] == group.name}
        rows = {key: array[index, ...] for key, array in own.items()}
        self._rows = [rows[(group.name, *leaf.key)] for leaf in self._codec.leaves]
        plain = group.observed.plain and group.observed.leaves[0].path == ("observation",)
        self._row = self._rows[0] if plain and not group.masked else None
        self._shape, self._dtype = self._rows[0].shape, self._rows[0].dtype
        self._infos = [(leaf, own[(group.name, *leaf.key)]) for leaf in infos]
        self._mask = rows[group.name, MASK_KEY] if masked else None
        self.acts = rows.get((group.name, AGENT_MASK), np.zeros((), np.bool_))
        # Unlike an array, a memoryview accepts only numbers, and assigning to it is faster.
        self._reward: Any = arrays.rewards[group.name, "reward"][index].data
        self.flags = [arrays.flags[group.name, key][index] for key in DONE_KEYS]

    @property
    def is_done(self) -> bool:
        return bool(self.flags[0][0])

    def clear(self) -> None:
        """Sets all entries of an agent that is not present."""
        for row in self._rows:
            row[...] = 0
        for leaf, array in self._infos:
            array[self._index] = leaf.blank
        if self._mask is not None:
            self._mask[...] = True
        self._reward[0] = 0

    def set_flags(self, terminated: bool, truncated: bool) -> None:
        done, terminations, truncations = self.flags
        done[0], terminations[0], truncations[0] = terminated or truncated, terminated, truncated

    def set_reward(self, reward: Any) -> None:
        try:
            self._reward[0] = reward
        except TypeError:
            self._reward[0] = reward_of(reward, self)

    def __repr__(self) -> str:
        return f"agent {self._agent!r}"

    def write(self, value: Any) -> None:
        """Writes the agent's observation."""
        row = self._row
        if row is None:
            self._write_leaves(value)
        elif value.__class__ is np.ndarray and value.shape == self._shape:
            if value.dtype is not self._dtype:
                self._check(0, value)
            row[...] = value
        else:
            row[...] = self._check(0, value)

    def write_info(self, value: Any, info: Any, acts: bool) -> None:
        """Writes the agent's action mask and infos.

        Args:
            value: the agent's observation, which may have the mask.
            info: the agent's info.
            acts: True if the agent acts next.
        """
        if self._mask is not None:
            self._write_mask(value, info, acts)
        for leaf, array in self._infos:
            try:
                # Unlike an assignment to a row, this stores a list as one object.
                array[self._index] = leaf.read(leaf.find(info))
            except (TypeError, ValueError) as error:
                add_note(error, f"in the info of agent {self._agent!r}")
                raise

    def _write_leaves(self, value: Any) -> None:
        try:
            leaves = self._codec.encode({"observation": value})
        except (MissingPart, TypeError) as error:
            raise ValueError(
                f"the observation of agent {self._agent!r} does not fit its space "
                f"{self._codec.space}: {value!r}"
            ) from error
        for index, leaf in enumerate(leaves):
            self._rows[index][...] = self._check(index, leaf)

    def _check(self, index: int, value: Any) -> Array:
        array = np.asarray(value)
        self._codec.leaves[index].check(array, (), (self._group, self._agent))
        return array

    def _write_mask(self, value: Any, info: Any, acts: bool) -> None:
        """Writes the action mask; an agent that does not act is free to choose."""
        assert self._mask is not None
        shown = mask_in(value, info)
        if shown is None or not acts:
            self._mask[...] = True
            return
        mask = flat_mask(shown)
        if mask.shape != self._mask.shape:
            raise ValueError(
                f"the action mask of agent {self._agent!r} has shape {mask.shape}, but its action "
                f"has {self._mask.shape[0]} choices"
            )
        self._mask[...] = mask != 0
