"""A pairwise design: cases in which each two values of different factors meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = dict[str, Any]
#: Returns True if a case is possible, in which some factors may be missing.
Allowed = Callable[[Case], bool]


def pairs(factors: Mapping[str, Sequence[Any]], allowed: Allowed) -> set[Any]:
    """Returns all pairs of values that can meet."""
    return {
        frozenset([(one, a), (other, b)])
        for one, other in combinations(factors, 2)
        for a in factors[one]
        for b in factors[other]
        if allowed({one: a, other: b})
    }


def met(cases: Iterable[Case]) -> set[Any]:
    """Returns all pairs of values that meet in some cases."""
    return {frozenset(pair) for case in cases for pair in combinations(case.items(), 2)}


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Allowed, others: Iterable[Case] = ()
) -> list[Case]:
    """Returns cases that have every pair that can meet, but for those that meet in others.

    The first value of each factor must be possible with all values of the others.
    """
    # By their texts, as values of factors may have no order.
    missing = pairs(factors, allowed) - met(others)
    texts = {pair: str(sorted(pair, key=str)) for pair in missing}
    left, cases, draw = set(texts), list[Case](), random.Random(0)
    while left:
        case: Case = dict(sorted(min(left, key=texts.__getitem__), key=str))
        for factor in draw.sample(list(factors), len(factors)):
            if factor in case:
                continue
            fitting = [one for one in factors[factor] if allowed({**case, factor: one})]
            gains = [
                sum(frozenset([(factor, value), other]) in left for other in case.items())
                for value in fitting
            ]
            best = max(gains)
            case[factor] = draw.choice(
                [value for value, gain in zip(fitting, gains, strict=True) if gain == best]
            )
        left -= met([case])
        cases.append(case)
    return cases
