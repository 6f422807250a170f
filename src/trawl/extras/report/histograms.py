"""Histograms and moments of the entries of a dataset, computed from batches.

The bins of a histogram are aligned to powers of two. If a value lies outside, bins are joined in
pairs. The result therefore depends only on the values, and each value is read once.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from trawl.data.sinks.entries import Entry, to_texts
from trawl.observe.episodes import Moments

MOST_BINS = 64
# Number of values to convert at a time: they fit into a cache. Number of values of an entry to read
# at most.
_BLOCK, _MOST_VALUES = 1 << 16, 1 << 28
# Number of entries to summarize, and number of texts to tell apart.
MOST_ENTRIES, MOST_TEXTS = 200, 1000
# A bin is not narrower than this share of the largest value, as a power of two.
_FINEST, _SMALLEST = 40, -1000


class Histogram:
    """Counts of values in at most :data:`MOST_BINS` bins of equal width.

    Attributes:
        counts: number of values in each bin.

    Examples:
        >>> import numpy as np
        >>> from trawl.extras.report.histograms import Histogram
        >>> histogram = Histogram(whole=True)
        >>> histogram.add(np.array([1, 2, 2, 4]))
        >>> histogram.counts.tolist(), histogram.edges.tolist()
        ([1, 2, 0, 1], [1.0, 2.0, 3.0, 4.0, 5.0])

    Args:
        whole: True if all values are integers.
    """

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole
        self.counts = np.zeros(0, np.int64)
        # Bin i begins at (first + i) * 2**exponent.
        self._first, self._exponent = 0, 0 if whole else _SMALLEST

    def add(self, values: NDArray[np.int64] | NDArray[np.float64]) -> None:
        """Adds finite values."""
        if not values.size:
            return
        ends = np.array([values.min(), values.max()])
        largest = float(np.abs(ends.astype(np.float64)).max())
        finest = math.frexp(largest)[1] - _FINEST if largest else _SMALLEST
        exponent = max(self._exponent, 0 if self.whole else finest)
        while True:
            places = [*self._places(ends, exponent).tolist(), *self._range(exponent)]
            first, last = min(places), max(places)
            if last - first < MOST_BINS:
                break
            exponent += 1
        self._widen(exponent, first, last)
        bins = self._places(values, exponent) - first
        self.counts += np.bincount(bins, minlength=len(self.counts))

    @property
    def edges(self) -> NDArray[np.float64]:
        """Values between the bins, with the outer ends: one more than there are bins."""
        numbers = self._first + np.arange(len(self.counts) + 1, dtype=np.float64)
        with np.errstate(over="ignore"):  # of the end of the last bin
            edges = np.ldexp(numbers, self._exponent)
        return np.clip(edges, -sys.float_info.max, sys.float_info.max)

    def _range(self, exponent: int) -> list[int]:
        """Returns the first and last bin with another width; an empty list without values."""
        if not len(self.counts):
            return []
        shift = exponent - self._exponent
        return [self._first >> shift, (self._first + len(self.counts) - 1) >> shift]

    def _places(
        self, values: NDArray[np.int64] | NDArray[np.float64], exponent: int
    ) -> NDArray[np.int64]:
        """Returns the numbers of the bins of values, with a width of ``2**exponent``."""
        if self.whole:
            return values.astype(np.int64) >> exponent
        places = np.floor(np.ldexp(values, -exponent)).astype(np.int64)
        # A small negative number may have become 0.
        bins: NDArray[np.int64] = places - ((values < 0) & (places == 0))
        return bins

    def _widen(self, exponent: int, first: int, last: int) -> None:
        """Moves the counts into bins from ``first`` to ``last`` of another width."""
        counts = np.zeros(last - first + 1, np.int64)
        old = self._first + np.arange(len(self.counts))
        np.add.at(counts, (old >> (exponent - self._exponent)) - first, self.counts)
        self.counts, self._first, self._exponent = counts, first, exponent


@dataclass
class EntrySummary:
    """Statistics of the values of an entry.

    Attributes:
        entry: the entry.
        step: 1 if all frames are read, or n if only each n-th frame is.
        histogram: histogram of the finite numbers.
        moments: moments of the finite numbers.
        nan: number of values that are NaN.
        infinite: number of infinite values.
        texts: counts of texts; at most :data:`MOST_TEXTS` different ones.
        other_texts: number of texts beyond these.
    """

    entry: Entry
    step: int = 1
    histogram: Histogram = field(default_factory=Histogram)
    moments: Moments = field(default_factory=Moments)
    nan: int = 0
    infinite: int = 0
    texts: Counter[str] = field(default_factory=Counter)
    other_texts: int = 0

    def add(self, values: Tensor) -> None:
        """Adds the values of several frames; complex numbers count with their magnitude."""
        for block in values.detach().reshape(-1).split(_BLOCK):
            self._add_numbers(block.cpu())

    def add_texts(self, texts: Iterable[str]) -> None:
        """Adds the texts of several frames."""
        for text in texts:
            if text in self.texts or len(self.texts) < MOST_TEXTS:
                self.texts[text] += 1
            else:
                self.other_texts += 1

    def _add_numbers(self, block: Tensor) -> None:
        if self.histogram.whole:
            numbers = block.to(torch.int64).numpy()
        else:
            floats = _magnitudes(block).numpy()
            finite = np.isfinite(floats)
            nan = int(np.isnan(floats).sum())
            self.nan += nan
            self.infinite += int((~finite).sum()) - nan
            numbers = floats[finite]
        self.histogram.add(numbers)
        with np.errstate(all="ignore"):  # squares of large values may overflow
            self.moments.add(numbers)


def summaries(entries: Iterable[Entry], frames: int) -> list[EntrySummary]:
    """Returns empty summaries of the entries that have values, sorted by key.

    Args:
        entries: entries of a dataset.
        frames: number of frames in the dataset.
    """
    found = sorted((entry for entry in entries if entry.size), key=lambda entry: entry.key)
    return [
        EntrySummary(
            entry, -(-frames * entry.size // _MOST_VALUES) or 1, Histogram(_is_whole(entry))
        )
        for entry in found[:MOST_ENTRIES]
    ]


def followed(
    batches: Iterable[TensorDictBase], found: Iterable[EntrySummary]
) -> Iterator[TensorDictBase]:
    """Yields batches of a dataset, and adds each one to the summaries before."""
    found, seen = list(found), 0
    for batch in batches:
        for each in found:
            values = batch.get(each.entry.key)
            rows = slice(-seen % each.step, None, each.step)
            if each.entry.dtype is None:
                each.add_texts(to_texts(values)[rows])
            else:
                each.add(values[rows])
        seen += len(batch)
        yield batch


def _magnitudes(block: Tensor) -> Tensor:
    """Returns floats as they are, and the magnitudes of complex numbers, both as float64."""
    return block.to(torch.complex128).abs() if block.is_complex() else block.to(torch.float64)


def _is_whole(entry: Entry) -> bool:
    dtype = entry.dtype
    # uint64 has values that int64 lacks.
    return not (
        dtype is None or dtype.is_floating_point or dtype.is_complex or dtype == torch.uint64
    )
