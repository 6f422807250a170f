"""Count, mean and variance of samples, which can be merged exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trawl.memory import Array

Floats = NDArray[np.float64]

# Number of values that are converted to float64 at a time, so that they stay in the cache.
_PART = 1 << 15


@dataclass(frozen=True, eq=False)
class RunningMoments:
    """Count, mean and squared deviations of samples.

    Two sets of samples are merged by the formulas of Chan, Golub and LeVeque (*Updating Formulae
    and a Pairwise Algorithm for Computing Sample Variances*, 1979). The result is the same as that
    of all samples together, except for the rounding of float64. The count is exact.

    Attributes:
        count: number of samples.
        mean: mean of each element, float64.
        deviations: sum of the squared deviations from the mean of each element, float64.
    """

    count: int
    mean: Floats
    deviations: Floats

    @classmethod
    def empty(cls, shape: tuple[int, ...] = ()) -> RunningMoments:
        """Returns the moments of no samples."""
        return cls(0, np.zeros(shape), np.zeros(shape))

    @classmethod
    def of(cls, samples: Array) -> RunningMoments:
        """Returns the moments of samples of shape ``(count, *shape)``."""
        shape = samples.shape[1:]
        found = cls.empty(shape)
        rows = max(1, _PART // max(1, int(np.prod(shape))))
        # Samples may be infinite; then so is the result.
        with np.errstate(invalid="ignore", over="ignore"):
            for first in range(0, len(samples), rows):
                values = samples[first : first + rows].astype(np.float64)
                mean = values.mean(0)
                values -= mean
                np.square(values, out=values)
                part = cls(len(values), np.asarray(mean), np.asarray(values.sum(0)))
                found = found.merged(part)
        return found

    def merged(self, other: RunningMoments) -> RunningMoments:
        """Returns the moments of the samples of both."""
        if not (self.count and other.count):
            return self if self.count else other
        count = self.count + other.count
        apart = other.mean - self.mean
        mean = self.mean + apart * (other.count / count)
        between = np.square(apart) * (self.count * (other.count / count))
        return RunningMoments(count, mean, self.deviations + other.deviations + between)

    @property
    def var(self) -> Floats:
        """Variance of each element, with ``count`` as the divisor; 1 if there are no samples."""
        return self.deviations / self.count if self.count else np.ones_like(self.mean)

    @property
    def std(self) -> Floats:
        """Standard deviation of each element."""
        return np.sqrt(self.var)

    def state_dict(self) -> dict[str, Any]:
        """Returns the moments as numbers and tensors."""
        # Copies, because a file with a view would contain the whole array.
        mean, deviations = torch.tensor(self.mean), torch.tensor(self.deviations)
        return {"count": self.count, "mean": mean, "deviations": deviations}

    @classmethod
    def from_state(cls, state: Any) -> RunningMoments:
        """Returns the moments of a state that :meth:`state_dict` returned."""
        found = (torch.as_tensor(state[name]).double() for name in ("mean", "deviations"))
        mean, deviations = (one.numpy().copy() for one in found)
        return cls(int(state["count"]), mean, deviations)
