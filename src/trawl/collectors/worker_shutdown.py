"""The end of a collector with workers, and of its collection in the background."""

from __future__ import annotations

import time
from abc import abstractmethod

from typing_extensions import override

from trawl.checks import check_bool
from trawl.collectors.worker_control import WorkerControl


class WorkerShutdown(WorkerControl):
    """The part of a collector with workers that ends them."""

    @abstractmethod
    def _count_written(self) -> None:
        """Counts batches that workers wrote into the replay buffer and that are not counted yet."""

    # --- background collection

    @override
    def _settle(self, timeout: float | None) -> None:
        self._pool.settle(timeout)
        if self._workers_write:
            self._count_written()

    @override
    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        check_bool("close_env", close_env)
        background = self._background
        if background is not None and self._workers_write and not self.closed:
            deadline = None if timeout is None else time.monotonic() + timeout
            background.stop(timeout)
            if not self.closed:
                # Workers finish the batches that they are writing.
                self._settle(None if deadline is None else deadline - time.monotonic())
        super().async_shutdown(timeout, close_env)

    # --- the end

    @override
    def _end_trace(self) -> None:
        if self.closed:
            # The timeline shows the last batches, too.
            self._count_written()
        super()._end_trace()

    @override
    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Ends the workers; may be called any number of times.

        Args:
            timeout: seconds that workers have to close their environments before they are killed;
                None for a default of a few seconds.
            close_env: must be True: environments end with their workers.
            raise_on_error: True to raise errors that occur while closing.

        Raises:
            RuntimeError: if ``close_env`` is False.
            TypeError: if ``close_env`` or ``raise_on_error`` is a string.
        """
        check_bool("close_env", close_env)
        check_bool("raise_on_error", raise_on_error)
        if not close_env:
            raise RuntimeError(
                f"{type(self).__name__} can't shut down with close_env=False, because "
                "environments end with the workers that they live in"
            )
        self._closing_time = timeout
        try:
            if self._background is not None and not self.closed:
                # The background thread waits for workers, and ends when they end.
                self._background.request_stop()
                self._close(close_env)
        except Exception:
            if raise_on_error:
                raise
        finally:
            # If an environment raises an error while closing, the rest is still closed and counted.
            try:
                super().shutdown(timeout, close_env, raise_on_error)
            finally:
                self._count_written()

    @override
    def _note_closed(self) -> None:
        # Whoever is told of the end sees all frames.
        self._count_written()
        super()._note_closed()

    def __del__(self) -> None:
        # Workers get a few seconds to close their environments.
        if not self.__dict__.get("closed", True):
            self.shutdown(raise_on_error=False)

    def _close(self, close_env: bool) -> None:
        pool = self.__dict__.get("_pool")
        try:
            try:
                self._close_updater()
            finally:
                if pool is not None:
                    pool.close(self._closing_time)
        finally:
            sender = self.__dict__.get("_sender")
            if sender is not None:
                sender.close()
