"""Statistics that are passed to a logger of TorchRL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trawl.observe.sinks.base import PREFIX, StatsSink, finite_numbers


class LoggerSink(StatsSink):
    """Logs the statistics with a logger that has the methods of TorchRL's loggers.

    A :class:`~trawl.observe.Monitor` makes this sink for a logger in its list of sinks. Finite
    numbers are logged; the logger is not closed at the end, because other code uses it as well.

    Args:
        logger: object with a method ``log_scalar(name, value, step=...)``, which must allow calls
            from another thread.
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
