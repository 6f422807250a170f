"""Steps of an environment of tensors whose observations are normalised.

A :class:`NormalizedSteps` normalises all observations of a step at once. Its
:class:`NormalizedRows` keep the observations of the environment until they have been counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trawl.envs.tensor_env import TensorEnv, TensorStep
from trawl.keys import Key
from trawl.rollout.moments import BaseMoments
from trawl.rollout.normalization import clip_within
from trawl.rollout.tensor_block import TensorBlock

# Number of values that are kept before they are counted: on the CPU, so that they stay in the
# cache; on a GPU, where each count takes as long as its calls, to limit the memory.
_KEPT_CPU, _KEPT_GPU = 1 << 18, 1 << 24


class NormalizedRows:
    """Rows of one observation, and the statistics with which it is normalised.

    Args:
        key: key of the observation.
        next_row: the normalised observations with which the next batch begins.
        steps: number of rows in a batch.
        kept: number of rows that are counted together; the rows of a batch are divided into parts
            of this size. With 0, a row is counted before its step, without a copy.
        clip: largest absolute value of an element.

    Attributes:
        leaf: shape of an observation.
        raw_next: the observations of the environment with which the next batch begins.
    """

    def __init__(self, key: Key, next_row: Tensor, steps: int, kept: int, clip: float) -> None:
        self.key, self.next_row = key, next_row
        self.leaf = tuple(next_row.shape[1:])
        self.raw_next = next_row.clone()
        # The step of the last row of a part writes the first row of the next part.
        self._raw = next_row.new_empty(min(2 * kept, steps), *next_row.shape)
        self._steps, self._size = steps, len(self._raw)
        self._held = self.raw_next
        self._last = next_row.clone()
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        self._largest = torch.finfo(next_row.dtype).max
        self._clip = clip_within(clip, self._largest)
        # Added instead of the mean subtracted, because torch subtracts nothing from flags.
        self._shift = next_row.new_zeros(self.leaf)
        self._scale = next_row.new_ones(self.leaf)

    def load(self, moments: BaseMoments, epsilon: float) -> None:
        """Sets the statistics for all rows from now on."""
        mean, scale = moments.affine(epsilon, self._largest)
        self._shift.copy_(-mean)
        self._scale.copy_(scale)

    def normalize(self, source: Tensor, target: Tensor) -> None:
        """Writes normalised values; ``target`` may be ``source`` itself."""
        torch.add(source, self._shift, out=target)
        target.mul_(self._scale).clamp_(-self._clip, self._clip)

    def begin(self) -> None:
        """Begins a batch."""
        if self._size:
            self._raw[0].copy_(self.raw_next)
        self._held = self.raw_next

    def bind(self, block: TensorBlock, start: int, stop: int) -> None:
        """Sets the rows to write to in the steps of a chunk."""
        self._targets = block.following(self.key, start, stop, self.next_row)
        self._sources = [*self._rows(start + 1, stop + 1)] if self._size else []

    def _rows(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yields the kept rows of a chunk, in which row ``steps`` is that of the next batch."""
        row, end = start, min(stop, self._steps)
        while row < end:
            first = row % self._size
            part = self._raw[first : first + end - row]
            yield from part.unbind(0)
            row += len(part)
        if stop > self._steps:
            yield self.raw_next

    def keep(self, t: int, values: Tensor) -> None:
        """Keeps the observations with which the next frame begins, until they are counted."""
        if self._size:
            self._sources[t].copy_(values)
        else:
            self._held = values

    def follow(self, t: int, values: Tensor) -> Tensor:
        """Writes normalised values to the row of the next frame, and returns this row."""
        row = self._targets[t]
        self.normalize(values, row)
        return row

    def keep_next(self, row: int) -> None:
        """Keeps the observations with which the next batch begins."""
        if not self._size:
            self.raw_next.copy_(self._held)
        elif row < self._steps:
            self.raw_next.copy_(self._raw[row % self._size])

    def kept(self, chosen: slice) -> Tensor:
        """Returns the observations of some rows of the same part, one after the other."""
        if not self._size:
            return self._held
        first = chosen.start % self._size
        return self._raw[first : first + chosen.stop - chosen.start].flatten(0, 1)

    def normalized_last(self, values: Tensor, ended: Tensor, at_once: bool) -> Tensor:
        """Returns normalised values where ``ended`` is True, and any values elsewhere."""
        last = self._last
        if not at_once:
            self.normalize(values, last)
            return last
        # On the CPU, it is worth finding the rows, because only few episodes end in a step. For a
        # few rows, numpy is faster than torch.
        rows = ended.numpy().nonzero()[0]
        if len(rows):
            chosen = torch.from_numpy(rows)
            found = values.index_select(0, chosen).to(last.dtype)
            self.normalize(found, found)
            # Faster than index_copy_.
            last.index_put_((chosen,), found)
        return last


class NormalizedSteps:
    """Steps of an environment, with normalised observations.

    The observations of a step are normalised in the row of the next frame. The stepper copies them
    from there, and the policy reads them while they are still in the cache.

    Args:
        env: the environment.
        places: the observations that are normalised, each with its index among all observations.

    Attributes:
        t: number of the step in its chunk.
    """

    t = 0

    def __init__(self, env: TensorEnv, places: Sequence[tuple[int, NormalizedRows]]) -> None:
        self._env = env
        self._places = places
        # The leaves of the last step, of the environment and normalised.
        self._last: list[Tensor] = []
        self._shown: list[Tensor] = []

    def begin(self, mask: Tensor | None, **kwargs: Any) -> list[Tensor]:
        """Begins episodes, as the environment does, and returns normalised observations."""
        return self._begun(self._env.begin(mask, **kwargs))

    def advance(self, actions: Iterable[Tensor]) -> TensorStep:
        """Takes a step, and returns its results with normalised observations."""
        result = self._env.advance(actions)
        self._last, self._shown = result.last, self._normalized(result.last)
        final = result.final
        if final is not None:
            final = [*final]
            ended = torch.logical_or(result.terminated, result.truncated)
            at_once = self._env.answers_at_once
            for index, one in self._places:
                final[index] = one.normalized_last(final[index], ended, at_once)
        return TensorStep(self._shown, final, *result[2:])

    def begin_next(self, ended: Tensor, cut: Tensor | None = None) -> list[Tensor]:
        """Returns the normalised observations that the next step begins with."""
        leaves = self._env.begin_next(ended, cut)
        if leaves is not self._last:
            return self._begun(leaves)
        self._keep(leaves)
        return self._shown

    def _begun(self, leaves: list[Tensor]) -> list[Tensor]:
        self._keep(leaves)
        return self._normalized(leaves)

    def _keep(self, leaves: Sequence[Tensor]) -> None:
        for index, one in self._places:
            one.keep(self.t, leaves[index])

    def _normalized(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        found = [*leaves]
        for index, one in self._places:
            found[index] = one.follow(self.t, found[index])
        return found


def rows_kept(rows: Sequence[Tensor], steps: int, masked: bool) -> int:
    """Returns the number of rows whose observations are counted together.

    Returns 0 if each row is to be counted just before its step, because a row is too large to stay
    in the cache for long. A row that may hold no frame can be counted only after the step.
    """
    on_cpu = rows[0].device.type == "cpu"
    found = (_KEPT_CPU if on_cpu else _KEPT_GPU) // max(1, sum(row.numel() for row in rows))
    if found < 2 and on_cpu and not masked:
        return 0
    return max(1, min(steps, found))
