"""The server that workers come from, as seen from the process that it serves."""

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

from trawl.backends import server
from trawl.backends.wire import Closed, connection

# A fork keeps what its parent had in memory then; more than this is not worth its speed.
_MOST_FORKED_BYTES = 2 << 30
# Servers that may die one after the other while one worker is started: each may be killed from
# outside, and a worker's own death counts as a restart only after that.
_MOST_SERVERS = 5


class ServerHandle:
    """The process that workers come from, as seen from here. There is one for each method."""

    _known: dict[tuple[int, str], ServerHandle] = {}  # noqa: RUF012 - of all instances
    _lock = threading.RLock()

    def __init__(self, method: str) -> None:
        self._control, theirs = connection()
        # Until it is there, Ctrl-C would end it.
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
        """A new worker's process: where it came from, its number, and its handle."""
        for _ in range(_MOST_SERVERS):
            source = cls.get(method)
            with contextlib.suppress(Closed):
                pid, handles = source.new_worker(fds)
                if isinstance(pid, str):
                    raise RuntimeError(f"a worker's process can't be started: {pid}")
                return source, pid, (handles[0] if handles else None)
            # It died, or can no longer be asked; the next one may live.
            source.end()
            place = (os.getpid(), method)
            with cls._lock:
                # Another thread may have started the next one.
                if cls._known.get(place) is source:
                    del cls._known[place]
        raise RuntimeError(
            f"the process that forks workers died {_MOST_SERVERS} times in a row: what it "
            "printed may tell why (a module that can't be imported, or too little memory)"
        )

    @classmethod
    def get(cls, method: str) -> ServerHandle:
        """The server of this process, started if there is none."""
        place = (os.getpid(), method)
        with cls._lock:
            if place not in cls._known or not cls._known[place].alive:
                cls._known[place] = cls(method)
            return cls._known[place]

    @classmethod
    def forget_lock(cls) -> None:
        """Takes a new lock, after a fork: another thread of the parent may have had the old one."""
        cls._lock = threading.RLock()

    @property
    def alive(self) -> bool:
        """Tells whether it can still be asked."""
        return self._process.poll() is None

    def reap(self, pid: int) -> int | None:
        """Returns the exit status of a worker that ended, or None if the system doesn't tell.

        The server is told, and not waited for: it may be stopped.
        """
        status = _status_of(pid, self._process.pid)
        with self._lock, _no_garbage_collected(), contextlib.suppress(Closed):
            self._control.post(("reap", pid))
        return status

    def end(self) -> None:
        """Ends it, if it still runs."""
        self._process.kill()
        self._process.wait()

    def new_worker(self, fds: Sequence[int]) -> tuple[Any, list[int]]:
        """Has it start a worker: its number, and handles; or why it could not, in words.

        Raises:
            Closed: if it is gone.
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
        # The thread that asked was interrupted, and did not wait for its worker.
        for handle in received:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
            self._strays.append(answer)


def _status_of(pid: int, server: int) -> int | None:
    """The exit status of a server's child that ended and was not reaped; None if there is none."""
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
    """Garbage may be a collector, whose end asks the server, in the middle of another question."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


os.register_at_fork(after_in_child=ServerHandle.forget_lock)


class _Fork:
    """A child by fork, with as much of the interface of ``Popen`` as is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None as long as it runs."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self._status = status
        return self._status

    def kill(self) -> None:
        """Ends it, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # where SIGCHLD is ignored
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Returns once it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ChildProcessError):
                self._status = os.waitpid(self.pid, 0)[1]


def _forked(fd: int) -> _Fork | None:
    """A server forked from this process, if nothing here forbids it.

    It is there at once, and has imported all that was imported here. It forbids it a second
    thread (which could hold a lock for ever), CUDA (which does not survive), and much memory
    (which the server would keep).
    """
    if threading.active_count() > 1 or _cuda_is_used() or _resident() > _MOST_FORKED_BYTES:
        return None
    # Libraries that can handle a fork end their threads before one (OpenBLAS does). What is
    # still there after a first one, of no other use, is a thread that can't be.
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
        # What is in them yet would be written once more by each worker.
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
        # A program may have put something in their place that ends here.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        server.serve(fd, parent, spawn=False, preload=_preloaded())
    finally:
        os._exit(1)


def _let_go_of_files(keep: set[int]) -> None:
    """Closes the files of the process that this one was forked from.

    Their numbers stay taken: objects that think they are theirs would close others' otherwise.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep | {nothing}:
            with contextlib.suppress(OSError):
                os.fstat(int(name))
                os.dup2(nothing, int(name), inheritable=int(name) < 3)
    os.close(nothing)


def _started(fd: int, spawn: bool) -> subprocess.Popen[bytes]:
    """A server in a fresh interpreter."""
    preload = () if spawn else _preloaded()
    code = (
        "from trawl.backends.server import serve; "
        f"serve({fd}, {os.getpid()}, spawn={spawn}, preload={preload!r})"
    )
    return subprocess.Popen(server.command(code), stdin=subprocess.DEVNULL, pass_fds=[fd])


def _preloaded() -> tuple[str, ...]:
    """Names of the modules to import there: what workers need, and TorchRL if it is in use here."""
    more = ("torchrl.envs", "torchrl.data") if "torchrl" in sys.modules else ()
    return (*server.PRELOADED, *more)


def _cuda_is_used() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _threads() -> int | None:
    """Threads of this process, of Python or not; None if the system doesn't tell."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return None


def _resident() -> int:
    """Bytes of memory that this process occupies."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
