"""Workers in processes of this machine, which share memory with this one."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.backends import server
from trawl.backends.base import Backend, Death, Event, Failed, MakeService, Message, Worker
from trawl.backends.blocks import BlockAllocator, SharedBlock
from trawl.backends.failure import Failure
from trawl.backends.memory import SharedMemory
from trawl.backends.parcel import Parcel
from trawl.backends.process_worker import BOARD_BYTES
from trawl.backends.wire import Closed, Wire, connection

START_METHODS = ("forkserver", "spawn")
# A fork keeps what its parent had in memory then; more than this is not worth its speed.
_MOST_FORKED_BYTES = 2 << 30
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class ProcessBackend(Backend):
    """Workers in processes of their own.

    Args:
        start_method: ``"forkserver"`` forks them from a process that has imported what they need;
            ``"spawn"`` starts a fresh interpreter for each.
    """

    shares_memory = True
    isolated = True

    def __init__(self, start_method: str = "forkserver") -> None:
        self._living: set[ProcessWorker] = set()
        if start_method not in START_METHODS:
            raise ValueError(
                f"start_method={start_method!r} is not one of {', '.join(map(repr, START_METHODS))}"
            )
        self._method = start_method
        self._selector = selectors.EpollSelector()
        # They stay here if an exception comes out of the wait for more.
        self._events: list[Event] = []
        self._closed = False
        self._owner = os.getpid()
        self._blocks = BlockAllocator()

    @override
    def launch(self, index: int, make: MakeService) -> ProcessWorker:
        if self._closed:
            raise RuntimeError("this backend is closed: make another one")
        parcel = Parcel(make)
        board = SharedMemory.new(BOARD_BYTES)
        wire, theirs = connection()
        try:
            with theirs:
                source, pid, handle = _ServerHandle.launch(
                    self._method, [theirs.fileno(), board.fd]
                )
        except BaseException:
            wire.close()
            raise
        worker = ProcessWorker(index, wire, board, pid, handle, source, self._watch_room)
        self._living.add(worker)
        self._selector.register(wire, selectors.EVENT_READ, worker)
        if handle is not None:
            self._selector.register(handle, selectors.EVENT_READ, worker)
        here = (list(sys.path), dict(os.environ), _directory(), list(sys.argv))
        worker.put((*here, parcel.data), parcel.fds)
        return worker

    @override
    def wait(self, timeout: float | None = None) -> list[Event]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._events:
            if not self._living:
                if timeout is None:
                    raise RuntimeError("there is no worker to wait for")
                break
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._take_all(left)
            if deadline is not None and time.monotonic() >= deadline:
                break
        events, self._events = self._events, []
        return events

    def __del__(self) -> None:
        # A worker ends by itself once nobody is there any more.
        for worker in self._living:
            worker.wire.close()

    def fileno(self) -> int:
        """A descriptor that is readable while :meth:`wait` would return at once."""
        return self._selector.fileno()

    def _watch_room(self, worker: ProcessWorker) -> None:
        if worker.wire in self._selector.get_map():
            self._selector.modify(worker.wire, _BOTH, worker)

    def _take_all(self, timeout: float | None) -> None:
        for key, ready in self._selector.select(timeout):
            worker = key.data
            if worker not in self._living:
                continue
            if key.fd == worker.handle:
                self._bury(worker)
                continue
            if ready & selectors.EVENT_WRITE and worker.flush():
                self._selector.modify(worker.wire, selectors.EVENT_READ, worker)
            if ready & selectors.EVENT_READ:
                self._take(worker)

    def _take(self, worker: ProcessWorker) -> bool:
        """Takes a message, if there is one; tells whether there may be more."""
        try:
            (verb, content), _ = worker.wire.receive(wait=False)
        except BlockingIOError:
            return False
        except Closed:
            self._selector.unregister(worker.wire)
            if worker.handle is None:
                self._bury(worker)
            return False
        except KeyboardInterrupt:
            # The message may be lost. Who takes this one's place gets its orders again.
            worker.kill()
            raise
        except Exception as error:
            # It means nothing here. Others' messages are not to be lost by that.
            self._events.append(Failed(worker, Failure.of(error)))
            worker.kill()
            return False
        kind = Failed if verb == "failed" else Message
        self._events.append(kind(worker, content))
        return True

    def _bury(self, worker: ProcessWorker) -> None:
        """Takes the last of a worker that is dead: what it sent yet, and its death."""
        self._living.discard(worker)
        while worker.wire in self._selector.get_map() and self._take(worker):
            pass
        for part in (worker.wire, worker.handle):
            if part is not None and part in self._selector.get_map():
                self._selector.unregister(part)
        status = worker.close()
        expected = worker.told_to_stop and status in (0, -signal.SIGTERM)
        self._events.append(Death(worker, _explain(status), expected))

    @override
    def allocate(self, nbytes: int) -> SharedBlock:
        return self._blocks.allocate(nbytes)

    @override
    def close(self) -> None:
        if self._owner != os.getpid():
            # A copy of this object in another process: the workers are not its own.
            return
        self._closed = True
        for worker in self._living:
            worker.kill()
        while self._living:
            self._take_all(None)
        self._events.clear()
        self._selector.close()


class ProcessWorker(Worker):
    """A worker in a process.

    Attributes:
        pid: the process.
        handle: a descriptor that is readable once the process has ended; None if the system has
            no such.
        told_to_stop: whether it was told to.
    """

    def __init__(
        self,
        index: int,
        wire: Wire,
        board: SharedMemory,
        pid: int,
        handle: int | None,
        source: _ServerHandle,
        watch_room: Callable[[ProcessWorker], None],
    ) -> None:
        self.index = index
        self.wire = wire
        self.pid = pid
        self.handle = handle
        self.told_to_stop = False
        # Blocks that the worker knows by a name, each with the number of its file, and how many
        # are of each file. The slot of a block is not given to another before it is forgotten.
        self._shared: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        self._blocks_of: Counter[int] = Counter()
        self._board = np.frombuffer(board.buffer, dtype=np.int64)
        self._source = source
        # Not to keep the backend: one that is dropped lets go of its workers at once.
        self._watch_room = weakref.WeakMethod(watch_room)
        self._buried = False
        self._owner = os.getpid()

    @override
    def send(self, content: Any) -> None:
        self.put(("message", content))

    @override
    def share(self, name: int, memory: SharedBlock) -> None:
        self.forget(name)
        file = memory.file
        fds = [] if self._blocks_of[file.number] else [file.memory.fd]
        place = (file.number, file.memory.nbytes, memory.offset, memory.buffer.nbytes)
        self.put(("share", name, place), fds)
        self._shared[name] = file.number, memory.buffer
        self._blocks_of[file.number] += 1

    @override
    def forget(self, name: int) -> None:
        if name not in self._shared:
            return
        file, _ = self._shared.pop(name)
        self._blocks_of[file] -= 1
        self.put(("forget", name, file if not self._blocks_of[file] else None))

    @override
    def interrupt(self, number: int) -> None:
        self._board[0] = number

    @override
    def stop(self) -> None:
        self.told_to_stop = True
        self.put(("stop",))
        self._signal(signal.SIGTERM)

    @override
    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def put(self, content: Any, fds: Sequence[int] = ()) -> None:
        """Sends anything; what there is no room for is sent while the backend waits."""
        if self._owner != os.getpid():
            # A copy of this object in another process: the worker is not its own.
            return
        with contextlib.suppress(Closed):
            self.wire.post(content, fds)
            if self.wire.full and (watch := self._watch_room()) is not None:
                watch(self)

    def flush(self) -> bool:
        """Sends what there was no room for; tells whether that was all."""
        try:
            return self.wire.flush()
        except Closed:
            return True

    def close(self) -> int | None:
        """Lets go of a process that has ended; its exit status."""
        self._buried = True
        self._shared.clear()
        self.wire.close()
        if self.handle is not None:
            os.close(self.handle)
        return self._source.reap(self.pid)

    def _signal(self, signum: int) -> None:
        # Once it is buried, the numbers may be those of something else.
        if self._buried or self._owner != os.getpid():
            return
        with contextlib.suppress(ProcessLookupError):
            if self.handle is None:
                os.kill(self.pid, signum)
            else:
                signal.pidfd_send_signal(self.handle, signum)


def _directory() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _explain(status: int | None) -> str:
    if status is None:
        return "ended, together with the process that it came from"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


class _ServerHandle:
    """The process that workers come from, as seen from here. There is one for each method."""

    _known: dict[tuple[int, str], _ServerHandle] = {}  # noqa: RUF012 - of all instances
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
    def launch(cls, method: str, fds: list[int]) -> tuple[_ServerHandle, int, int | None]:
        """A new worker's process: where it came from, its number, and its handle."""
        for _ in range(2):
            source = cls._get(method)
            with contextlib.suppress(Closed):
                pid, handles = source._ask("launch", 0, fds)
                if isinstance(pid, str):
                    raise RuntimeError(f"a worker's process can't be started: {pid}")
                return source, pid, (handles[0] if handles else None)
            # It died, and the next one may live.
            cls._known.pop((os.getpid(), method), None)
        raise RuntimeError(
            "the process that workers come from died, twice: what it printed may tell why "
            "(a module that can't be imported, or too little memory)"
        )

    @classmethod
    def _get(cls, method: str) -> _ServerHandle:
        """The server of this process, started if there is none."""
        place = (os.getpid(), method)
        with cls._lock:
            if place not in cls._known or not cls._known[place].alive:
                cls._known[place] = cls(method)
            return cls._known[place]

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def reap(self, pid: int) -> int | None:
        """The exit status of a worker that ended; None if nobody knows it."""
        try:
            status, _ = self._ask("reap", pid)
        except Closed:
            return None
        return status if isinstance(status, int) else None

    def _ask(self, verb: str, pid: int, fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        with self._lock, _no_garbage_collected():
            self._number += 1
            number = self._number
            self._asked.add(number)
            try:
                self._control.send((number, verb, pid), fds)
                while number not in self._answers:
                    self._take_answer()
                return self._answers.pop(number)
            finally:
                self._asked.discard(number)
                strays, self._strays = self._strays, []
                for stray in strays:
                    self._ask("reap", stray)

    def _take_answer(self) -> None:
        (number, answer), received = self._control.receive()
        if number in self._asked:
            self._answers[number] = answer, received
            return
        # Whoever asked was interrupted, and did not wait for it. It may be a worker.
        for handle in received:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
            self._strays.append(answer)


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


def _forget_lock() -> None:
    # Another thread of the parent may have had it.
    _ServerHandle._lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)


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
    """What to import there: what workers need, and TorchRL if it is in use here."""
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
