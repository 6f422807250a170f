"""Collection in a background thread, which fills a replay buffer."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakMethod

from trawl.collectors.config import CollectorConfig
from trawl.collectors.driver.budget import FrameBudget
from trawl.collectors.driver.lifetime import Lifetime
from trawl.threads import stop_at_exit


class Background:
    """Calls a method repeatedly in a thread, until the method returns False.

    Args:
        turn: weak reference to the method, which does one piece of work, and returns True if more
            work is left. The thread does not keep the method's object alive, and ends when the
            object is deleted.
        name: name of the thread.
        ready: function that returns True if the next turn may begin. The thread calls the function
            again after :meth:`wake`. The function must not keep the method's object alive.

    Attributes:
        running: True while work is left.
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

    def begin(self) -> None:
        """Starts the thread."""
        stop_at_exit(self)
        self._thread.start()

    @contextmanager
    def held(self, timeout: float | None = None) -> Iterator[None]:
        """Pauses the thread within a ``with`` block; entering it waits for the current turn to end.

        Blocks may be nested. In the thread itself, the block has no effect.

        Args:
            timeout: seconds to wait for the current turn; None to wait as long as it takes.

        Raises:
            TimeoutError: if the turn takes longer than ``timeout`` seconds.
        """
        if threading.current_thread() is self._thread:
            yield
            return
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            # After a pause, the thread gets a turn before the next pause. Otherwise a caller that
            # pauses the thread in a loop would keep it from working.
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
            raise TimeoutError("the current batch was not finished within the time limit")

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread after its current turn.

        Raises:
            TimeoutError: if the turn takes longer than ``timeout`` seconds.
        """
        self.request_stop()
        if self._thread is threading.current_thread():
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"collection did not stop within {timeout} s")

    def wake(self) -> None:
        """Makes the thread check again whether the next turn may begin."""
        with self._changed:
            self._changed.notify_all()

    def request_stop(self) -> None:
        """Keeps the thread from beginning another turn; the current turn continues."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises the error that ended the thread, if there is one; later calls don't repeat it."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while self._begin_turn():
            more = False
            try:
                turn = self._turn()
                more = turn is not None and turn()
                # Between turns, the thread must not keep the collector alive.
                del turn
            except BaseException as error:
                # Print the error now: no caller waits for this thread. The next check() raises it.
                self._error, self.running = error, False
                traceback.print_exception(error)
            finally:
                self._end_turn(more)

    def _begin_turn(self) -> bool:
        with self._changed:
            # Callers of held() come first; otherwise the thread would win every race for the lock.
            self._changed.wait_for(lambda: self._stopping or (not self._holders and self._ready()))
            self._owed = False
            self.running = self._busy = self.running and not self._stopping
            return self._busy

    def _end_turn(self, more: bool) -> None:
        with self._changed:
            self.running = more
            self._busy = False
            self._changed.notify_all()


class RateLimiter:
    """Limits how far collection runs ahead of a learner that samples its frames.

    Args:
        ratio: number of samples to draw for each inserted frame.
        ahead: number of frames that may be inserted before any samples are drawn for them.

    Attributes:
        inserted: number of frames inserted so far.
        sampled: number of frames sampled so far; a frame that is drawn twice counts twice.
    """

    def __init__(self, ratio: float, ahead: int) -> None:
        self._ratio = ratio
        self._ahead = ahead
        self.inserted = 0
        self.sampled = 0

    def room(self, more: int = 0) -> bool:
        """Returns True if another batch may begin while ``more`` frames are under way."""
        return self.inserted + more < self._ahead + self.sampled / self._ratio


class CollectorClosed(Exception):
    """Raised if another thread or a signal handler closes the collector during a batch."""


