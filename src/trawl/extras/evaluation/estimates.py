"""Bootstrap estimates of returns, with the interface of TorchRL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from trawl.checks import check_number
from trawl.collectors.options import one_of

Statistic = Literal["mean", "median", "iqm"]
# Maximum number of values that are resampled at a time.
_CHUNK = 1 << 22


def bootstrap_estimate(
    values: Tensor,
    dim: int = -1,
    *,
    statistic: Statistic = "iqm",
    confidence: float = 0.95,
    num_resamples: int = 1000,
    generator: torch.Generator | None = None,
) -> TensorDict:
    """Estimates a statistic of samples, with a percentile bootstrap interval.

    Args:
        values: the samples, such as the returns of episodes: numbers of any dtype.
        dim: dimension of the samples.
        statistic: ``"mean"``, ``"median"``, or ``"iqm"``, the interquartile mean: the mean of what
            is left without the lowest and the highest quarter (each rounded down).
        confidence: share of the resamples within the interval, between 0 and 1.
        num_resamples: number of resamples, each of which is drawn with replacement.
        generator: generator of the resamples, on the device of ``values``; None for torch's global
            generator.

    Returns:
        A TensorDict with ``"estimate"``, ``"ci_low"`` and ``"ci_high"`` (float32), whose batch size
        is the shape of ``values`` without ``dim``.

    Raises:
        TypeError: if ``values`` is not a tensor of real numbers, or a number has the wrong type.
        ValueError: if ``statistic`` is unknown, ``confidence`` or ``num_resamples`` is out of
            range, or there are no samples.
        IndexError: if ``values`` has no dimension ``dim``.

    Examples:
        >>> import torch
        >>> from trawl.collectors import bootstrap_estimate
        >>> returns = torch.tensor([[0.0, 0.0, 0.0, 100.0], [5.0, 5.0, 5.0, 5.0]])
        >>> bootstrap_estimate(returns)["estimate"]
        tensor([0., 5.])
    """
    samples = _samples("values", values, dim)
    compute = _STATISTICS[one_of(*_STATISTICS)("statistic", statistic)]
    tail = (1 - _between("confidence", confidence)) / 2
    count = check_number("num_resamples", num_resamples, least=1)
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(f"generator must be a torch.Generator or None, but it is {generator!r}")
    size = samples.shape[-1]
    # All rows are resampled alike, so that their estimates can be compared.
    picks = torch.randint(size, (count, size), generator=generator, device=samples.device)
    rows = max(1, _CHUNK // max(1, samples.numel()))
    resampled = torch.cat([compute(samples[..., part]) for part in picks.split(rows)], -1)
    ends = torch.tensor([tail, 1 - tail], dtype=torch.float64, device=samples.device)
    low, high = torch.quantile(resampled, ends, dim=-1)
    found = {"estimate": compute(samples), "ci_low": low, "ci_high": high}
    batch = samples.shape[:-1]
    return TensorDict({name: value.float() for name, value in found.items()}, batch)


def paired_comparison(
    first: Tensor,
    second: Tensor,
    dim: int = -1,
    *,
    statistic: Statistic = "mean",
    confidence: float = 0.95,
    num_resamples: int = 1000,
    generator: torch.Generator | None = None,
) -> TensorDict:
    """Compares paired samples, such as the returns of two policies on the same episodes.

    :meth:`Evaluator.evaluate_episodes <trawl.collectors.Evaluator.evaluate_episodes>` returns such
    samples for each seed.

    Args:
        first: the samples of the first policy.
        second: the samples of the second policy, of the same shape.
        dim: dimension of the samples.
        statistic: statistic of the differences ``first - second`` (see
            :func:`bootstrap_estimate`).
        confidence: see :func:`bootstrap_estimate`.
        num_resamples: see :func:`bootstrap_estimate`.
        generator: see :func:`bootstrap_estimate`.

    Returns:
        The estimate of the differences, and ``"probability_of_improvement"`` (float32): the share
        of pairs in which ``first`` is larger; ties count half.

    Raises:
        ValueError: if the shapes differ; also the errors of :func:`bootstrap_estimate`.

    Examples:
        >>> import torch
        >>> from trawl.collectors import paired_comparison
        >>> first = torch.tensor([3.0, 5.0, 4.0, 6.0])
        >>> result = paired_comparison(first, first - 1)
        >>> result["estimate"], result["probability_of_improvement"]
        (tensor(1.), tensor(1.))
    """
    one, other = _samples("first", first, dim), _samples("second", second, dim)
    if one.shape != other.shape:
        raise ValueError(
            "first and second must be paired samples of the same shape, but their shapes are "
            f"{tuple(first.shape)} and {tuple(second.shape)}"
        )
    result = bootstrap_estimate(
        one - other,
        statistic=statistic,
        confidence=confidence,
        num_resamples=num_resamples,
        generator=generator,
    )
    wins = (one > other).double() + (one == other).double() / 2
    return result.set("probability_of_improvement", wins.mean(-1).float())


def _samples(name: str, values: Any, dim: int) -> Tensor:
    """Returns samples as float64, in the last dimension.

    Raises:
        TypeError: if they are not a tensor of real numbers.
        IndexError: if they have no dimension ``dim``.
        ValueError: if there are no samples.
    """
    if not isinstance(values, Tensor) or values.is_complex():
        what = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name} must be a tensor of real numbers, but it is {what}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an integer, but it is {type(dim).__name__}: {dim!r}")
    if not -values.ndim <= dim < values.ndim:
        raise IndexError(
            f"dim must be a dimension of {name}, but it is {dim}, and {name} has shape "
            f"{tuple(values.shape)}"
        )
    if not values.shape[dim]:
        raise ValueError(
            f"{name} must have at least one sample in dimension {dim}, but its shape is "
            f"{tuple(values.shape)}"
        )
    return values.movedim(dim, -1).double()


def _between(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, but it is {value!r}")
    if not 0 < value < 1:
        raise ValueError(f"{name} must be between 0 and 1 (exclusive), but it is {value}")
    return float(value)


def _median(values: Tensor) -> Tensor:
    size = values.shape[-1]
    middle = values.sort(-1).values[..., (size - 1) // 2 : size // 2 + 1]
    return middle.mean(-1)


def _iqm(values: Tensor) -> Tensor:
    size = values.shape[-1]
    return values.sort(-1).values[..., size // 4 : size - size // 4].mean(-1)


def _mean(values: Tensor) -> Tensor:
    return values.mean(-1)


_STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "iqm": _iqm,
    "mean": _mean,
    "median": _median,
}
