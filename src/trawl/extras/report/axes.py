"""Axes of charts: places of values, and their ticks."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Each step between two ticks is one of these numbers times a power of ten.
_STEPS = (1, 2, 2.5, 5, 10)
# A tick may miss the end of its axis by this share of a step, due to rounding.
_ROUNDING = 1e-9
_LARGEST = sys.float_info.max
# Shorter steps can't be computed.
_FINEST = 1e-300
_SUFFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Axis:
    """Range of values that an axis shows.

    Attributes:
        low: value at the beginning of the axis.
        high: value at its end.
        label: what the values are.
    """

    low: float
    high: float
    label: str

    @classmethod
    def around(cls, values: NDArray[Any], label: str, start: float | None = None) -> Axis:
        """Returns an axis that shows all finite values and some room beside them.

        Args:
            values: the values.
            label: what the values are.
            start: value at which the axis begins, if this value is close to the smallest one.
        """
        finite = values[np.isfinite(values)].astype(np.float64)
        if not len(finite):
            return cls(0.0, 1.0, label)
        low, high = float(finite.min()), float(finite.max())
        # Half values, because the difference of two large values may exceed the range of floats.
        room = (high / 2 - low / 2) / 10 or abs(low) / 20 or 0.5
        low, high = max(low - room, -_LARGEST), min(high + room, _LARGEST)
        if start is not None and abs(low - start) <= 2 * room:
            low = start
        return cls(low, high, label)

    def place(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Returns the places of values, from 0 at the beginning of the axis to 1 at its end."""
        half = self.high / 2 - self.low / 2
        places: NDArray[np.float64] = (values.astype(np.float64) / 2 - self.low / 2) / half
        return places

    def ticks(self, most: int = 6) -> list[float]:
        """Returns round values to mark on the axis, at most ``most`` of them."""
        rough = (self.high / 2 - self.low / 2) / most * 2
        if rough < _FINEST:
            return []
        power = 10.0 ** math.floor(math.log10(rough))
        for factor in _STEPS:
            step = factor * power
            first = math.ceil(self.low / step - _ROUNDING)
            last = math.floor(self.high / step + _ROUNDING)
            if last - first < most:
                ticks = (number * step for number in range(first, last + 1))
                return [min(self.high, max(self.low, tick)) for tick in ticks]
        return []


def compact(value: float) -> str:
    """Formats a number in few characters.

    Examples:
        >>> [compact(number) for number in (0, 0.25, -1250, 20_000, 2_500_000)]
        ['0', '0.25', '-1,250', '20k', '2.5M']
    """
    return compact_all([value])[0]


def compact_all(values: Sequence[float]) -> list[str]:
    """Formats numbers, such as the ticks of an axis, in few characters and the same unit.

    Examples:
        >>> compact_all([0, 5000, 10_000])
        ['0', '5k', '10k']
    """
    largest = max(map(abs, values), default=0.0)
    if 10_000 <= largest < 1e15:
        unit, suffix = next(each for each in _SUFFIXES if largest >= each[0])
        return [f"{value / unit:.4g}{suffix}" if value else "0" for value in values]
    return [f"{v:,.0f}" if 1000 <= abs(v) < 10_000 else f"{v:.4g}" for v in values]
