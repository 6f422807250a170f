"""Statistics that are passed to a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trawl.extras.monitors.sinks.base import StatsSink


class FunctionSink(StatsSink):
    """Calls a function with the statistics of each poll.

    A :class:`~trawl.observe.Monitor` makes this sink for a function in its list of sinks.

    Args:
        function: function that is called with a new dict, in the monitor's thread.
    """

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self.function = function

    def write(self, stats: Mapping[str, Any], step: int) -> None:
        """Calls the function."""
        self.function(dict(stats))

    def __repr__(self) -> str:
        return repr(self.function)
