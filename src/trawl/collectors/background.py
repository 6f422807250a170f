"""Collecting in the background, into a replay buffer."""

from __future__ import annotations

import atexit
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from weakref import WeakMethod, WeakSet

# Seconds that a batch may take yet when the interpreter ends.
_AT_EXIT = 10.0
# What still runs when the interpreter ends: a thread that is stopped within torch aborts it.
_running: WeakSet[Background] = WeakSet()


def _stop_all() -> None:
    for background in list(_running):
        # Who does not stop waits for workers, which are ended after this.
        with suppress(TimeoutError):
            background.stop(_AT_EXIT)


class Background:
    """Runs a function again and again in a thread, until it says that there is no more to do.

    Args:
        turn: refers to what does one piece of work, and returns whether there is more. The
            thread ends when that is gone: it keeps nobody alive.
        name: name of the thread.
        ready: whether the next turn may begin; asked again after :meth:`wake`. It keeps nobody
            alive that ``turn`` doesn't.

    Attributes:
        running: whether there is more to do.
    """

    def __init__(
        self,
        turn: WeakMethod[Callable[[], bool]],
        name: str,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.running = True
        self._ready = ready
        self._turn = turn
        self._changed = threading.Condition()
        self._holders = 0
        self._busy = False
        self._owed = False
        self._stopping = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _running.add(self)
        # Called in reverse order: before what was registered by now, as what closes workers.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)
        self._thread.start()

    @contextmanager
    def held(self, timeout: float | None = None) -> Iterator[None]:
        """Within it the thread does nothing; entering waits for the turn it is at.

        It may be entered again within. What a turn itself calls is not held up by it.

        Args:
            timeout: seconds to wait for that turn; None to wait as long as it takes.

        Raises:
            TimeoutError: if the turn takes longer.
        """
        if threading.current_thread() is self._thread:
            yield
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            # Who holds again and again would never let it work otherwise.
            self._wait(
                lambda: not (self._owed and self.running and self._ready()) or self._stopping,
                deadline,
            )
            self._holders += 1
        try:
            with self._changed:
                self._wait(lambda: not self._busy, deadline)
            self.check()
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._owed = not self._holders
                self._changed.notify_all()

    def _wait(self, condition: Callable[[], bool], deadline: float | None) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if not self._changed.wait_for(condition, left):
            raise TimeoutError("the batch under way was not finished within the time limit")

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread after the turn that it is at.

        Raises:
            TimeoutError: if that takes longer than ``timeout`` seconds.
        """
        self.let_go()
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"collection did not stop within {timeout} s")

    def wake(self) -> None:
        """Says that it may be ready now."""
        with self._changed:
            self._changed.notify_all()

    def let_go(self) -> None:
        """Begins no other turn; the one that it is at goes on."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises what ended the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while self._begin_turn():
            more = False
            try:
                turn = self._turn()
                more = turn is not None and turn()
                # Between turns the thread must not keep the collector.
                del turn
            except BaseException as error:
                # Shown now, and raised at the next call: nobody is waiting for this thread.
                self._error, self.running = error, False
                traceback.print_exception(error)
            finally:
                self._end_turn(more)

    def _begin_turn(self) -> bool:
        with self._changed:
            # Who wants to hold comes first: the thread would win every race for a lock.
            self._changed.wait_for(lambda: self._stopping or (not self._holders and self._ready()))
            self._owed = False
            self.running = self._busy = self.running and not self._stopping
            return self._busy

    def _end_turn(self, more: bool) -> None:
        with self._changed:
            self.running = more
            self._busy = False
            self._changed.notify_all()
