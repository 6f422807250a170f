"""Statistics of episodes: the performance of a policy, and its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

# Share of bootstrap resamples within the interval.
CONFIDENCE = 0.95
_RESAMPLES = 2000
# Maximum number of values that are resampled at a time.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Summary:
    """Summary statistics of a sample.

    For a single number, ``sem``, ``low`` and ``high`` are NaN.

    Attributes:
        mean: mean of the numbers.
        std: standard deviation with Bessel's correction; 0 for a single number.
        sem: standard error of the mean.
        iqm: interquartile mean: the mean of the middle half, which is robust to a few outliers.
        low: lower end of the bootstrap confidence interval (95 %) of the mean.
        high: upper end of that interval.
    """

    mean: float
    std: float
    sem: float
    iqm: float
    low: float
    high: float


def summarise(values: Floats) -> Summary:
    """Returns the summary statistics of a sample.

    Args:
        values: at least one number.

    Examples:
        >>> from trawl.extras.evaluation.statistics import summarise
        >>> import numpy as np
        >>> summary = summarise(np.array([1.0, 2.0, 3.0, 4.0, 90.0, -80.0, 2.0, 3.0]))
        >>> summary.iqm
        2.5
    """
    count = len(values)
    samples = torch.from_numpy(np.array(values))
    iqm, mean = float(interquartile_mean(samples)), float(np.mean(values))
    if count < 2:
        return Summary(mean, 0.0, math.nan, iqm, math.nan, math.nan)
    std = float(np.std(values, ddof=1))
    # Equal samples have equal intervals.
    generator = torch.Generator().manual_seed(0)
    low, high = bootstrap(
        samples, lambda values: values.mean(-1), CONFIDENCE, _RESAMPLES, generator
    ).tolist()
    return Summary(mean, std, std / count**0.5, iqm, low, high)


def interquartile_mean(values: Tensor) -> Tensor:
    """Returns the means of the middle halves of the numbers in the last dimension.

    At each end, a quarter of the numbers (rounded down) is left out.
    """
    size = values.shape[-1]
    return values.sort(-1).values[..., size // 4 : size - size // 4].mean(-1)


def bootstrap(
    samples: Tensor,
    statistic: Callable[[Tensor], Tensor],
    confidence: float,
    resamples: int,
    generator: torch.Generator | None,
) -> Tensor:
    """Computes percentile bootstrap intervals of a statistic.

    Args:
        samples: float64 samples, in the last dimension. All rows are resampled alike, so that their
            intervals can be compared.
        statistic: function that computes the statistic in the last dimension.
        confidence: share of the resamples within the interval.
        resamples: number of resamples.
        generator: generator of the resamples.

    Returns:
        The lower ends and the upper ends.
    """
    size, device = samples.shape[-1], samples.device
    rows = max(1, _CHUNK // max(1, samples.numel()))
    found = []
    for start in range(0, resamples, rows):
        shape = min(rows, resamples - start), size
        picks = torch.randint(size, shape, generator=generator, device=device)
        found.append(statistic(samples[..., picks]))
    ends = torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=torch.float64)
    return torch.quantile(torch.cat(found, -1), ends.to(device), dim=-1)
