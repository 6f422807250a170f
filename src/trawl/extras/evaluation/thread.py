"""The thread that runs evaluations, one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from trawl.threads import stop_at_exit


class EvaluationThread:
    """Runs functions in one thread, in the order in which they were passed to :meth:`call`.

    Environments are made, stepped and closed by the same thread, as some simulators require.

    Args:
        name: name of the thread.
        stopping: event that is set when the thread has to end.
        close: function that the thread calls at its end, with the seconds that closing may take.
        interrupt: function that ends a call that takes too long. It is called in the thread that
            stops this thread, with the seconds that the call may still take.
    """

    def __init__(
        self,
        name: str,
        stopping: threading.Event,
        close: Callable[[float], None],
        interrupt: Callable[[float], None],
    ) -> None:
        self.stopping = stopping
        self._close, self._interrupt = close, interrupt
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | float] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        stop_at_exit(self)
        self._thread.start()

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Queues a function, which the thread calls.

        Raises:
            RuntimeError: if the thread was stopped.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self.stopping.is_set():
                raise RuntimeError("the evaluator was shut down: make another one")
            self._calls.put((future, function))
        return future

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if isinstance(call, float):
                break
            future, function = call
            if self.stopping.is_set() or not future.set_running_or_notify_cancel():
                future.cancel()
                continue
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            # The objects that these names refer to must not live until the next call.
            del call, future, function
            result = None
        try:
            self._close(call)
        except BaseException as error:
            self._failure = error

    def request_stop(self, timeout: float = 0.0) -> None:
        """Makes the thread end after its current call; waiting calls are cancelled.

        Args:
            timeout: seconds that closing may take.
        """
        with self._lock:
            if not self.stopping.is_set():
                self.stopping.set()
                self._calls.put(float(timeout))

    def stop(self, timeout: float) -> bool:
        """Ends the thread; waiting calls are cancelled.

        Args:
            timeout: seconds that the current call may still take.

        Returns:
            True if the thread has ended.

        Raises:
            Exception: an error that occurred while closing; each error is raised only once.
        """
        self.request_stop(timeout)
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._interrupt(timeout)
            self._thread.join(timeout)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return not self._thread.is_alive()
