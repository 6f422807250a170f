"""Handle through which a process uses the server that starts its workers."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from trawl.backends.ipc import Closed, connection_pair
from trawl.backends.processes import server
from trawl.backends.processes.loop import interpreter_command

# Maximum memory of a process that is forked to make the server. The forked server keeps the memory.
# Beyond this limit, the faster start is not worth the memory.
_MOST_FORKED_BYTES = 2 << 30
# Maximum number of servers that may die in a row while one worker is being started. A server may be
# killed from outside. That does not count as a restart, because the worker has not started yet.
_MOST_SERVERS = 5


class ServerHandle:
    """Handle of a server process. Each process has one server for each start method."""

    _known: dict[tuple[int, str], ServerHandle] = {}  # noqa: RUF012 - of all instances
    _lock = threading.RLock()

    def __init__(self, method: str) -> None:
        self._control, theirs = connection_pair()
        # Ctrl-C would end the server while it starts.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with theirs:
                spawn = method == "spawn"
                fork = None if spawn else _forked(theirs.fileno())
                self._process = fork or _started(theirs.fileno(), spawn)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        self._number = 0
        self._asked: set[int] = set()
        self._answers: dict[int, tuple[Any, list[int]]] = {}
        self._strays: list[int] = []
        weakref.finalize(self, self._control.close)

    @classmethod
    def launch(cls, method: str, fds: list[int]) -> tuple[ServerHandle, int, int | None]:
        """Starts a worker's process; returns its server, its pid, and its pidfd or None."""
        for _ in range(_MOST_SERVERS):
            source = cls.get(method)
            with contextlib.suppress(Closed):
                pid, handles = source.new_worker(fds)
                if isinstance(pid, str):
                    raise RuntimeError(f"a worker's process can't be started: {pid}")
                return source, pid, (handles[0] if handles else None)
            # The server died, or can no longer be reached. The next one may work.
            source.end()
            place = (os.getpid(), method)
            with cls._lock:
                # Another thread may have started the next one.
                if cls._known.get(place) is source:
                    del cls._known[place]
        raise RuntimeError(
            f"the process that forks workers died {_MOST_SERVERS} times in a row: its output may "
            "show the cause, such as a module that can't be imported or too little memory"
        )

    @classmethod
    def get(cls, method: str) -> ServerHandle:
        """Returns this process's server for a start method; starts one if there is none."""
        place = (os.getpid(), method)
        with cls._lock:
            if place not in cls._known or not cls._known[place].alive:
                cls._known[place] = cls(method)
            return cls._known[place]

    @classmethod
    def forget_lock(cls) -> None:
        """Makes a new lock after a fork, because a thread of the parent may hold the old one."""
        cls._lock = threading.RLock()

    @property
    def alive(self) -> bool:
        """True if the server process is still running."""
        return self._process.poll() is None

    def reap(self, pid: int) -> int | None:
        """Returns the exit status of a worker that has ended, or None if it is unknown.

        The call also notifies the server, but does not wait for it, because the server may be
        suspended.
        """
        status = _status_of(pid, self._process.pid)
        with self._lock, _no_garbage_collected(), contextlib.suppress(Closed):
            self._control.post(("reap", pid))
        return status

    def end(self) -> None:
        """Ends the server if it is still running."""
        self._process.kill()
        self._process.wait()

    def new_worker(self, fds: Sequence[int]) -> tuple[Any, list[int]]:
        """Makes the server start a worker; returns the worker's pid and pidfd, or an error text.

        Raises:
            Closed: if the server is gone.
        """
        with self._lock, _no_garbage_collected():
            self._number += 1
            number = self._number
            self._asked.add(number)
            try:
                self._control.send(("launch", number), fds)
                while number not in self._answers:
                    self._take_answer()
                return self._answers.pop(number)
            finally:
                self._asked.discard(number)
                strays, self._strays = self._strays, []
                for stray in strays:
                    self._control.post(("reap", stray))

    def _take_answer(self) -> None:
        (number, answer), received = self._control.receive()
        if number in self._asked:
            self._answers[number] = answer, received
            return
        # The thread that requested this worker was interrupted, and no thread waits for the worker.
        for handle in received:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
            self._strays.append(answer)


