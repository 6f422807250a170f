"""Count, mean and variance of samples, and the formula that normalises values with them.

:class:`RunningMoments` are those of arrays, and :class:`TensorMoments` those of tensors, which lie
on the device of the tensors. Both can be merged exactly. :meth:`BaseMoments.affine` and
:class:`Formula` say how values are normalised: observations and rewards, of all kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from trawl.memory import Array, Mask
from trawl.rollout.ops import Operations, operations, write

Floats = NDArray[np.float64]
_M = TypeVar("_M", bound="BaseMoments")

# Number of values that are converted to float64 at a time, so that they stay in the cache.
_PART = 1 << 15


@dataclass(frozen=True, eq=False)
class BaseMoments:
    """Count, mean and squared deviations of samples, as arrays of numpy or tensors.

    All methods use only operators, so they are the same for both.

    Attributes:
        counts: number of samples of each element, in a shape that broadcasts to that of the mean.
        mean: mean of each element, float64.
        deviations: sum of the squared deviations from the mean of each element, float64.
    """

    counts: Any
    mean: Any
    deviations: Any

    def merged(self: _M, other: _M) -> _M:
        """Returns the moments of the samples of both."""
        counts = self.counts + other.counts
        share = other.counts / (counts + (counts == 0))
        apart = other.mean - self.mean
        between = apart * apart * (self.counts * share)
        mean = self.mean + apart * share
        return type(self)(counts, mean, self.deviations + other.deviations + between)

    @property
    def var(self) -> Any:
        """Variance of each element, with its count as the divisor; 1 if there are no samples."""
        missing = self.counts == 0
        return self.deviations / (self.counts + missing) + missing

    def affine(self, epsilon: float, largest: float = math.inf) -> tuple[Any, Any]:
        """Returns the mean to subtract and the factor to multiply with; 0 and 1 without samples.

        Args:
            epsilon: number to add to the variance.
            largest: largest number of the data's dtype, which limits the factor.
        """
        # The share is exactly 1 if there are samples, and exactly 0 if there are none.
        share = self.counts / (self.counts + (self.counts == 0))
        return self.mean, (1.0 / (self.var + epsilon * share) ** 0.5).clip(max=largest)

    def on_host(self) -> RunningMoments:
        """Returns the moments as arrays of numpy, which may wait for the device."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RunningMoments(BaseMoments):
    """Count, mean and squared deviations of samples.

    Two sets of samples are merged by the formulas of Chan, Golub and LeVeque (*Updating Formulae
    and a Pairwise Algorithm for Computing Sample Variances*, 1979). The result is the same as that
    of all samples together, except for the rounding of float64. The count is exact.

    Attributes:
        counts: number of samples of each element, in a shape that broadcasts to that of the mean.
            It has more than one number only for a group of agents that may be absent.
        mean: mean of each element, float64.
        deviations: sum of the squared deviations from the mean of each element, float64.
    """

    counts: NDArray[np.int64]
    mean: Floats
    deviations: Floats

    def __post_init__(self) -> None:
        # Operations on arrays without dimensions return numbers.
        object.__setattr__(self, "counts", np.asarray(self.counts, np.int64))
        object.__setattr__(self, "mean", np.asarray(self.mean))
        object.__setattr__(self, "deviations", np.asarray(self.deviations))

    @property
    def count(self) -> int:
        """Number of samples; of a group of agents, the largest number."""
        return int(self.counts.max())

    @classmethod
    def empty(cls, shape: tuple[int, ...] = (), counted: int = 0) -> RunningMoments:
        """Returns the moments of no samples.

        Args:
            shape: shape of a sample.
            counted: number of leading dimensions in which each element has its own count.
        """
        counts = np.zeros(counts_shape(shape, counted), np.int64)
        return cls(counts, np.zeros(shape), np.zeros(shape))

    def cleared(self) -> RunningMoments:
        """Returns the moments of no samples of the same shape."""
        zeros = np.zeros_like(self.mean)
        return RunningMoments(np.zeros_like(self.counts), zeros, zeros)

    @classmethod
    def of(cls, samples: Array, present: Mask | None = None) -> RunningMoments:
        """Returns the moments of samples.

        Args:
            samples: the samples, ``(count, *shape)``.
            present: True where an element counts, in the shape of the first dimensions of the
                samples; None if all elements count.
        """
        shape = samples.shape[1:]
        found = cls.empty(shape, 0 if present is None else present.ndim - 1)
        rows = max(1, _PART // max(1, int(np.prod(shape))))
        # Samples may be infinite; then so is the result.
        with np.errstate(invalid="ignore", over="ignore"):
            for first in range(0, len(samples), rows):
                chosen = slice(first, first + rows)
                values = samples[chosen].astype(np.float64)
                part = cls._whole(values) if present is None else cls._some(values, present[chosen])
                found = found.merged(part)
        return found

    @classmethod
    def _whole(cls, values: Floats) -> RunningMoments:
        mean = values.mean(0)
        values -= mean
        np.square(values, out=values)
        return cls(np.asarray(len(values)), np.asarray(mean), np.asarray(values.sum(0)))

    @classmethod
    def _some(cls, values: Floats, present: Mask) -> RunningMoments:
        if present.ndim == 1:
            return cls._whole(values[present]) if present.any() else cls.empty(values.shape[1:])
        counts = present.sum(0).reshape(counts_shape(values.shape[1:], present.ndim - 1))
        if present.all():
            whole = cls._whole(values)
            return cls(counts, whole.mean, whole.deviations)
        absent = ~present
        values[absent] = 0
        mean = values.sum(0) / np.maximum(counts, 1)
        values -= mean
        values[absent] = 0
        return cls(counts, mean, np.square(values, out=values).sum(0))

    @override
    def merged(self, other: RunningMoments) -> RunningMoments:
        """Returns the moments of the samples of both."""
        if not (self.counts.any() and other.counts.any()):
            return self if self.counts.any() else other
        with np.errstate(invalid="ignore", over="ignore"):
            return super().merged(other)

    @property
    @override
    def var(self) -> Floats:
        """Variance of each element, with its count as the divisor; 1 if there are no samples."""
        return np.asarray(super().var)

    @property
    def std(self) -> Floats:
        """Standard deviation of each element."""
        return np.sqrt(self.var)

    @override
    def on_host(self) -> RunningMoments:
        """Returns the moments themselves."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """Returns the moments as numbers and tensors."""
        # Copies, because a file with a view would contain the whole array.
        mean, deviations = torch.tensor(self.mean), torch.tensor(self.deviations)
        counts = torch.tensor(self.counts) if self.counts.ndim else int(self.counts)
        return {"count": counts, "mean": mean, "deviations": deviations}

    @classmethod
    def from_state(cls, state: Any) -> RunningMoments:
        """Returns the moments of a state that :meth:`state_dict` returned."""
        found = (torch.as_tensor(state[name]).double() for name in ("mean", "deviations"))
        mean, deviations = (one.numpy().copy() for one in found)
        return cls(torch.as_tensor(state["count"]).numpy().copy(), mean, deviations)


def counts_shape(shape: tuple[int, ...], counted: int) -> tuple[int, ...]:
    """Returns the shape of the counts of samples of the given shape.

    Args:
        shape: shape of a sample.
        counted: number of leading dimensions in which each element has its own count.
    """
    return (*shape[:counted], *[1] * (len(shape) - counted)) if counted else ()


# Number of values that are converted to float64 at a time: on the CPU, so that they stay in the
# cache; on a GPU, to limit the memory.
_PART_CPU, _PART_GPU = 1 << 17, 1 << 24


@dataclass(frozen=True, eq=False)
class TensorMoments(BaseMoments):
    """Count, mean and squared deviations of samples, as tensors of float64 on one device.

    Only :meth:`on_host` waits for the device.

    Attributes:
        counts: number of samples; a tensor if only the device knows it.
        mean: mean of each element.
        deviations: sum of the squared deviations from the mean of each element.
    """

    counts: Tensor | float
    mean: Tensor
    deviations: Tensor

    @classmethod
    def of(cls, samples: Tensor, present: Tensor | None = None) -> TensorMoments:
        """Returns the moments of samples.

        Args:
            samples: at least one sample, ``(count, *shape)``.
            present: True where an element counts, in the shape of the first dimensions of the
                samples; None if all elements count.
        """
        size = _PART_CPU if samples.device.type == "cpu" else _PART_GPU
        rows = max(1, size // max(1, math.prod(samples.shape[1:])))
        parts = samples.split(rows)
        masks = [None] * len(parts) if present is None else present.split(rows)
        first, *more = map(cls._part, parts, masks)
        for part in more:
            first = first.merged(part)
        return first

    @classmethod
    def _part(cls, samples: Tensor, present: Tensor | None) -> TensorMoments:
        values = samples.double()
        if values is samples:
            values = samples.clone()
        counts: Tensor | float = len(values)
        if present is None:
            mean = values.mean(0)
            values -= mean
        else:
            # A sample that doesn't count may have any value, also nan.
            absent = ~present.view(*present.shape, *[1] * (values.ndim - present.ndim))
            shape = counts_shape(values.shape[1:], present.ndim - 1)
            counts = present.sum(0, dtype=torch.float64).reshape(shape)
            mean = values.masked_fill_(absent, 0.0).sum(0) / counts.clamp(min=1.0)
            values -= mean
            values.masked_fill_(absent, 0.0)
        return cls(counts, mean, values.mul_(values).sum(0))

    @classmethod
    def on(cls, device: torch.device, moments: RunningMoments) -> TensorMoments:
        """Returns moments on a device."""
        counts: Tensor | float = moments.count
        if moments.counts.ndim:
            counts = torch.from_numpy(moments.counts).to(device, torch.float64)
        mean, deviations = torch.from_numpy(moments.mean), torch.from_numpy(moments.deviations)
        return cls(counts, mean.to(device), deviations.to(device))

    @override
    def on_host(self) -> RunningMoments:
        counts = np.asarray(torch.as_tensor(self.counts).cpu(), np.int64)
        return RunningMoments(counts, self.mean.cpu().numpy(), self.deviations.cpu().numpy())


class Formula:
    """Formula by which the values of an entry are normalised, with its operands.

    ``(value - mean) / sqrt(variance + epsilon)``, from ``-clip`` to ``clip``; before there are
    samples, the value itself, clipped.

    Args:
        like: values of the entry, which have the dtype and the device of the operands.
        shape: shape of the statistics.
        clip: largest absolute value of the result; infinite for no limit.
        epsilon: number that is added to the variance.
        keeps_mean: True if the mean is not subtracted, so that values keep their sign.

    Attributes:
        normalize: function of values, and where to write the result, which it returns. That may be
            the values themselves; without it, the result is new.
    """

    def __init__(
        self,
        like: Any,
        shape: Sequence[int],
        clip: float,
        epsilon: float,
        keeps_mean: bool = False,
    ) -> None:
        ops = operations(like)
        self._epsilon, self._keeps_mean = epsilon, keeps_mean
        self._largest = float(ops.finfo(like.dtype).max)
        clip = clip if math.isinf(clip) else min(clip, self._largest)
        # Rows of the values' own dtype, because numpy and torch are slower with any other operand.
        # The mean is added with its sign changed: torch subtracts nothing from flags. To add -0.0
        # changes no bit.
        self._shift, self._scale, low, high = (
            ops.full(like, shape, value) for value in (-0.0, 1.0, -clip, clip)
        )
        self.normalize = self._bound(ops, low, high)

    def load(self, moments: BaseMoments) -> None:
        """Sets the statistics for all values from now on."""
        mean, scale = moments.affine(self._epsilon, self._largest)
        write(self._scale, scale)
        if not self._keeps_mean:
            write(self._shift, -mean)

    def _bound(self, ops: Operations, low: Any, high: Any) -> Callable[..., Any]:
        add, limit, shift, scale = ops.add, ops.limit, self._shift, self._scale
        maximum, minimum = np.maximum, np.minimum

        def normalize(source: Any, target: Any = None) -> Any:
            target = add(source, shift, target)
            target *= scale
            if limit is not None:
                limit(target, low, high)
            else:
                maximum(target, low, out=target)
                minimum(target, high, out=target)
            return target

        return normalize
