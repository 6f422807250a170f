"""Server process that starts the processes of workers.

At its start, the server imports the modules that workers need. Then it forks a worker on each
request. Forking takes milliseconds, and is safe because the server has no other threads. The server
and its workers end with the process that the server serves, however that process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from typing import NoReturn

from trawl.backends.ipc import Closed, IpcConnection
from trawl.backends.processes.loop import interpreter_command
from trawl.backends.processes.title import set_title

# Modules that a worker needs and that take long to import.
PRELOADED = ("trawl.collectors.workers.service", "gymnasium")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Seconds to wait for a process that is in the middle of an execve, with no command line yet.
_PATIENCE = 10


def serve(fd: int, parent: int, spawn: bool, preload: Iterable[str] = ()) -> NoReturn:
    """Runs the server until the process that it serves is gone.

    Args:
        fd: the socket over which requests come.
        parent: id of the process that is served.
        spawn: True to start each worker in a fresh interpreter.
        preload: modules to import first.
    """
    set_title("trawl: server", f" of process {parent}")
    _settle_signals()
    # Processes that an environment started and left behind become children of this process, which
    # ends them.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for name in preload:
        # If the module matters in a worker, the worker will report the error.
        with contextlib.suppress(Exception):
            __import__(name)
    # Every worker inherits these objects, and its garbage collector need not look at them. Garbage
    # among them must not be collected either, because it may belong to the process that this one
    # was forked from.
    gc.freeze()
    server = _Server(IpcConnection(socket.socket(fileno=fd)), parent, spawn)
    try:
        server.run()
    except Exception:
        traceback.print_exc()
    finally:
        server.end_all()
        os._exit(0)


class _Server:
    def __init__(self, control: IpcConnection, parent: int, spawn: bool) -> None:
        self._control = control
        self._spawn = spawn
        self._workers: set[int] = set()
        # Another child of the parent may hold the socket open, so the server also watches for the
        # parent's death.
        if os.getppid() != parent:
            os._exit(0)
        try:
            self._parent = os.pidfd_open(parent) if hasattr(os, "pidfd_open") else None
        except ProcessLookupError:
            os._exit(0)

    def run(self) -> None:
        """Answers requests until the parent is gone."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        if self._parent is not None:
            poll.register(self._parent, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll()]
            if self._parent in ready:
                return
            try:
                (verb, number), fds = self._control.receive()
                if verb == "reap":
                    self._reap(number)
                    continue
                answer, handles = self._launch(fds)
                self._control.send((number, answer), handles)
            except Closed:
                return
            for fd in handles:
                os.close(fd)

    def _launch(self, fds: list[int]) -> tuple[int | str, list[int]]:
        """Starts a worker; returns its pid and its pidfd, or an error text and no descriptor."""
        me = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(me, fds)
        except OSError as error:
            # There are too many processes, or too little memory. The other workers are unaffected.
            return str(error), []
        finally:
            for fd in fds:
                os.close(fd)
        self._workers.add(pid)
        return pid, [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else []

    def _become_worker(self, server: int, fds: list[int]) -> NoReturn:
        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # Processes that the worker's children leave behind become the worker's own children,
            # and end after it.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            if os.getppid() == server:
                os.close(self._control.fileno())
                if self._parent is not None:
                    os.close(self._parent)
                if self._spawn:
                    _execute(fds)
                from trawl.backends.processes.worker import run

                run(*fds)
        finally:
            os._exit(1)

    def _reap(self, pid: int) -> None:
        """Removes a worker that has ended, and whose exit status is no longer needed."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        self._workers.discard(pid)
        self._end_orphans()

    def _end_orphans(self) -> None:
        """Ends processes that dead workers left behind, and all descendants of these processes.

        Resource trackers are left alone. Processes register the names of semaphores and of shared
        memory with a tracker. Once all these processes are gone, the tracker removes the names, and
        ends by itself.
        """
        while orphans := {pid for pid in _children() - self._workers if not _is_tracker(pid)}:
            for pid in orphans:
                _kill(pid)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def end_all(self) -> None:
        """Ends all workers, and the processes that they started."""
        for pid in self._workers:
            _kill(pid)
        for pid in self._workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._workers.clear()
        self._end_orphans()


def _settle_signals() -> None:
    """Removes the program's signal handlers. Only the parent reacts to Ctrl-C."""
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            # A handler of the program must run only once, in the program's own process.
            hangup = signum == signal.SIGHUP
            signal.signal(signum, signal.SIG_DFL if hangup else signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _execute(fds: list[int]) -> NoReturn:
    """Replaces this process with a fresh interpreter that runs a worker."""
    for fd in fds:
        os.set_inheritable(fd, True)
    code = f"from trawl.backends.processes.worker import run; run({fds[0]}, {fds[1]})"
    os.execv(sys.executable, interpreter_command(code))


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    """Returns True for a resource tracker of ``multiprocessing`` or of a similar library."""
    deadline = time.monotonic() + _PATIENCE
    try:
        while True:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read()
            if command or time.monotonic() > deadline or _has_ended(pid):
                return b"resource_tracker import main" in command
            # The process has no command line for a moment while it executes another program.
            time.sleep(0.001)
    except OSError:
        return False


def _has_ended(pid: int) -> bool:
    """Returns True if a process has ended, but has not been reaped yet."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name of the program, in brackets, may contain anything.
        return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")


def _children() -> set[int]:
    """Returns the ids of this process's children; empty if the system does not list them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:
        return set()
