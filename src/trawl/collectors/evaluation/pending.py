"""Results of evaluations that have not been retrieved yet."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout

from trawl.collectors.evaluation.results import EvaluationResult

Result = Future[EvaluationResult]


class PendingResults:
    """Results of triggered evaluations, each of which is returned once, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: deque[Result] = deque()

    @property
    def awaited(self) -> bool:
        """True if an evaluation is running, or waits for its turn."""
        with self._lock:
            return any(not future.done() for future in self._futures)

    def __len__(self) -> int:
        """Number of results that were not retrieved."""
        with self._lock:
            return len(self._futures)

    def add(self, future: Result, newest_only: bool) -> None:
        """Adds a future result.

        Args:
            future: the result.
            newest_only: whether to drop earlier results that are finished.
        """
        with self._lock:
            while newest_only and self._futures and self._futures[0].done():
                self._futures.popleft()
            self._futures.append(future)

    def pop(self, timeout: float | None) -> EvaluationResult | None:
        """Waits for the next result, and returns it.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            The result; None if it is not ready in time, or no result is expected.

        Raises:
            Exception: the error of the evaluation, if it failed.
        """
        with self._lock:
            future = self._futures[0] if self._futures else None
        if future is None:
            return None
        try:
            future.exception(timeout)
        except (FutureTimeout, CancelledError):
            return None
        with self._lock:
            # Another thread may have retrieved the result meanwhile.
            if not self._futures or self._futures[0] is not future:
                return None
            self._futures.popleft()
        return future.result()

    def raise_failure(self) -> None:
        """Raises the exception of a failed evaluation whose result was not retrieved, if any."""
        with self._lock:
            failed = next((future for future in self._futures if _failed(future)), None)
            if failed is None:
                return
            self._futures.remove(failed)
        failed.result()

    def close(self) -> list[BaseException]:
        """Keeps only the results of evaluations that succeeded.

        Returns:
            The exceptions of evaluations that failed.
        """
        with self._lock:
            failures = [future.exception() for future in self._futures if _failed(future)]
            kept = (f for f in self._futures if f.done() and not f.cancelled() and not _failed(f))
            self._futures = deque(kept)
        return [failure for failure in failures if failure is not None]


def _failed(future: Result) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None
