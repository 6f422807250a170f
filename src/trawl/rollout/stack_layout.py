"""Layout of stacked observations, on arrays and on tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from trawl.envs.agent_arrays import AGENT_MASK
from trawl.envs.agent_groups import groups_of
from trawl.envs.base import TensorDictEnv
from trawl.envs.frame_stack import FrameStack
from trawl.keys import Key, next_of, show_key, show_keys
from trawl.rollout.layout import FramePool, Leaf
from trawl.rollout.policy_leaves import PolicyLeaves
from trawl.supported import NORMALIZE_STACKED


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


class StackLayout:
    """Layout of the stacked observations of an environment.

    Args:
        option: the option of the collector.
        env: the environment.
        observed: layout of all its observations, by key.

    Attributes:
        size: number of frames in a stack.
        repeats: True if an episode's first frame completes its first stacks; False if frames of
            zeros do.
        leaves: the stacked observations, by key.
        entries: layout of their positions in a batch, by key.
        readable: layout of their stacks, as the policy reads them, by key.
        pools: layout of the memory for their frames, by key.

    Raises:
        ValueError: if there is no observation to stack.
    """

    def __init__(
        self, option: FrameStack, env: TensorDictEnv, observed: Mapping[Key, Leaf]
    ) -> None:
        self.size = option.size
        self.repeats = option.padding == "reset"
        self.leaves: dict[Key, StackedLeaf] = {}
        groups = groups_of(env)
        masks = {(group, AGENT_MASK) for group in groups}
        for key in option.stacked(key for key in observed if key not in masks):
            leaf, axes = observed[key], 1 if key[0] in groups and len(key) > 1 else 0
            frame = Leaf(leaf.shape[axes:], leaf.dtype)
            self.leaves[key] = StackedLeaf(frame, option.size, leaf.shape[:axes])
        self.entries = {key: leaf.positions for key, leaf in self.leaves.items()}
        self.readable = {key: leaf.stack for key, leaf in self.leaves.items()}
        self.pools = {key: leaf.pool for key, leaf in self.leaves.items()}

    def in_batch(self, leaves: Mapping[Key, Leaf]) -> dict[Key, Leaf]:
        """Returns the layout of a frame in a batch, given the layout without stacks."""
        after = {next_of(key): leaf for key, leaf in self.entries.items()}
        return {**leaves, **self.entries, **after}

    def check_normalized(self, keys: Iterable[Key]) -> None:
        """Raises a ``ValueError`` if an observation is both stacked and normalised.

        Args:
            keys: keys of the observations that are normalised.
        """
        both = self.leaves.keys() & set(keys)
        if both:
            raise NORMALIZE_STACKED.error(against=f"normalize_observations for {show_keys(both)}")

    def check(self, policy: PolicyLeaves) -> None:
        """Raises a ``ValueError`` if the policy writes an observation that is stacked."""
        for key in self.entries:
            for name in (key, next_of(key)):
                if name in policy.written:
                    raise ValueError(
                        f"the policy writes {show_key(name)}, which frame_stack stacks: choose the "
                        "observations with FrameStack(..., keys=[...])"
                    )
