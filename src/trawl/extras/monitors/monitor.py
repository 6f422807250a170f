"""Monitoring of a collector while it collects."""

from __future__ import annotations

import queue
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, SupportsInt

from trawl.checks import check_seconds, seconds_above_zero
from trawl.extras.monitors.sinks import FunctionSink, LoggerSink, StatsSink
from trawl.polling import poll
from trawl.threads import stop_at_exit

# Seconds after which the user is told what a call waits for.
_SILENCE = 3.0

# Sinks of monitors that have not ended, by their ids. A sink has room for the files of one monitor.
_in_use: dict[int, StatsSink] = {}


class Monitor:
    """Writes the statistics of a collector to sinks while the collector works.

    A thread polls ``collector.stats()``: at the start, every ``every`` seconds, and at the end.
    With workers, it polls ``stats("both")``. Collection doesn't wait for the thread, and workers
    are not queried. The x axis of each plot is ``frames``, the number of delivered frames.

    The monitor ends when it is closed, when the collector is closed or deleted, and when the
    interpreter exits. You need not keep a reference to the monitor, and the monitor does not keep
    the collector alive. If a sink fails, the monitor warns once, tries the sink again at the next
    poll, and goes on with the other sinks. A failing sink never ends the collection. A sink that
    hangs holds up the other sinks, but not the collection.

    Args:
        collector: any collector, or another object with a method ``stats()``.
        sinks: list of sinks. Each is a :class:`StatsSink`, a function that is called with the
            statistics as a dict, or an object with TorchRL's ``log_scalar``.
        every: seconds between two polls.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if ``every`` is not positive, or a sink is used by another monitor.
        Exception: if a sink can't be opened: the error of the sink, such as an ``OSError`` for a
            folder that can't be written.

    Examples:
        >>> from trawl import Collector
        >>> from trawl.observe import Monitor
        >>> frames = []
        >>> with (
        ...     Collector("CartPole-v1", frames_per_batch=10, total_frames=30) as collector,
        ...     Monitor(collector, [lambda stats: frames.append(stats["frames"])]),
        ... ):
        ...     for batch in collector:
        ...         pass
        >>> frames[-1]
        30
    """

    def __init__(self, collector: Any, sinks: Sequence[Any], every: float = 10.0) -> None:
        if not callable(getattr(collector, "stats", None)):
            raise TypeError(
                "collector must be a collector, or another object with a method stats(), but it is "
                f"{type(collector).__name__}: {collector!r}"
            )
        if isinstance(sinks, str | StatsSink) or not isinstance(sinks, Iterable):
            raise TypeError(f"sinks must be a list of sinks, but it is {sinks!r}")
        self.every = float(seconds_above_zero("every", check_seconds("every", every)))
        self._poller = _Poller(collector, [_as_sink(sink) for sink in sinks], self.every)
        self._poller.open_sinks()
        try:
            # After the sinks were opened: their libraries have exit handlers too, which run later.
            stop_at_exit(self._poller)
            self._poller.start(collector)
        except BaseException:
            self._poller.abandon()
            raise

    @property
    def closed(self) -> bool:
        """True if the last poll is written and the sinks are closed."""
        return not self._poller.thread.is_alive()

    def close(self, timeout: float | None = 60.0) -> None:
        """Polls a last time, and closes the sinks; later calls do nothing.

        Args:
            timeout: maximum number of seconds to wait for slow sinks; None for no limit. A warning
                after a few seconds names the sink that the call waits for. After this time, the
                call returns with another warning, and the sinks close in the background.
        """
        seconds = None if timeout is None else check_seconds("timeout", timeout)
        with self._poller.told_if_slow("closing a monitor waits"):
            self._poller.stop(seconds)
        if not self.closed and threading.current_thread() is not self._poller.thread:
            _warn(
                f"the sinks of a monitor take longer than {timeout} s to close: "
                f"{self._poller.now}, and what it has not written may be lost"
            )

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _Poller:
    """The thread of a monitor, which owns the sinks and outlives the monitor if need be."""

    def __init__(self, collector: Any, sinks: list[StatsSink], every: float) -> None:
        self._sinks, self._every = sinks, min(every, threading.TIMEOUT_MAX)
        self._failed: set[int] = set()
        self._polls = 0
        # The call of a sink that is going on.
        self.now = "no sink is busy"
        # Receives the last statistics, or None to poll a last time. Unlike an Event, such a queue
        # may be used by __del__ and callbacks of weak references, which run at any moment.
        self._ends: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # A collector reports its end even while it is deleted. Other objects are just gone.
        self._reports_end = hasattr(collector, "add_close_callback")
        ends = self._ends
        callback = None if self._reports_end else lambda _: ends.put(None)
        self._collector = weakref.ref(collector, callback)
        # Asked for here, so that the first point is not that of a moment later.
        self._first = self._stats_of(collector)
        self.thread = threading.Thread(target=self._run, name="Monitor", daemon=True)

    def open_sinks(self) -> None:
        """Opens the sinks; if one fails, closes the others and raises its error."""
        with ExitStack() as stack:
            for sink in self._sinks:
                if id(sink) in _in_use:
                    raise ValueError(f"{sink!r} is used by a monitor already: make another sink")
                _in_use[id(sink)] = sink
                stack.callback(_in_use.pop, id(sink))
                self._name_call(sink, sink.open)
                with self.told_if_slow("a new monitor waits"):
                    sink.open()
                stack.callback(self._attempt, sink, sink.close)
            stack.pop_all()

    def _name_call(self, sink: StatsSink, call: Callable[..., object]) -> None:
        self.now = f"{sink!r} has not returned from {call.__name__}()"

    @contextmanager
    def told_if_slow(self, what: str) -> Iterator[None]:
        """Warns if the context takes longer than a few seconds, with the name of the sink."""
        timer = threading.Timer(_SILENCE, lambda: _warn(f"{what}: {self.now}"))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def start(self, collector: Any) -> None:
        """Starts the thread, which ends with the collector."""
        self.thread.start()
        if self._reports_end:
            collector.add_close_callback(self._end)

    def abandon(self) -> None:
        """Closes the sinks after a failed start: there are too many threads, or Ctrl-C came."""
        if self.thread.ident is None:
            self._close()
        else:
            self._ends.put(None)

    def _end(self, collector: Any) -> None:
        """Keeps the last statistics of a collector that was closed, and ends the thread.

        The thread could come too late to ask for them, if the collector was deleted.
        """
        self._ends.put(self._stats_of(collector))

    def _stats_of(self, collector: Any) -> dict[str, Any] | None:
        try:
            return poll(collector)
        except Exception as error:
            self._warn_once(self, f"the statistics of a collector can't be read: {error!r}")
            return None

    def stop(self, timeout: float | None) -> None:
        """Ends the thread after a last poll, and waits for it."""
        self._ends.put(None)
        if self.thread is not threading.current_thread():
            self.thread.join(timeout)

    def _run(self) -> None:
        last = None
        try:
            self._write(self._first)
            while True:
                gone = self._collector() is None
                try:
                    last = self._ends.get(timeout=self._every)
                    break
                except queue.Empty:
                    if gone:  # it was deleted, and could not even be closed
                        break
                    self._poll()
            if last is None:
                self._poll()
            self._write(last)
        finally:
            self._close()

    def _poll(self) -> None:
        collector = self._collector()
        stats = None if collector is None else self._stats_of(collector)
        # The collector may be deleted while the sinks are busy.
        del collector
        self._write(stats)

    def _write(self, stats: dict[str, Any] | None) -> None:
        if stats is None:
            return
        self._polls += 1
        frames = stats.get("frames")
        step = int(frames) if isinstance(frames, SupportsInt) else self._polls
        for sink in self._sinks:
            self._attempt(sink, sink.write, stats, step)

    def _close(self) -> None:
        collector = self._collector()
        if collector is not None and self._reports_end:
            collector.remove_close_callback(self._end)
        del collector
        for sink in self._sinks:
            self._attempt(sink, sink.close)
            _in_use.pop(id(sink))

    def _attempt(self, sink: StatsSink, call: Callable[..., object], *args: Any) -> None:
        self._name_call(sink, call)
        try:
            call(*args)
        except BaseException as error:  # SystemExit too, which would end this thread silently
            self._warn_once(sink, f"a sink of a monitor failed, {sink!r}: {error!r}")

    def _warn_once(self, source: object, text: str) -> None:
        if id(source) not in self._failed:
            self._failed.add(id(source))
            _warn(text)


def _as_sink(value: Any) -> StatsSink:
    """Returns a sink for an entry of a monitor's list of sinks."""
    if isinstance(value, StatsSink):
        return value
    if not isinstance(value, type):
        if callable(getattr(value, "log_scalar", None)):
            return LoggerSink(value)
        if callable(value):
            return FunctionSink(value)
    raise TypeError(
        "each sink must be a StatsSink, such as CSVSink(file), a function, or a logger with "
        f"log_scalar, but one is {value!r}"
    )


def _warn(text: str) -> None:
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:  # warnings are errors, which no caller of this thread could catch
        traceback.print_exc()
