"""Rates of candidates that were measured in several rounds, adjusted to the same conditions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from trawl.collectors.tuning.candidate import Candidate
from trawl.collectors.tuning.trial import Measurement

Round = Mapping[Candidate, Measurement]


def adjusted_rates(rounds: Sequence[Round]) -> dict[Candidate, float]:
    """Returns the rates of candidates, adjusted to the conditions of the last round.

    Other programs may make the machine faster or slower during a search, which affects all
    candidates of a round alike. Candidates that were measured in two successive rounds show by
    how much the conditions changed.

    Args:
        rounds: measurements by candidate, for each round.

    Examples:
        >>> a, b = (Candidate(frames_per_batch=n) for n in (1, 2))
        >>> one = {a: Measurement(300, 1.0), b: Measurement(200, 1.0)}
        >>> other = {a: Measurement(150, 1.0)}  # half as fast as before
        >>> rates = adjusted_rates([one, other])
        >>> {each.frames_per_batch: round(rate) for each, rate in rates.items()}
        {1: 150, 2: 100}
    """
    sums: dict[Candidate, float] = {}
    seconds: dict[Candidate, float] = {}
    for found, change in zip(rounds, _changes(rounds), strict=True):
        for candidate, measurement in found.items():
            time = measurement.seconds
            level = math.log(measurement.rate) + change
            sums[candidate] = sums.get(candidate, 0.0) + time * level
            seconds[candidate] = seconds.get(candidate, 0.0) + time
    return {candidate: math.exp(total / seconds[candidate]) for candidate, total in sums.items()}


def _changes(rounds: Sequence[Round]) -> list[float]:
    """Returns the logarithm of the speed-up from each round to the last round."""
    changes = [0.0]
    for before, after in reversed(list(pairwise(rounds))):
        both = [math.log(after[each].rate / before[each].rate) for each in before if each in after]
        changes.append(changes[-1] + (statistics.fmean(both) if both else 0.0))
    return changes[::-1][: len(rounds)]
