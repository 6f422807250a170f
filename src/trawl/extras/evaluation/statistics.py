"""Statistics of episodes: the performance of a policy, and its uncertainty."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Share of bootstrap resamples within the interval.
CONFIDENCE = 0.95
_RESAMPLES = 2000
# Maximum number of values that are resampled at a time.
_CHUNK = 1 << 20


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
    std = float(np.std(values, ddof=1)) if count > 1 else 0.0
    sem = std / count**0.5 if count > 1 else float("nan")
    low, high = bootstrap(values)
    return Summary(float(np.mean(values)), std, sem, interquartile_mean(values), low, high)


def interquartile_mean(values: Floats) -> float:
    """Returns the mean of the middle half of the numbers.

    At each end, a quarter of the numbers (rounded down) is left out.
    """
    cut = len(values) // 4
    return float(np.mean(np.sort(values)[cut : len(values) - cut]))


def bootstrap(values: Floats) -> tuple[float, float]:
    """Computes the percentile bootstrap interval of the mean; the result is deterministic.

    Returns:
        The ends of the interval; NaN for a single number.
    """
    count = len(values)
    if count < 2:
        return float("nan"), float("nan")
    generator = np.random.default_rng(0)
    means: list[Floats] = []
    rows = max(1, _CHUNK // count)
    for start in range(0, _RESAMPLES, rows):
        picks = generator.integers(count, size=(min(rows, _RESAMPLES - start), count))
        means.append(values[picks].mean(axis=1))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)
