"""Weights that workers took through their handles, rather than from their collector."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class HandedWeights:
    """Weights that workers took through their handles, and that are newer than the collector's.

    Args:
        count: returns the number of updates that a worker was sent.
    """

    def __init__(self, count: Callable[[int], int]) -> None:
        self._count = count
        self._sent: dict[int, int] = {}
        self._weights: dict[int, Any] = {}

    def note_sent(self, workers: Iterable[int]) -> None:
        """Notes that the collector has sent weights to workers."""
        for index in workers:
            self._sent[index] = self._count(index)
            self._weights.pop(index, None)

    def note_taken(self, index: int, count: int, weights: Any) -> bool:
        """Notes that a worker has taken weights through its handle.

        Args:
            index: the worker.
            count: number of the collector's updates that the worker had taken before.
            weights: the weights that the worker has now.

        Returns:
            True if these are the worker's newest weights. If not, the collector has sent others,
            which the worker takes after them.
        """
        if count < self._sent.get(index, 0):
            return False
        self._weights[index] = weights
        return True

    def weights(self, index: int) -> Any:
        """Returns the weights that a worker took, if they are its newest; else None."""
        return self._weights.get(index)

    def copy(self, index: int, others: Iterable[int]) -> None:
        """Copies the weights of one worker for others that are about to start."""
        if index in self._weights:
            self._weights |= dict.fromkeys(others, self._weights[index])