class BackgroundCollection:
    """The thread in which a collector fills its replay buffer, and the lock for all others.

    Args:
        name: name of the thread.
        config: options of the collector.
        budget: the collector's frames.
        lifetime: the time in which the collector is open.
        turn: weak reference to the method that collects a batch, and returns True if more are left.
        settle: function that waits for the batches that workers are still collecting after the
            thread has paused. Its argument is the time limit in seconds.

    Attributes:
        lock: held by the thread that collects, or changes the policy or an environment, while there
            is no background thread.
        thread: the thread; None if there is none.
    """

    def __init__(
        self,
        name: str,
        config: CollectorConfig,
        budget: FrameBudget,
        lifetime: Lifetime,
        turn: WeakMethod[Callable[[], bool]],
        settle: Callable[[float | None], None],
    ) -> None:
        self.lock = threading.RLock()
        self.thread: Background | None = None
        self._name, self._config, self._budget, self._lifetime = name, config, budget, lifetime
        self._turn, self._settle = turn, settle
        self._limiter: RateLimiter | None = None

    def start(self) -> None:
        """Starts to fill the replay buffer in the background, until ``total_frames`` are reached.

        A collector without workers then steps its environment in another thread than the one that
        made it. Some environments don't support this, such as those that use Playwright, sqlite or
        ``signal.alarm``. Workers make and step their environments in the main threads of their
        processes: use ``MultiSyncCollector([create_env_fn], ...)`` for such an environment.

        If background collection is already running, this does nothing. An error in the background
        is printed at once, and is raised by the next call of ``stats``, ``sample``, ``pause``,
        ``start``, ``async_shutdown``, or any other method that waits for the current batch.

        Raises:
            RuntimeError: if there is no replay buffer, or the collector is closed.
        """
        if self._config.replay_buffer is None:
            raise RuntimeError("start() needs a replay buffer to fill: pass replay_buffer=")
        with self.lock:
            if self.thread is not None:
                self.thread.check()
                if self.thread.running:
                    return
            self._lifetime.check_open("start()")
            self._limiter = limiter = self._new_limiter()
            ready = limiter.room if limiter else lambda: True
            # The first turn must find the thread here, to keep to the limit.
            self.thread = thread = Background(self._turn, self._name, ready)
            try:
                thread.begin()
            except RuntimeError:  # there can't be more threads
                self.thread = None
                raise

    def _new_limiter(self) -> RateLimiter | None:
        """Makes the rate limiter of background collection; None if there is no limit."""
        config = self._config
        if config.samples_per_insert is None:
            return None
        ahead = config.inserts_ahead
        if ahead is None:
            ahead = (config.init_random_frames or 0) + 2 * self._budget.frames_at_once
        # Frames that were inserted before this call need no samples.
        limiter = RateLimiter(config.samples_per_insert, ahead + self._inserted)
        limiter.inserted = self._inserted
        return limiter

    @property
    def _inserted(self) -> int:
        """Number of frames written to the replay buffer; unfinished trajectories do not count."""
        budget = self._budget
        whole = self._config.whole_trajectories
        return budget.own.replay_written_frames if whole else budget.frames

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Draws a batch from the replay buffer, and counts its samples for ``samples_per_insert``.

        Args:
            *args: arguments of the buffer's ``sample``.
            **kwargs: keyword arguments of the buffer's ``sample``.

        Returns:
            The result of the buffer's ``sample``.

        Raises:
            RuntimeError: if there is no replay buffer.
            Exception: the error that ended background collection, if any; it is raised only once.
        """
        buffer = self._config.replay_buffer
        if buffer is None:
            raise RuntimeError("sample() needs a replay buffer to draw from: pass replay_buffer=")
        if self.thread is not None:
            self.thread.check()
        drawn = buffer.sample(*args, **kwargs)
        if self._limiter is not None and self.thread is not None:
            batch = drawn[0] if isinstance(drawn, tuple) else drawn
            self._limiter.sampled += batch.numel()
            self.thread.wake()
        return drawn

    def is_running(self) -> bool:
        """Returns True if background collection was started and has not ended."""
        return self.thread is not None and self.thread.running

    def pause(
        self, timeout: float | None = None, *, resume: bool = True
    ) -> AbstractContextManager[None]:
        """Pauses background collection within a ``with`` block.

        Entering the block waits for the batch that is being collected. Within the block, no frame
        is added.

        Args:
            timeout: seconds to wait for the current batch; None to wait as long as it takes.
            resume: True to continue collection after the block; False to end it until
                ``start()`` is called again.

        Raises:
            RuntimeError: if collection was not started.
            TimeoutError: on entering the block, if the batch takes longer than ``timeout`` seconds.
        """
        if self.thread is None:
            raise RuntimeError(
                "pause() pauses the collection that start() begins: call start() first"
            )
        return self._paused(self.thread, timeout, resume)

    @contextmanager
    def _paused(
        self, background: Background, timeout: float | None, resume: bool
    ) -> Iterator[None]:
        deadline = None if timeout is None else time.monotonic() + timeout
        with background.held(timeout):
            self._settle(None if deadline is None else deadline - time.monotonic())
            try:
                yield
            finally:
                if not resume:
                    background.stop()

    # --- for the collector

    def held(self) -> AbstractContextManager[Any]:
        """Returns a context in which no other thread collects or changes policy or environment."""
        return self.lock if self.thread is None else self.thread.held()

    def check(self) -> None:
        """Raises the error that ended the thread, if there is one; later calls don't repeat it."""
        if self.thread is not None:
            self.thread.check()

    def count_turn(self) -> bool:
        """Counts what the thread has inserted in a turn; returns True if frames are left."""
        if self._limiter is not None:
            self._limiter.inserted = self._inserted
        return self._budget.has_more()

    def has_room(self, more: int) -> bool:
        """Returns True if the thread may begin a batch while ``more`` frames are under way."""
        limiter = self._limiter if self.is_running() else None
        return limiter is None or limiter.room(more)
