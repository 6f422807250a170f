"""Statistics for Prometheus, which scrapes them over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from trawl.checks import check_number
from trawl.observe.sinks.base import StatsSink, load_library

_HIGHEST_PORT = 65535
_OF_WORKER = re.compile(r"worker_(\d+)/(.+)")


class PrometheusSink(StatsSink):
    """Serves the statistics over HTTP, in the format that Prometheus scrapes.

    Needs ``pip install 'trawl-rl[prometheus]'``. Each number is a gauge, such as ``trawl_frames``
    for ``frames``. The statistics of single workers have the prefix ``trawl_per_worker_`` and the
    label ``worker``: ``trawl_per_worker_frames{worker="0"}``. A scrape returns the latest poll.

    Args:
        port: port of the server; 0 for any free port.
        host: address of the network interface to listen on. The default can be reached only from
            this machine. Anyone who can reach the address can read the statistics.

    Attributes:
        port: port of the server. If 0 was passed, this is the chosen port once the server runs.

    Raises:
        ModuleNotFoundError: if the Prometheus client is not installed.
        TypeError: if ``port`` is not an integer.
        ValueError: if ``port`` is out of range.
        OSError: when the monitor is made, if the server can't listen, for example because the port
            is in use.

    Examples:
        >>> from urllib.request import urlopen
        >>> from trawl import Collector
        >>> from trawl.observe import Monitor, PrometheusSink
        >>> sink = PrometheusSink(0)
        >>> with (
        ...     Collector("CartPole-v1", frames_per_batch=10, total_frames=30) as collector,
        ...     Monitor(collector, [sink]),
        ... ):
        ...     with urlopen(f"http://127.0.0.1:{sink.port}/metrics") as answer:
        ...         print(answer.status)
        200
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._given = check_number("port", port, 0)
        if self._given > _HIGHEST_PORT:
            raise ValueError(f"port must be at most {_HIGHEST_PORT}, but it is {port}")
        self.port, self.host = self._given, host
        self._library = load_library("prometheus_client", "prometheus")
        self._core = load_library("prometheus_client.core", "prometheus")
        self._server: Any = None
        self._stats: Mapping[str, Any] = {}

    def open(self) -> None:
        """Starts the server."""
        registry = self._library.CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            server, thread = self._library.start_http_server(self._given, self.host, registry)
        except OSError as error:
            why = error.strerror or str(error)
            raise OSError(
                error.errno,
                f"can't listen on port {self._given} of {self.host}: {why} (pass another port)",
            ) from error
        self._server, self._thread = server, thread
        self.port = server.server_port

    def write(self, stats: Mapping[str, Any], step: int) -> None:
        """Keeps the statistics for the next scrapes."""
        self._stats = dict(stats)

    def collect(self) -> Iterator[Any]:
        """Yields the gauges; the Prometheus client calls this method for each scrape."""
        families: dict[str, Any] = {}
        for name, value in self._stats.items():
            if isinstance(value, Real):
                worker = _OF_WORKER.fullmatch(name)
                labels = [] if worker is None else [worker[1]]
                self._family(families, name if worker is None else worker[2], labels).add_metric(
                    labels, float(value)
                )
        yield from families.values()

    def _family(self, families: dict[str, Any], name: str, labels: list[str]) -> Any:
        """Returns the gauges of one name."""
        kind = "trawl_per_worker_" if labels else "trawl_"
        full = kind + re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if full not in families:
            families[full] = self._core.GaugeMetricFamily(
                full, f"{name} in the statistics of the collector", labels=["worker"] * bool(labels)
            )
        return families[full]

    def close(self) -> None:
        """Stops the server and frees its port."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()
