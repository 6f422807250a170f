"""The part of a collector that writes a timeline."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trawl.collectors.tracer import Tracer
from trawl.collectors.watching import WatchedCollector
from trawl.envs.transforms import PolicyVersion
from trawl.observe.trace_options import TraceLike, TraceOptions, check_trace


class TracedCollector(WatchedCollector):
    """The part of a collector that writes a timeline.

    Attributes:
        _tracer: the object that draws the timeline; None while there is none.
    """

    _tracer: Tracer | None = None
    _version: PolicyVersion | None

    if TYPE_CHECKING:

        def _check_open(self, what: str) -> None: ...

    def trace(self, trace: TraceLike) -> AbstractContextManager[None]:
        """Writes a timeline of the collection until the end of a ``with`` block.

        The timeline begins at this call. It ends with the block, or when the collector is closed.

        Args:
            trace: path of the file, or :class:`~trawl.observe.TraceOptions`. An existing file is
                replaced.

        Raises:
            RuntimeError: if a timeline is already being written, or the collector is closed.
            OSError: if the file can't be written.
            TypeError: if ``trace`` is neither a path nor ``TraceOptions``.
            ValueError: if the path is empty.

        Examples:
            >>> import tempfile
            >>> from pathlib import Path
            >>> from trawl import Collector
            >>> from trawl.observe import read_trace
            >>> path = Path(tempfile.mkdtemp(), "run.json.gz")
            >>> with Collector("Pendulum-v1", frames_per_batch=100) as collector:
            ...     first = collector.next()
            ...     with collector.trace(path):
            ...         second = collector.next()
            >>> [span.name for span in read_trace(path).lane("collector")]
            ['wait', 'batch', 'policy', 'env']
        """
        self._check_open("trace()")
        options = check_trace("trace", trace)
        if options is None:
            raise TypeError("trace must be the path of a file, but it is None")
        self._begin_trace(options)
        assert self._tracer is not None
        return self._until_end(self._tracer)

    @contextmanager
    def _until_end(self, tracer: Tracer) -> Iterator[None]:
        try:
            yield
        finally:
            # After a shutdown, the timeline has ended already.
            if self._tracer is tracer:
                self._end_trace()

    def _begin_trace(self, options: TraceOptions) -> None:
        if self._tracer is not None:
            raise RuntimeError(
                f"a timeline can't be written to {str(options.file)!r}, because this collector is "
                f"already writing one to {str(self._tracer.options.file)!r}: end that one first, "
                "or leave out the constructor's argument trace"
            )
        self._tracer = self._new_tracer(options)
        self._connect_tracer()

    def _end_trace(self) -> None:
        """Ends the timeline, if there is one."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            self._connect_tracer()
            tracer.close(self._counters())

    @abstractmethod
    def _new_tracer(self, options: TraceOptions) -> Tracer:
        """Makes the object that draws the timeline."""

    def _connect_tracer(self) -> None:
        """Hook for subclasses, which is called when a timeline begins or ends."""

    def _counters(self) -> dict[str, float]:
        """Returns the values of the timeline's counters, besides the rate."""
        found: dict[str, float] = {"process memory": self._resident.bytes}
        if self._version is not None and isinstance(self._version.version, int):
            found["policy version"] = self._version.version
        return found

    # --- what is drawn

    @override
    def _collect_timed(self) -> Any:
        tracer = self._tracer  # another thread may end the timeline
        if tracer is not None:
            tracer.begin_turn()
        return super()._collect_timed()

    @override
    def _note_turn(self, frames: int) -> None:
        super()._note_turn(frames)
        tracer = self._tracer
        if tracer is not None:
            tracer.end_turn(self._clock, frames, self._counters)

    def _timed_update(self) -> AbstractContextManager[None]:
        """Returns the context of a weight update, which the timeline shows."""
        tracer = self._tracer
        return nullcontext() if tracer is None else tracer.update()
