"""Statistics of a running collector: rates, shares of time, episodes and the bottleneck."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from trawl.collectors.watch.times import DriverTimes, TurnClock
from trawl.observe.bottleneck import Bottleneck, bottleneck_of
from trawl.observe.episodes import LoggedValues, RecentEpisodes
from trawl.polling import full_stats

if TYPE_CHECKING:
    from trawl.observe.report import Report


#: Entry of a state with the newest episodes, and with the values that the user logged.
WATCHED = "watched"
# The system is asked at most this often, in seconds.
_INTERVAL = 1.0


class Watch:
    """Measures the time of a collector's batches, and keeps its recent episodes.

    Attributes:
        clock: clock of the driver thread or, in a worker, of the worker.
        turns: times of the driver thread.
        episodes: the newest episodes.
        resident: memory of this process.
    """

    def __init__(self) -> None:
        self.clock = TurnClock()
        self.turns = DriverTimes()
        self.episodes = RecentEpisodes()
        self.resident = ResidentMemory()
        self._logged = LoggedValues()

    def stats(self, worker_shares: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Returns this part of the collector's ``stats()``.

        Args:
            worker_shares: function that returns how workers, or a collector without workers, divide
                their time.
        """
        turns = self.turns.stats()
        # Workers may have finished batches before the first one is delivered.
        shares = worker_shares() if turns else {}
        found = {"process_bytes": self.resident.bytes, **turns, **shares}
        return {**found, **self.episodes.stats(), **self._logged.stats()}

    def log(self, /, **values: Any) -> None:
        """Adds values of your own to the statistics.

        ``stats()`` has the mean of the last 100 values of each name, as ``"logged/NAME"``. A
        :class:`~trawl.observe.Monitor` writes it to its sinks, and the progress panel and
        ``report()`` show it. The values are part of the collector's state.

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

    def state_dict(self) -> dict[str, Any]:
        """Returns the statistics that go on after a state is loaded."""
        return {
            WATCHED: {"episodes": self.episodes.state_dict(), "logged": self._logged.state_dict()}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned; older states don't have it."""
        found = state.get(WATCHED)
        if found is not None:
            self.episodes.load_state_dict(found["episodes"])
            self._logged.load_state_dict(found["logged"])


class HasStats(Protocol):
    """Object with statistics, such as a collector."""

    def stats(self) -> dict[str, Any]:
        """Returns the statistics."""


def bottleneck(self: HasStats) -> Bottleneck:
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


def report(self: HasStats) -> Report:
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


class ResidentMemory:
    """Resident memory of this process, which is looked up once a second at most."""

    def __init__(self) -> None:
        self._bytes = 0
        self._read: float | None = None

    @property
    def bytes(self) -> int:
        """Number of bytes of memory that the process uses; 0 if the system doesn't tell."""
        now = time.monotonic()
        if self._read is None or now - self._read > _INTERVAL:
            self._bytes, self._read = _resident_bytes(), now
        return self._bytes


def _resident_bytes() -> int:
    # Linux has this file.
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
