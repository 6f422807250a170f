"""Calls of functions with the collectors of workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trawl.collectors.driver.background import BackgroundCollection
from trawl.collectors.driver.lifetime import Lifetime
from trawl.collectors.workers.pool import WorkerPool
from trawl.collectors.workers.weights import WorkersWeights


class WorkerCalls:
    """Calls functions with the workers' collectors, between two batches.

    Args:
        lifetime: the time in which the collector is open.
        background: the thread of the collector.
        weights: the weights that are sent to workers.
        pool: the workers.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        background: BackgroundCollection,
        weights: WorkersWeights,
        pool: WorkerPool,
    ) -> None:
        self._lifetime, self._background = lifetime, background
        self._sender, self._pool = weights.sender, pool

    def all(self, function: Any, *arguments: Any) -> list[Any]:
        """Calls a function with each worker's collector, and returns the results."""
        return self.each(function, [arguments] * len(self._pool.slots))

    def first(self, function: Any, *arguments: Any) -> Any:
        """Calls a function with the first worker's collector, and returns the result."""
        (answer,) = self.each(function, [arguments])
        return answer

    def each(self, function: Any, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a function with the collector of each worker that has an entry in ``arguments``."""
        self._lifetime.check_open(getattr(function, "__name__", "a call"))
        with self._background.held():
            results = self.call({i: (function, *own) for i, own in enumerate(arguments)})
        return list(results.values())

    def call(self, calls: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls functions with the collectors of workers, which have the newest weights then."""
        self.catch_up()
        return self._pool.call(calls)

    def catch_up(self) -> None:
        """Waits for a batch that was requested ahead, and sends updates that wait for it."""
        if self._sender.holding:
            self._pool.settle()
            self._sender.release()
