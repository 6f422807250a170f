"""Statistics of a running collector: rates, shares of time, episodes and the bottleneck."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trawl.collectors.process_memory import ResidentMemory
from trawl.collectors.times import DriverTimes, TurnClock
from trawl.observe.bottleneck import Bottleneck, bottleneck_of
from trawl.observe.episodes import LoggedValues, RecentEpisodes
from trawl.polling import full_stats

if TYPE_CHECKING:
    from trawl.observe.report import Report


#: Entry of a state with the newest episodes, and with the values that the user logged.
WATCHED = "watched"


class WatchedCollector:
    """The part of a collector that measures the time of its batches.

    Attributes:
        _clock: clock of the driver thread or, in a worker, of the worker.
    """

    _frames: int
    _clock: TurnClock

    if TYPE_CHECKING:
        _collect_profiled: Callable[[], Any]
        stats: Callable[..., dict[str, Any]]

    def _init_watching(self) -> None:
        self._clock = TurnClock()
        self._turns = DriverTimes()
        self._episodes = RecentEpisodes()
        self._logged = LoggedValues()
        self._resident = ResidentMemory()

    def _collect_timed(self) -> Any:
        """Collects a batch, and records the time that it took."""
        before = self._frames
        self._clock.begin()
        try:
            return self._collect_profiled()
        finally:
            self._clock.end()
            self._note_turn(self._frames - before)

    def _note_turn(self, frames: int) -> None:
        """Records the turn that has just ended, in which ``frames`` frames were counted."""
        self._turns.add(self._clock, frames, self._pop_waited())

    def _pop_waited(self) -> float:
        """Returns the seconds since the last call in which the thread waited for frames."""
        raise NotImplementedError

    @property
    def _batches_ready(self) -> int:
        """Number of batches that are finished but not delivered."""
        return 0

    @property
    def _queue_depth(self) -> int:
        """Number of requests that workers have not answered."""
        return 0

    def _figures(self) -> dict[str, Any]:
        """Returns this part of the collector's ``stats()``."""
        turns = self._turns.stats()
        # Workers may have finished batches before the first one is delivered.
        shares = self._worker_shares() if turns else {}
        return {
            "restarts": 0,
            "batches_ready": self._batches_ready,
            "queue_depth": self._queue_depth,
            "process_bytes": self._resident.bytes,
            **turns,
            **shares,
            **self._episodes.stats(),
            **self._logged.stats(),
        }

    def log(self, **values: Any) -> None:
        """Adds values of your own to the statistics.

        ``stats()`` has the mean of the last 100 values of each name, as ``"logged/NAME"``. A
        :class:`~trawl.observe.Monitor` writes it to its sinks, and the progress panel and
        :meth:`report` show it. The values are part of the collector's state.

        Args:
            **values: numbers, or tensors and arrays with a single number.

        Raises:
            TypeError: if a value is no number. Nothing is added then.

        Examples:
            >>> from trawl import Collector
            >>> with Collector("Pendulum-v1", frames_per_batch=100, total_frames=300) as collector:
            ...     for step, batch in enumerate(collector):
            ...         collector.log(step=step, loss=batch["next", "reward"].mean())
            >>> collector.stats()["logged/step"]
            1.0
        """
        self._logged.add(values)

    def _watch_state(self) -> dict[str, Any]:
        """Returns the statistics that go on after a state is loaded."""
        return {
            WATCHED: {"episodes": self._episodes.state_dict(), "logged": self._logged.state_dict()}
        }

    def _load_watch(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`_watch_state` returned; older states don't have it."""
        found = state.get(WATCHED)
        if found is not None:
            self._episodes.load_state_dict(found["episodes"])
            self._logged.load_state_dict(found["logged"])

    def _worker_shares(self) -> dict[str, Any]:
        """Returns how workers, or a collector without workers, divide their time."""
        raise NotImplementedError

    def bottleneck(self) -> Bottleneck:
        """Returns the part that limits the rate of collection, from the times of recent batches.

        The page "Watching a run" describes all parts.

        Examples:
            >>> from trawl import Collector
            >>> with Collector("Pendulum-v1", frames_per_batch=100, total_frames=300) as collector:
            ...     for batch in collector:
            ...         pass
            ...     print(collector.bottleneck())
            The ... limits the rate...
        """
        return bottleneck_of(full_stats(self))

    def report(self) -> Report:
        """Returns a table of the collector's rates and shares of time, followed by its bottleneck.

        ``print`` prints the table as text, and a console of ``rich`` prints it in color.

        Examples:
            >>> from trawl import Collector
            >>> with Collector("Pendulum-v1", frames_per_batch=100, total_frames=300) as collector:
            ...     for batch in collector:
            ...         pass
            ...     print(collector.report())  # doctest: +ELLIPSIS
                       frames ...
            collector     300 ...
        """
        # Imports rich, which collection does not need.
        from trawl.observe.report import Report

        return Report(full_stats(self))
