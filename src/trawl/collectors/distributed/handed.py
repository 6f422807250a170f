"""Weights that workers took through their handles, beside those that their collector sends."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class HandedWeights:
    """The weights of workers that took newer ones than their collector has sent to them.

    Args:
        count: returns how many updates a worker was sent.
    """

    def __init__(self, count: Callable[[int], int]) -> None:
        self._count = count
        self._sent: dict[int, int] = {}
        self._weights: dict[int, Any] = {}

    def note_sent(self, workers: Iterable[int]) -> None:
        """The collector has sent weights to workers."""
        for index in workers:
            self._sent[index] = self._count(index)
            self._weights.pop(index, None)

    def note_taken(self, index: int, count: int, weights: Any) -> bool:
        """A worker has taken weights through its handle.

        Args:
            index: the worker.
            count: how many updates of the collector's it had taken before.
            weights: what it has now.

        Returns:
            Whether these are the newest: otherwise it takes those of the collector after them.
        """
        if count < self._sent.get(index, 0):
            return False
        self._weights[index] = weights
        return True

    def weights(self, index: int) -> Any:
        """Returns what a worker took, if it is the newest; else None."""
        return self._weights.get(index)

    def copy(self, index: int, others: Iterable[int]) -> None:
        """Copies the weights of one worker for others that are about to start."""
        if index in self._weights:
            self._weights |= dict.fromkeys(others, self._weights[index])
