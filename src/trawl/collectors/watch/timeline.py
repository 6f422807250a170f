"""The part of a collector that writes a timeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from trawl.collectors.driver.lifetime import Lifetime
from trawl.collectors.watch.figures import Figures
from trawl.collectors.watch.times import TurnClock
from trawl.collectors.watch.tracer import Tracer
from trawl.collectors.watch.watching import ResidentMemory
from trawl.envs.transforms import PolicyVersion
from trawl.observe.trace_options import TraceLike, TraceOptions, check_trace


class Tracing:
    """The timeline that a collector writes.

    Args:
        lifetime: the time in which the collector is open.
        figures: figures of those who collect.
        memory: memory of this process.

    Attributes:
        versions: counter of the policy's versions; None if they are not tracked.
        tracer: the object that draws the timeline; None while there is none.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        figures: Figures,
        memory: ResidentMemory,
    ) -> None:
        self.tracer: Tracer | None = None
        self.versions: PolicyVersion | None = None
        self._lifetime, self._figures = lifetime, figures
        self._memory = memory

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
        self._lifetime.check_open("trace()")
        options = check_trace("trace", trace)
        if options is None:
            raise TypeError("trace must be the path of a file, but it is None")
        return self._until_end(self.begin(options))

    @contextmanager
    def _until_end(self, tracer: Tracer) -> Iterator[None]:
        try:
            yield
        finally:
            # After a shutdown, the timeline has ended already.
            if self.tracer is tracer:
                self.close()

    # --- for the collector

    def begin(self, options: TraceOptions) -> Tracer:
        """Begins a timeline.

        Raises:
            RuntimeError: if one is being written already.
        """
        if self.tracer is not None:
            raise RuntimeError(
                f"a timeline can't be written to {str(options.file)!r}, because this collector is "
                f"already writing one to {str(self.tracer.options.file)!r}: end that one first, "
                "or leave out the constructor's argument trace"
            )
        self.tracer = tracer = self._figures.new_tracer(options)
        self._figures.connect(tracer)
        return tracer

    def close(self) -> None:
        """Ends the timeline, if there is one."""
        tracer, self.tracer = self.tracer, None
        if tracer is not None:
            self._figures.connect(None)
            tracer.close(self._counters())

    def _counters(self) -> dict[str, float]:
        """Returns the values of the timeline's counters, besides the rate."""
        found: dict[str, float] = {"process memory": self._memory.bytes}
        if self.versions is not None and isinstance(self.versions.version, int):
            found["policy version"] = self.versions.version
        return found | self._figures.counters()

    def begin_turn(self) -> None:
        """Notes the thread that begins to take a batch."""
        tracer = self.tracer  # another thread may end the timeline
        if tracer is not None:
            tracer.begin_turn()

    def end_turn(self, clock: TurnClock, frames: int) -> None:
        """Draws a turn of the collector, in which ``frames`` frames were counted."""
        tracer = self.tracer  # another thread may end the timeline
        if tracer is not None:
            tracer.end_turn(clock, frames, self._counters)

    def updating(self) -> AbstractContextManager[None]:
        """Returns the context of a weight update, which the timeline shows."""
        tracer = self.tracer
        return nullcontext() if tracer is None else tracer.update()
