"""Batches of tensors with stacked observations, in which each frame is stored once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.keys import Key, next_of, show_key
from trawl.rollout.block import Block
from trawl.rollout.device_transfer import moved
from trawl.rollout.layout import Layout, Leaf, pool_key
from trawl.rollout.policy_leaves import PolicyLeaves
from trawl.rollout.stack_layout import StackLayout
from trawl.rollout.tensor_batch_writer import TensorBatchWriter
from trawl.rollout.tensor_block import TensorBlock
from trawl.rollout.tensor_normalizer import TensorNormalizer
from trawl.rollout.tensor_stacks import StackedBlock, TensorStacks


class StackedTensorBatchWriter(TensorBatchWriter):
    """Fills batches of tensors in which observations are stacks of frames.

    Args:
        env: the environment; the constructor resets it.
        policy: the policy; the constructor calls it once to find out what it writes.
        options: options of the batches, with ``frame_stack``.

    Raises:
        NoFixedLayout: if the entries that the policy writes have no fixed layout.
        ValueError: if the environment has no observations to stack, if the policy writes an
            observation that is stacked, or if an option needs resets that the environment can't
            make.
    """

    @cached_property
    def _stacked(self) -> StackLayout:
        option = self.options.frame_stack
        assert option is not None
        return StackLayout(option, self.env, self.entries.observed)

    @cached_property
    def _frames(self) -> TensorStacks:
        """The frames of the stacked observations."""
        env = self.env
        return TensorStacks(self._stacked, self._next, self.options.steps, env.answers_at_once)

    @override
    def _new_normalizer(self) -> TensorNormalizer:
        normalizer = super()._new_normalizer()
        self._stacked.check_normalized(normalizer.keys)
        return normalizer

    # --- what a batch begins with

    @override
    def _begin_episodes(self, mask: Tensor | None, **kwargs: Any) -> None:
        super()._begin_episodes(mask, **kwargs)
        self._frames.restart(mask)

    @property
    @override
    def _readable(self) -> Mapping[Key, Leaf]:
        return {**self.entries.roots, **self._stacked.readable}

    @override
    def _as_read(self, key: Key, row: Tensor) -> Tensor:
        if key in self._stacked.leaves:
            return self._frames.first_stacks(key)
        return super()._as_read(key, row)

    @override
    def _discover(self) -> PolicyLeaves:
        leaves = super()._discover()
        self._stacked.check(leaves)
        return leaves

    @override
    def _new_layout(self) -> Layout:
        plain, stacked = super()._new_layout(), self._stacked
        leaves = stacked.in_batch(plain.leaves)
        return Layout(leaves, plain.batch, plain.steps, stacked.pools, agents=plain.agents)

    # --- filling

    @override
    def _new_block(self) -> TensorBlock:
        return self._frames.begin(super()._new_block())

    @override
    def _finished(
        self, block: TensorBlock, filled: int, given: Block | None
    ) -> TensorDictBase | None:
        assert isinstance(block, StackedBlock)
        done, fits = self._frames.finish(block, filled)
        if given is None or not fits:
            batch = self._deliver(done)
            return batch if given is None else moved(batch, torch.device("cpu"))
        super()._finished(done, filled, given)
        for key, frames in done.pools.items():
            start, tensors = given.lease.pool_starts.get(key, 0), given.lease.tensors
            tensors[pool_key(key)][start : start + len(frames)].copy_(frames)
            for name in (key, next_of(key)):
                tensors[name].add_(start)
        return None

    # --- between batches

    @override
    def _saved_rows(self) -> dict[str, Tensor]:
        earlier = {f"{show_key(k)} earlier": rows for k, rows in self._frames.earlier.items()}
        return {**super()._saved_rows(), **earlier}
