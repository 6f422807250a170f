"""Launchers, which start the processes of workers and report when the processes end."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from typing_extensions import override

from trawl.backends.base import Death, Failed, Port, Service
from trawl.backends.processes.backend import ProcessBackend, ProcessWorker
from trawl.backends.processes.handle import ServerHandle
from trawl.backends.processes.loop import leave
from trawl.errors import WorkerDied
from trawl.extras.clusters.network.link import Address
from trawl.extras.clusters.network.rank import run_rank_at
from trawl.extras.clusters.network.sockets import LOOPBACK

Ended = Callable[[str], None]


class Process(ABC):
    """Process that a launcher started.

    Attributes:
        reports_end: True if the launcher promptly reports the end of the process.
    """

    reports_end = False

    @abstractmethod
    def kill(self) -> None:
        """Kills the process, if possible."""

    def note_joined(self) -> None:  # noqa: B027 (only commands need to know)
        """Handles the arrival of the worker, which shows that the process could be started."""

    def expect_end(self) -> None:  # noqa: B027 (most processes are the workers themselves)
        """Handles the orderly end of the worker, after which the process should also end."""


class Launcher(ABC):
    """Starts the processes of workers.

    Attributes:
        replaces: True if the launcher can start a new process for a worker whose process has ended.
    """

    replaces = True

    @abstractmethod
    def start(self, index: int, address: Address, ended: Ended) -> Process:
        """Starts a process, which has to call ``trawl.extras.clusters.network.rank.run_rank_at``.

        Args:
            index: number of the worker that runs in the process.
            address: address at which the new process joins this process.
            ended: function to call with the reason when the process has ended, worded to follow
                the worker's name in a sentence, such as ``"exited with status 3"``. The call may
                come from any thread.
        """

    def close(self) -> None:  # noqa: B027 (there may be nothing)
        """Ends the processes that were started."""


@dataclass(frozen=True)
class LaunchPlan:
    """Launcher of workers, and the store where workers meet this process.

    Attributes:
        launcher: object that starts the workers' processes.
        host: address of this machine at which workers find the store.
        port: port of the store; None for any free port.
        prefix: prefix of the names in the store.
        store: True if this process makes the store; False if the store exists already.
        secret: the secret from which the workers' keys are derived; by default, a random one. A
            secret is required if the launcher can't pass the keys to the workers.
    """

    launcher: Launcher
    host: str = LOOPBACK
    port: int | None = None
    prefix: str = "trawl"
    store: bool = True
    secret: bytes | None = field(default=None, repr=False)


class LocalLauncher(Launcher):
    """Starts processes on this machine, which end when this process ends, for whatever reason."""

    def __init__(self) -> None:
        self._inner = ProcessBackend("forkserver")
        # Starts the server now, because only a process with a single thread can be forked.
        ServerHandle.get("forkserver")
        self._lock = threading.Lock()
        self._ended: dict[Any, Ended] = {}
        self._failed: dict[Any, str] = {}
        self._read, self._write = os.pipe()
        self._thread: threading.Thread | None = None

    @override
    def start(self, index: int, address: Address, ended: Ended) -> Process:
        with self._lock:
            worker = self._inner.launch(index, partial(_live, address))
            self._ended[worker] = ended
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        return _LocalProcess(worker)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._inner.fileno(), select.POLLIN)
        poll.register(self._read, select.POLLIN)
        while self._read not in [fd for fd, _ in poll.poll()]:
            with self._lock:
                events = self._inner.wait(0)
            self._report(events)

    def _report(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, Death):
                failed = self._failed.pop(event.worker, None)
                self._ended.pop(event.worker)(
                    event.reason if failed is None else f"{event.reason} ({failed})"
                )
            elif isinstance(event, Failed):
                # The process failed before it could report the error to the driver itself.
                self._failed[event.worker] = event.failure.summary

    @override
    def close(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            os.write(self._write, b"x")
            self._thread.join()
        self._inner.close()
        for fd in (self._read, self._write):
            with contextlib.suppress(OSError):
                os.close(fd)


class _LocalProcess(Process):
    reports_end = True

    def __init__(self, worker: ProcessWorker) -> None:
        self._worker = worker

    @override
    def kill(self) -> None:
        self._worker.kill()


def _live(address: Address, port: Port) -> Service:
    """Runs a rank in a worker process of the inner backend; never returns."""
    leave(run_rank_at(address))


class OutsideLauncher(Launcher):
    """Launcher for processes that are started from outside and connect on their own.

    This launcher starts nothing.

    Args:
        count: number of these processes, not counting this one.
    """

    replaces = False

    def __init__(self, count: int) -> None:
        self.count = count
        self._seen: set[int] = set()

    @override
    def start(self, index: int, address: Address, ended: Ended) -> Process:
        if index >= self.count:
            raise RuntimeError(
                f"worker {index} is rank {index + 1}, but there are only ranks 0 to {self.count} "
                f"(WORLD_SIZE={self.count + 1}): start one rank more than there are workers"
            )
        if index in self._seen:
            raise WorkerDied(
                f"rank {index + 1} was started from outside, so the collector can't restart it"
            )
        self._seen.add(index)
        return _SomebodysProcess()


class _SomebodysProcess(Process):
    @override
    def kill(self) -> None:
        pass
