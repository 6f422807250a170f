"""Stage that stacks frames: what is the same for arrays and for tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from typing_extensions import override

from trawl.envs.frame_stack import FrameStack
from trawl.keys import Key, next_of, show_key
from trawl.rollout.layout import FramePool, Leaf
from trawl.rollout.policy_leaves import PolicyLeaves
from trawl.rollout.stage import Rows, Stage, View


@dataclass(frozen=True)
class StackedLeaf:
    """Layout of one stacked observation.

    Attributes:
        frame: layout of one frame; in a group of agents, of the frame of one agent.
        size: number of frames in a stack.
        agents: number of agents in a group, as a dimension; ``()`` if there are no groups.
    """

    frame: Leaf
    size: int
    agents: tuple[int, ...] = ()

    @property
    def per_env(self) -> int:
        """Number of frames of an environment in each step."""
        return self.agents[0] if self.agents else 1

    @property
    def positions(self) -> Leaf:
        """Layout of the entry in a batch, which has the positions of frames."""
        return Leaf((*self.agents, self.size), torch.int64)

    @property
    def stack(self) -> Leaf:
        """Layout of the entry as the policy reads it."""
        return Leaf((*self.agents, self.size, *self.frame.shape), self.frame.dtype)

    @property
    def pool(self) -> FramePool:
        """Layout of the memory for the frames of a batch."""
        return FramePool(self.frame, self.size, self.per_env)


class StackStage(Stage[Rows, View]):
    """Stage that stacks observations of an environment.

    A batch has each frame once, in a pool, and the positions of the frames of each stack.

    Args:
        option: the option of the collector.
        observed: layout of all observations, by key.
        groups: keys of the groups of agents.

    Attributes:
        leaves: the stacked observations, by key.
        passed_on: what a step passes on to the next step, by key.

    Raises:
        ValueError: if there is no observation to stack.
    """

    passed_on: Mapping[Key, Rows]

    def __init__(
        self, option: FrameStack, observed: Mapping[Key, Leaf], groups: Collection[str]
    ) -> None:
        self._size = option.size
        # True if an episode's first frame completes its first stacks; False if zeros do.
        self._repeats = option.padding == "reset"
        self.leaves: dict[Key, StackedLeaf] = {}
        for key in option.stacked(observed, groups):
            leaf, axes = observed[key], 1 if key[0] in groups and len(key) > 1 else 0
            frame = Leaf(leaf.shape[axes:], leaf.dtype)
            self.leaves[key] = StackedLeaf(frame, option.size, leaf.shape[:axes])
        self.keys = list(self.leaves)
        self.pools = {key: leaf.pool for key, leaf in self.leaves.items()}

    @override
    def readable(self, leaves: Mapping[Key, Leaf]) -> Mapping[Key, Leaf]:
        return {**leaves, **{key: leaf.stack for key, leaf in self.leaves.items()}}

    @override
    def in_batch(self, leaves: Mapping[Key, Leaf]) -> Mapping[Key, Leaf]:
        positions = {key: leaf.positions for key, leaf in self.leaves.items()}
        after = {next_of(key): leaf for key, leaf in positions.items()}
        return {**leaves, **positions, **after}

    @override
    def check_policy(self, leaves: PolicyLeaves) -> None:
        for key in self.leaves:
            for name in (key, next_of(key)):
                if name in leaves.written:
                    raise ValueError(
                        f"the policy writes {show_key(name)}, which frame_stack stacks: choose the "
                        "observations with FrameStack(..., keys=[...])"
                    )

    @property
    @abstractmethod
    def earlier(self) -> Mapping[Key, Rows]:
        """The frames before the newest ones with which the next batch begins, by key."""

    @override
    def saved_rows(self) -> dict[str, Rows]:
        return {f"{show_key(key)} earlier": rows for key, rows in self.earlier.items()}
