"""Statistics for Prometheus, which scrapes them over HTTP."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from numbers import Real
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from typing_extensions import override

from trawl.checks import check_number
from trawl.extras.monitors.sinks import StatsSink, load_library

_HIGHEST_PORT = 65535
_OF_WORKER = re.compile(r"worker_(\d+)/(.+)")
# Clients that are served at once; more are turned away. Each takes a thread.
_MOST_CLIENTS = 16


class _Handler(WSGIRequestHandler):
    """Answers the requests of one client, in silence."""

    # Seconds after which a client that says nothing is disconnected.
    timeout = 10

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """Serves a few clients at a time."""

    def __init__(self, address: tuple[str, int], handler: type[_Handler]) -> None:
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._free = BoundedSemaphore(_MOST_CLIENTS)
        self._clients: list[tuple[Thread, socket.socket]] = []
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Returns True if there is room for another client."""
        return self._free.acquire(blocking=False)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the thread that serves a client."""
        serve = Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        try:
            serve.start()
        except BaseException:  # there are too many threads
            self._free.release()
            raise
        self._clients = [client for client in self._clients if client[0].is_alive()]
        self._clients.append((serve, request))

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a client, and makes room for the next one."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def server_close(self) -> None:
        """Frees the port, and ends the threads: clients get their answers, but ask no more."""
        super().server_close()
        for thread, client in self._clients:
            with suppress(OSError):  # the client has gone
                client.shutdown(socket.SHUT_RD)
            thread.join()


class PrometheusSink(StatsSink):
    """Serves the statistics over HTTP, in the format that Prometheus scrapes.

    Needs ``pip install 'trawl-rl[prometheus]'``. Each number is a gauge, such as ``trawl_frames``
    for ``frames``. The statistics of single workers have the prefix ``trawl_per_worker_`` and the
    label ``worker``: ``trawl_per_worker_frames{worker="0"}``. A scrape returns the latest poll.

    Args:
        port: port of the server; 0 for any free port.
        host: address of the network interface to listen on. The default can be reached only from
            this machine; ``"0.0.0.0"`` listens on all interfaces. Anyone who can reach the address
            can read the statistics. At most 16 clients are served at once, and a client that is
            silent for 10 seconds is disconnected.

    Attributes:
        port: port of the server. If 0 was passed, this is the chosen port once the server runs.

    Raises:
        ModuleNotFoundError: if the Prometheus client is not installed.
        TypeError: if ``port`` is not an integer, or ``host`` not a string.
        ValueError: if ``port`` is out of range, or ``host`` is empty.
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

    target = "PORT"

    @override
    @classmethod
    def from_text(cls, target: str, resume: bool) -> PrometheusSink:
        host, _, port = target.rpartition(":")
        if not port.isdecimal():
            raise ValueError("PORT must be a number: pass prometheus:PORT or prometheus:HOST:PORT")
        return cls(int(port), host) if host else cls(int(port))

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._given = check_number("port", port, 0)
        if self._given > _HIGHEST_PORT:
            raise ValueError(f"port must be at most {_HIGHEST_PORT}, but it is {port}")
        if not isinstance(host, str):
            raise TypeError(f"host must be an address, such as '127.0.0.1', but it is {host!r}")
        if not host.strip():
            raise ValueError("host is empty: pass '0.0.0.0' to listen on all interfaces")
        self.port, self.host = self._given, host
        self._library = load_library("prometheus_client", "prometheus")
        self._core = load_library("prometheus_client.core", "prometheus")
        self._server: Any = None
        self._stats: Mapping[str, Any] = {}

    def open(self) -> None:
        """Starts the server."""
        registry = self._library.CollectorRegistry(auto_describe=False)
        registry.register(self)
        app = self._library.make_wsgi_app(registry)
        try:
            server = make_server(self.host, self._given, app, _Server, _Handler)
        except OSError as error:
            why = error.strerror or str(error)
            raise OSError(
                error.errno,
                f"can't listen on port {self._given} of {self.host}: {why} (pass another port)",
            ) from error
        self._server, self._thread = server, Thread(target=server.serve_forever, daemon=True)
        self._thread.start()
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
