"""The process that workers come from.

It imports what workers need, once, and then forks a worker whenever it is asked to: that takes
milliseconds, and no thread is there to be cut in half. It ends with the process it serves, by
whatever that was ended, and so do its workers.
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
import traceback
from collections.abc import Iterable
from typing import NoReturn

from trawl.backends.title import set_title
from trawl.backends.wire import Closed, Wire
from trawl.lean import import_lean

# What a worker needs, and what takes long to import.
PRELOADED = ("trawl.collectors.worker", "gymnasium")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def serve(fd: int, parent: int, spawn: bool, preload: Iterable[str] = ()) -> NoReturn:
    """Serves until the process that it serves is gone.

    Args:
        fd: the socket over which requests come.
        parent: the process that is served.
        spawn: whether each worker is a fresh interpreter.
        preload: modules to import first.
    """
    set_title("trawl: server", f" of process {parent}")
    _settle_signals()
    # What an environment started and left behind comes to this process, to be ended by it.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    import_lean()
    for name in preload:
        # A worker will tell what is wrong with it, if it matters there.
        with contextlib.suppress(Exception):
            __import__(name)
    # What is here now is in every worker: their collections need not look at it again. If garbage
    # is there, it is not for this process to collect: it may be another's whose copy this is.
    gc.freeze()
    server = _Server(Wire(socket.socket(fileno=fd)), parent, spawn)
    try:
        server.run()
    except Exception:
        traceback.print_exc()
    finally:
        server.end_all()
        os._exit(0)


class _Server:
    def __init__(self, control: Wire, parent: int, spawn: bool) -> None:
        self._control = control
        self._spawn = spawn
        self._workers: set[int] = set()
        # The socket may be held open by another child of the parent: its death tells for sure.
        if os.getppid() != parent:
            os._exit(0)
        try:
            self._parent = os.pidfd_open(parent) if hasattr(os, "pidfd_open") else None
        except ProcessLookupError:
            os._exit(0)

    def run(self) -> None:
        """Answers requests."""
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
        """The number of a new worker, and its handle; or what kept it from being made."""
        me = os.getpid()
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(me, fds)
        except OSError as error:
            # Too many processes, or too little memory: the other workers live on.
            return str(error), []
        finally:
            for fd in fds:
                os.close(fd)
        self._workers.add(pid)
        return pid, [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else []

    def _become_worker(self, server: int, fds: list[int]) -> NoReturn:
        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # What is left behind by what it starts stays with it, and ends after it.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            if os.getppid() == server:
                os.close(self._control.fileno())
                if self._parent is not None:
                    os.close(self._parent)
                if self._spawn:
                    _execute(fds)
                from trawl.backends.process_worker import run

                run(*fds)
        finally:
            os._exit(1)

    def _reap(self, pid: int) -> None:
        """Removes a worker that ended, whose exit status nobody asks for any more."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        self._workers.discard(pid)
        self._end_orphans()

    def _end_orphans(self) -> None:
        """Ends what workers that are gone left behind, and what that left behind in turn.

        But for trackers of resources: once all who told them of names (of semaphores, of shared
        memory) are gone, they remove these names, and end by themselves.
        """
        while orphans := {pid for pid in _children() - self._workers if not _is_tracker(pid)}:
            for pid in orphans:
                _kill(pid)
            for pid in orphans:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def end_all(self) -> None:
        """Ends all workers, and what they started."""
        for pid in self._workers:
            _kill(pid)
        for pid in self._workers:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._workers.clear()
        self._end_orphans()


def _settle_signals() -> None:
    """Signals mean what they mean in a fresh process, but Ctrl-C is for the parent alone."""
    for signum in signal.valid_signals():
        if callable(signal.getsignal(signum)):
            # What a program does when it is told something, it does once, in its own process.
            hangup = signum == signal.SIGHUP
            signal.signal(signum, signal.SIG_DFL if hangup else signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _execute(fds: list[int]) -> NoReturn:
    """Makes this process a fresh interpreter that is a worker."""
    for fd in fds:
        os.set_inheritable(fd, True)
    code = f"from trawl.backends.process_worker import run; run({fds[0]}, {fds[1]})"
    os.execv(sys.executable, command(code))


def command(code: str) -> list[str]:
    """The command line of an interpreter like this one, with the same path, that runs ``code``."""
    from subprocess import _args_from_interpreter_flags  # type: ignore[attr-defined]

    path = f"import sys; sys.path[:] = {sys.path!r}; "
    return [sys.executable, *_args_from_interpreter_flags(), "-c", path + code]


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_tracker(pid: int) -> bool:
    """Whether a process is a resource tracker, of ``multiprocessing`` or of what is like it."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker import main" in file.read()
    except OSError:
        return False


def _children() -> set[int]:
    """The processes whose parent this one is, as far as the system tells."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return {int(pid) for pid in file.read().split()}
    except OSError:
        return set()
