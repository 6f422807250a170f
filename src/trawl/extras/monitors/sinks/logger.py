"""Statistics that are passed to a logger of TorchRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trawl.extras.monitors.sinks.base import PREFIX, StatsSink, finite_numbers


class LoggerSink(StatsSink):
    """Logs the statistics that are finite numbers with a logger of TorchRL.

    A :class:`~trawl.observe.Monitor` makes this sink for a logger in its list of sinks. It does not
    close the logger, because other code may use the logger as well.

    Args:
        logger: a logger of TorchRL, or another object with a method
            ``log_scalar(name, value, step=...)``. The monitor's thread calls this method.
        prefix: prefix of the names.
    """

    def __init__(self, logger: Any, prefix: str = PREFIX) -> None:
        self.logger, self.prefix = logger, prefix

    def write(self, stats: Mapping[str, Any], step: int) -> None:
        """Logs each number."""
        for name, value in finite_numbers(stats, self.prefix).items():
            self.logger.log_scalar(name, float(value), step=step)

    def __repr__(self) -> str:
        return repr(self.logger)
