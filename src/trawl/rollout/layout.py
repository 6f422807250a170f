"""Layout of a batch's entries in its block of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor

from trawl.keys import Key, as_key, nested, next_of
from trawl.memory import Array, aligned
from trawl.tensordicts import has_lazy


@dataclass(frozen=True)
class Leaf:
    """One entry of a frame.

    Attributes:
        shape: shape of the entry in a single frame of a single environment.
        dtype: dtype of the entry.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


#: A flag of each environment.
FLAG = Leaf((1,), torch.bool)


@dataclass(frozen=True)
class FramePool:
    """Frames of an observation that is stacked, each of which is stored once.

    The entry itself has the positions of its frames in the pool. For each environment, the pool has
    the frames with which a batch begins and one for each step. After these, it has a frame of
    zeros, and room for the first frames of episodes that begin within the batch.

    Attributes:
        frame: layout of one frame; in a group of agents, of the frame of one agent.
        size: number of frames in a stack.
        per_env: number of frames of an environment in each step: one, or one for each agent.
        more: number of further frames.
    """

    frame: Leaf
    size: int
    per_env: int = 1
    more: int = 0

    def frames_of(self, envs: int, steps: int) -> int:
        """Returns the number of frames for environments, without those that begin episodes."""
        return envs * self.per_env * (self.size + steps)

    def rows(self, envs: int, steps: int) -> int:
        """Returns the number of frames in the pool of one batch."""
        firsts = self.per_env * (_FIRST_FRAMES + envs * steps // _STEPS_PER_EPISODE)
        return self.frames_of(envs, steps) + 1 + firsts + self.more


# Room for first frames in a pool: one for each of so many steps, and a few more. If episodes are
# shorter on average, a batch gets additional memory.
_STEPS_PER_EPISODE = 16
_FIRST_FRAMES = 4


def pool_key(key: Key) -> Key:
    """Returns the key under which the frames of a stacked observation lie in a block."""
    return ("_frames", *key)


class Layout:
    """Layout of a batch.

    Each entry has the batch dimensions first, then time, and then its own dimensions.

    Args:
        leaves: entries of a frame, by key.
        batch: batch size of the environment; ``()`` for a single environment.
        steps: number of frames of each environment in a batch.
        pools: frames of the observations that are stacked, by key.
        parts: layouts of the batches that are joined in this one, each of which has its own part of
            every pool.
        agents: number of agents by the key of their group, for groups whose TensorDicts have a
            batch dimension for the agents.

    Attributes:
        size: batch size of the batch, with time as the last dimension.
        places: offset in the block in bytes, shape and dtype of each leaf and each pool, by key.
        arrays: shape, dtype and offset of the arrays over these places, by key.
        bfloat16: keys of those entries whose arrays are int16, because numpy has no bfloat16.
        nbytes: size of the block in bytes.
    """

    def __init__(
        self,
        leaves: Mapping[Key, Leaf],
        batch: tuple[int, ...],
        steps: int,
        pools: Mapping[Key, FramePool] | None = None,
        parts: Sequence[Layout] = (),
        agents: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.leaves = dict(leaves)
        self.batch = batch
        self.steps = steps
        self.size = torch.Size((*batch, steps))
        self.agents = dict(agents)
        self.pools = dict(pools or {})
        self.pool_rows: dict[Key, int] = {
            key: sum(part.pool_rows[key] for part in parts)
            if parts
            else pool.rows(math.prod(batch), steps)
            for key, pool in self.pools.items()
        }
        found = [(key, self.shape(key), leaf.dtype) for key, leaf in self.leaves.items()]
        for key, pool in self.pools.items():
            shape = (self.pool_rows[key], *pool.frame.shape)
            found.append((pool_key(key), shape, pool.frame.dtype))
        self.places: dict[Key, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self.nbytes = 0
        for key, shape, dtype in found:
            self.places[key] = self.nbytes, shape, dtype
            self.nbytes += aligned(math.prod(shape) * dtype.itemsize)
        self.arrays = {
            key: (shape, as_array(torch.empty(0, dtype=dtype)).dtype, offset)
            for key, (offset, shape, dtype) in self.places.items()
        }
        self.bfloat16 = frozenset(
            key for key, (_, _, dtype) in self.places.items() if dtype is torch.bfloat16
        )
        self._trees: dict[frozenset[Key], dict[str, Any]] = {}

    def tree(self, hidden: frozenset[Key]) -> Mapping[str, Any]:
        """Returns the keys of entries, nested as the entries are nested in a TensorDict.

        Args:
            hidden: keys to leave out.
        """
        if hidden not in self._trees:
            self._trees[hidden] = nested({key: key for key in self.leaves if key not in hidden})
        return self._trees[hidden]

    def shape(self, key: Key) -> tuple[int, ...]:
        """Returns the shape of an entry in the batch."""
        return (*self.size, *self.leaves[key].shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and all(
            getattr(self, name) == getattr(other, name)
            for name in ("leaves", "batch", "steps", "pools", "pool_rows")
        )

    def __hash__(self) -> int:
        return hash((self.batch, self.steps, self.nbytes))


def layout_of(batch: TensorDictBase) -> Layout | None:
    """Returns the layout of a batch, or None if it has no fixed layout."""
    if has_lazy(batch):
        return None
    leaves: dict[Key, Leaf] = {}
    for key, value in batch.items(True, True, is_leaf=is_leaf_nontensor):
        if type(value) is not Tensor or value.device.type != "cpu":
            return None
        leaves[as_key(key)] = Leaf(tuple(value.shape[batch.ndim :]), value.dtype)
    return Layout(leaves, tuple(batch.shape[:-1]), batch.shape[-1])


def along_time(how: str | int, batch: Sequence[int]) -> bool:
    """Returns True if ``cat_results`` concatenates the workers' batches along time.

    If an environment has no batch dimensions, the first dimension of a batch is time.

    Args:
        how: value of ``cat_results``: ``"stack"``, 0 or -1.
        batch: batch size of a worker's environment.
    """
    return how == -1 or (how == 0 and not batch)


class BatchPartition:
    """Layout of the batches of several workers in one block.

    Args:
        part: layout of one worker's batch. The layouts of the workers' batches differ only in the
            number of steps.
        steps: number of steps of each worker.
        how: value of ``cat_results``. ``"stack"`` adds a first dimension for the workers, 0
            concatenates their batches along the first dimension, and -1 concatenates them along
            time.

    Attributes:
        whole: the layout of the block.
        layouts: the layout of each worker's part.

    Raises:
        ValueError: if the workers' steps differ, unless their batches are concatenated along time.
    """

    def __init__(self, part: Layout, steps: Sequence[int], how: str | int) -> None:
        self._batch = batch = part.batch
        self._steps = list(steps)
        self._how = "time" if along_time(how, batch) else how
        leaves, pools, agents = part.leaves, part.pools, part.agents
        self.layouts = [
            Layout(leaves, batch, length, pools, agents=agents) for length in self._steps
        ]
        count = len(self._steps)
        if self._how == "time":
            self.whole = Layout(leaves, batch, sum(self._steps), pools, self.layouts, agents)
            return
        if len(set(self._steps)) > 1:
            raise ValueError(
                f"cat_results={how!r} needs batches of equal length from all workers, but they "
                f"have {self._steps} steps: use cat_results=-1 to join them along time"
            )
        together = (count, *batch) if how == "stack" else (count * batch[0], *batch[1:])
        self.whole = Layout(leaves, together, self._steps[0], pools, self.layouts, agents)

    def pool_starts(self, index: int) -> dict[Key, int]:
        """Returns the first row of a worker's part in each pool, by the key of the observation."""
        before = self.layouts[:index]
        return {key: sum(one.pool_rows[key] for one in before) for key in self.whole.pools}

    def written(self, index: int, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Returns the memory that a worker writes to, from the tensors of the whole block."""
        found = self.part(index, tensors)
        for key, start in self.pool_starts(index).items():
            rows = self.layouts[index].pool_rows[key]
            found[pool_key(key)] = found[pool_key(key)][start : start + rows]
        return found

    def copy_part(self, index: int, block: Mapping[Key, Tensor], own: Mapping[Key, Tensor]) -> None:
        """Copies the batch of a worker from memory of its own to its part of a block."""
        part = self.written(index, block)
        for key, tensor in part.items():
            tensor.copy_(own[key])
        for key, start in self.pool_starts(index).items():
            for name in (key, next_of(key)):
                part[name] += start

    def part(self, index: int, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Returns a worker's part of the tensors of the whole block.

        Its stacked observations refer to the frames of all workers, so pools are not divided.
        """
        pools = set(map(pool_key, self.whole.pools))
        divided = {key: tensor for key, tensor in tensors.items() if key not in pools}
        whole = {key: tensor for key, tensor in tensors.items() if key in pools}
        return {**self._part(index, divided), **whole}

    def _part(self, index: int, tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        if self._how == "stack":
            return {key: tensor[index] for key, tensor in tensors.items()}
        if self._how == "time":
            axis, start = len(self._batch), sum(self._steps[:index])
            length = self._steps[index]
        else:
            axis, start, length = 0, index * self._batch[0], self._batch[0]
        return {key: tensor.narrow(axis, start, length) for key, tensor in tensors.items()}


def as_array(tensor: Tensor) -> Array:
    """Returns a numpy array over a tensor's memory (int16 for bfloat16)."""
    array: Array = (tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Array:
    """Returns an array of zeros, with the dtype that :func:`as_array` uses for ``dtype``."""
    return np.zeros(shape, as_array(torch.empty(0, dtype=dtype)).dtype)
