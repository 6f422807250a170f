"""Batches of fixed layout in which observations are stacks of frames, each stored once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.keys import Key, show_key
from trawl.memory import Array
from trawl.rollout.array_batch_writer import ArrayBatchWriter
from trawl.rollout.block import Block
from trawl.rollout.episodes import EpisodeStart
from trawl.rollout.frame_stacks import FrameStacks
from trawl.rollout.layout import Layout, Leaf
from trawl.rollout.normalizer import Normalizer
from trawl.rollout.policy_leaves import PolicyLeaves
from trawl.rollout.stack_layout import StackLayout


class StackedBatchWriter(ArrayBatchWriter):
    """Fills batches in which observations are stacks of frames.

    Args:
        env: the environment; the constructor resets it.
        policy: the policy; the constructor calls it once to find out what it writes.
        options: options of the batches, with ``frame_stack``.

    Raises:
        NoFixedLayout: if the entries that the policy writes have no fixed layout.
        ValueError: if the environment has no observations to stack, or if the policy writes an
            observation that is stacked.
    """

    _stacks: FrameStacks

    @override
    def _new_next_obs(self) -> dict[Key, Array]:
        option = self.options.frame_stack
        assert option is not None
        self._layout = StackLayout(option, self.env, self.entries.observed)
        self._stacks = FrameStacks(self._layout, self.batch, self.num_envs, self.options.steps)
        return {**super()._new_next_obs(), **self._stacks.newest}

    @override
    def _new_normalizer(self) -> Normalizer:
        normalizer = super()._new_normalizer()
        self._layout.check_normalized(normalizer.keys)
        return normalizer

    @override
    def _start(self) -> None:
        super()._start()
        self._stacks.restart()

    @property
    @override
    def _readable(self) -> dict[Key, Leaf]:
        return {**self.entries.roots, **self._layout.readable}

    @override
    def _first_root(self) -> TensorDict:
        root = super()._first_root()
        for key, leaf in self._layout.readable.items():
            stacks = torch.from_numpy(self._stacks.first_stacks(key))
            root.set(key, stacks.reshape(*self.batch, *leaf.shape))
        return root

    @override
    def _discover(self) -> PolicyLeaves:
        leaves = super()._discover()
        self._layout.check(leaves)
        return leaves

    @override
    def _new_layout(self) -> Layout:
        leaves = self._layout.in_batch(super()._new_layout().leaves)
        return Layout(leaves, self.batch, self.options.steps, self._layout.pools)

    @override
    def _arrays_of(self, block: Block) -> dict[Key, Array]:
        return {**block.flat_rows, **self._stacks.begin(block)}

    @override
    def _episode_starts(self) -> list[EpisodeStart]:
        return [*super()._episode_starts(), self._stacks]

    @override
    def _finished(self, block: Block, filled: int) -> TensorDictBase | None:
        self._stacks.finish(block, filled)
        if not self._stacks.needs_more:
            return super()._finished(block, filled)
        block.flush()
        return self._stacks.deliver(block, self.hidden, self.env.device)

    @override
    def reset(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        super().reset(mask, **kwargs)
        self._stacks.restart(mask)

    @override
    def _saved_rows(self) -> dict[str, Tensor]:
        earlier = self._stacks.earlier_frames()
        return {
            **super()._saved_rows(),
            **{f"{show_key(k)} earlier": torch.from_numpy(rows) for k, rows in earlier.items()},
        }