def _status_of(pid: int, server: int) -> int | None:
    """Returns the exit status of a server's child that has ended but is not reaped, or None."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, parent, *more = file.read().rpartition(") ")[2].split()
    except OSError:
        return None
    if state != "Z" or int(parent) != server:
        return None
    return os.waitstatus_to_exitcode(int(more[-1]))


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Context without garbage collection, which could free a collector.

    A collector that is freed sends the server a request, which must not come between a request and
    its answer.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


os.register_at_fork(after_in_child=ServerHandle.forget_lock)


class _Fork:
    """Forked child process, with the methods of ``Popen`` that a server handle uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Returns the exit status, or None while the child is running."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self._status = status
        return self._status

    def kill(self) -> None:
        """Ends the child if it is still running."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # where SIGCHLD is ignored
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Waits until the child has ended."""
        if self.poll() is None:
            with contextlib.suppress(ChildProcessError):
                self._status = os.waitpid(self.pid, 0)[1]


def _forked(fd: int) -> _Fork | None:
    """Forks a server from this process; returns None if this process can't be forked.

    A forked server is ready at once, and has all modules that this process has imported. A process
    can't be forked in four cases: it has a second thread (which could hold a lock forever), it
    uses CUDA (which does not survive a fork), it has imported JAX (which has such threads, and
    warns of forks), or it occupies much memory (which the server would keep).
    """
    if threading.active_count() > 1 or _cuda_is_used() or "jax" in sys.modules:
        return None
    if _resident() > _MOST_FORKED_BYTES:
        return None
    # Libraries that support forks, such as OpenBLAS, end their threads before a fork. The first
    # fork only makes them do so. If there is still a second thread, this process can't be forked.
    with warnings.catch_warnings():
        # Python 3.12 and later warn of such threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        probe = os.fork()
    if probe == 0:
        os._exit(0)
    with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored
        os.waitpid(probe, 0)
    if _threads() != 1:
        return None
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        # Otherwise, each worker would write the buffered output again.
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _serve_forked(fd, parent)
    return _Fork(pid)


def _serve_forked(fd: int, parent: int) -> NoReturn:
    try:
        signal.set_wakeup_fd(-1)
        _let_go_of_files(keep={1, 2, fd})
        # The program may have replaced the streams with objects that do not work here.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        server.serve(fd, parent, spawn=False, preload=_preloaded())
    finally:
        os._exit(1)


def _let_go_of_files(keep: set[int]) -> None:
    """Closes the files of the process that this one was forked from.

    The descriptors stay in use. Otherwise, objects that still refer to old descriptors would close
    new files with the same numbers.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep | {nothing}:
            with contextlib.suppress(OSError):
                os.fstat(int(name))
                os.dup2(nothing, int(name), inheritable=int(name) < 3)
    os.close(nothing)


def _started(fd: int, spawn: bool) -> subprocess.Popen[bytes]:
    """Starts a server in a fresh interpreter."""
    preload = () if spawn else _preloaded()
    code = (
        "from trawl.backends.processes.server import serve; "
        f"serve({fd}, {os.getpid()}, spawn={spawn}, preload={preload!r})"
    )
    return subprocess.Popen(interpreter_command(code), stdin=subprocess.DEVNULL, pass_fds=[fd])


def _preloaded() -> tuple[str, ...]:
    """Returns the modules that the server imports: those that workers need, and TorchRL if used."""
    more = ("torchrl.envs", "torchrl.data") if "torchrl" in sys.modules else ()
    return (*server.PRELOADED, *more)


def _cuda_is_used() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _threads() -> int | None:
    """Returns the number of threads of this process; None if unknown."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return None


def _resident() -> int:
    """Returns the bytes of memory that this process occupies; 0 if unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
