"""Count, mean and variance of samples that are tensors on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from trawl.rollout.moments import BaseMoments, RunningMoments

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
            present: True where a sample counts, ``(count,)``; None if all of them count.
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
            absent = ~present.view(-1, *[1] * (values.ndim - 1))
            counts = present.sum(dtype=torch.float64)
            mean = values.masked_fill_(absent, 0.0).sum(0) / counts.clamp(min=1.0)
            values -= mean
            values.masked_fill_(absent, 0.0)
        return cls(counts, mean, values.mul_(values).sum(0))

    @classmethod
    def on(cls, device: torch.device, moments: RunningMoments) -> TensorMoments:
        """Returns moments on a device."""
        mean, deviations = torch.from_numpy(moments.mean), torch.from_numpy(moments.deviations)
        return cls(moments.count, mean.to(device), deviations.to(device))

    @override
    def on_host(self) -> RunningMoments:
        counts = np.asarray(int(self.counts))
        return RunningMoments(counts, self.mean.cpu().numpy(), self.deviations.cpu().numpy())
