"""Workers in local processes, which share memory with this process."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import multiprocessing
import os
import selectors
import signal
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.backends.base import Death, Event, Failed, MakeService, Message, OwningBackend, Worker
from trawl.backends.failure import Failure
from trawl.backends.ipc import Closed, IpcConnection, connection_pair
from trawl.backends.memory import SharedMemory, reserve
from trawl.backends.processes.handle import ServerHandle
from trawl.backends.processes.payload import Package, SpawnPayload
from trawl.backends.processes.worker import INTERRUPTION_BYTES

START_METHODS = ("forkserver", "spawn")
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class ProcessBackend(OwningBackend):
    """Backend whose workers are local processes.

    Args:
        start_method: ``"forkserver"`` forks workers from a process that has already imported the
            modules they need; ``"spawn"`` starts a fresh interpreter for each worker.
    """

    shares_memory = True
    _living: set[ProcessWorker]

    def __init__(self, start_method: str = "forkserver") -> None:
        super().__init__()
        if start_method not in START_METHODS:
            raise ValueError(
                f"start_method={start_method!r} is not one of {', '.join(map(repr, START_METHODS))}"
            )
        self._method = start_method
        self._selector = selectors.EpollSelector()
        # Events stay here if an exception, such as KeyboardInterrupt, ends the wait for more.
        self._events: list[Event] = []
        self._blocks = BlockAllocator()

    @override
    def launch(self, index: int, make: MakeService) -> ProcessWorker:
        self._check_open()
        payload = SpawnPayload(make)
        interruptions = SharedMemory.new(INTERRUPTION_BYTES)
        connection, theirs = connection_pair()
        try:
            with theirs:
                source, pid, handle = ServerHandle.launch(
                    self._method, [theirs.fileno(), interruptions.fd]
                )
        except BaseException:
            connection.close()
            raise
        worker = ProcessWorker(
            index, connection, interruptions, pid, handle, source, self._watch_room
        )
        self._living.add(worker)
        self._selector.register(connection, selectors.EVENT_READ, worker)
        if handle is not None:
            self._selector.register(handle, selectors.EVENT_READ, worker)
        # Objects of multiprocessing in the worker authenticate themselves with this process's key.
        key = bytes(multiprocessing.current_process().authkey)
        here = (index, list(sys.path), dict(os.environ), _directory(), list(sys.argv), key)
        worker.post((*here, payload.data), payload.fds)
        return worker

    @override
    def pack(self, parts: Sequence[Any], copied: Sequence[int] = ()) -> Package:
        return Package.shared(parts, copied)

    @override
    def wait(self, timeout: float | None = None) -> list[Event]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._events:
            if not self._living:
                if timeout is None:
                    raise RuntimeError("there is no worker to wait for")
                break
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._receive_all(left)
            # If this process was suspended, only a look after the deadline finds what has come.
            if left == 0:
                break
        events, self._events = self._events, []
        return events

    def __del__(self) -> None:
        # A worker ends by itself when its connection is closed. Ctrl-C may end a constructor before
        # it has begun.
        for worker in self.__dict__.get("_living", ()):
            worker.connection.close()

    def fileno(self) -> int:
        """Returns a descriptor that is readable while :meth:`wait` would return at once."""
        return self._selector.fileno()

    def _watch_room(self, worker: ProcessWorker) -> None:
        if worker.connection in self._selector.get_map():
            self._selector.modify(worker.connection, _BOTH, worker)

    def _receive_all(self, timeout: float | None) -> None:
        for key, ready in self._selector.select(timeout):
            worker = key.data
            if worker not in self._living:
                continue
            if key.fd == worker.handle:
                self._remove(worker)
                continue
            if ready & selectors.EVENT_WRITE and worker.flush():
                self._selector.modify(worker.connection, selectors.EVENT_READ, worker)
            if ready & selectors.EVENT_READ:
                self._receive(worker)

    def _receive(self, worker: ProcessWorker) -> bool:
        """Receives a message if there is one; returns True if there may be more."""
        try:
            (verb, content), _ = worker.connection.receive(wait=False)
        except BlockingIOError:
            return False
        except Closed:
            self._selector.unregister(worker.connection)
            if worker.handle is None:
                self._remove(worker)
            return False
        except KeyboardInterrupt:
            # The message may be lost, so the worker is killed. Its replacement gets the unanswered
            # requests.
            worker.kill()
            raise
        except Exception as error:
            # The message can't be unpickled. Messages of other workers must not be lost.
            self._events.append(Failed(worker, Failure.of(error)))
            worker.kill()
            return False
        kind = Failed if verb == "failed" else Message
        self._events.append(kind(worker, content))
        return True

    def _remove(self, worker: ProcessWorker) -> None:
        """Receives the last messages of a dead worker, and queues its death."""
        self._living.discard(worker)
        while worker.connection in self._selector.get_map() and self._receive(worker):
            pass
        for part in (worker.connection, worker.handle):
            if part is not None and part in self._selector.get_map():
                self._selector.unregister(part)
        status = worker.close()
        expected = worker.told_to_stop and status in (0, -signal.SIGTERM)
        self._events.append(Death(worker, explain(status), expected))

    @override
    def allocate(self, nbytes: int) -> SharedBlock:
        return self._blocks.allocate(nbytes)

    @override
    def _end(self, first: bool) -> None:
        while self._living:
            self._receive_all(None)
        self._events.clear()
        self._selector.close()


def spawned() -> ProcessBackend:
    """Returns a backend whose workers are fresh interpreters."""
    return ProcessBackend("spawn")


class ProcessWorker(Worker):
    """Worker in a local process.

    Attributes:
        pid: id of the process.
        handle: a pidfd, which is readable once the process has ended; None if the system has no
            pidfds.
        told_to_stop: True if :meth:`stop` was called.
    """

    def __init__(
        self,
        index: int,
        connection: IpcConnection,
        interruptions: SharedMemory,
        pid: int,
        handle: int | None,
        source: ServerHandle,
        watch_room: Callable[[ProcessWorker], None],
    ) -> None:
        self.index = index
        self.connection = connection
        self.pid = pid
        self.handle = handle
        self.told_to_stop = False
        # Blocks that are shared with the worker by name, each with the number of its file, and the
        # count of these blocks in each file. A block that is kept here keeps its slot.
        self._shared: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        self._blocks_of: Counter[int] = Counter()
        self._interruptions = np.frombuffer(interruptions.buffer, dtype=np.int64)
        self._source = source
        # A weak reference, so that a dropped backend is freed, and ends its workers, at once.
        self._watch_room = weakref.WeakMethod(watch_room)
        self._removed = False
        self._owner = os.getpid()

    @override
    def send(self, content: Any) -> None:
        self.post(("message", content))

    @override
    def share(self, name: int, memory: SharedBlock) -> None:
        self.forget(name)
        file = memory.file
        fds = [] if self._blocks_of[file.number] else [file.memory.fd]
        place = (file.number, file.memory.nbytes, memory.offset, memory.buffer.nbytes)
        self.post(("share", name, place), fds)
        self._shared[name] = file.number, memory.buffer
        self._blocks_of[file.number] += 1

    @override
    def forget(self, name: int) -> None:
        if name not in self._shared:
            return
        file, _ = self._shared.pop(name)
        self._blocks_of[file] -= 1
        self.post(("forget", name, file if not self._blocks_of[file] else None))

    @override
    def interrupt(self, number: int) -> None:
        self._interruptions[0] = number

    @override
    def stop(self) -> None:
        self.told_to_stop = True
        self.post(("stop",))
        self._signal(signal.SIGTERM)

    @override
    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def post(self, content: Any, fds: Sequence[int] = ()) -> None:
        """Sends a message now or, if the socket has no room, while the backend waits."""
        if self._owner != os.getpid():
            # This is a copy of the worker in a forked process, which does not own it.
            return
        with contextlib.suppress(Closed):
            self.connection.post(content, fds)
            if self.connection.full and (watch := self._watch_room()) is not None:
                watch(self)

    def flush(self) -> bool:
        """Sends messages for which there was no room before; returns True if none are left."""
        try:
            return self.connection.flush()
        except Closed:
            return True

    def close(self) -> int | None:
        """Releases the resources of a process that has ended; returns its exit status."""
        self._removed = True
        self._shared.clear()
        self.connection.close()
        if self.handle is not None:
            os.close(self.handle)
        return self._source.reap(self.pid)

    def _signal(self, signum: int) -> None:
        # Once the worker is removed, its pid and descriptor may have been reused.
        if self._removed or self._owner != os.getpid():
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


def explain(status: int | None) -> str:
    """Describes the exit status of a process, as the end of a sentence."""
    if status is None:
        return "ended together with the process that started it"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


_PAGE = mmap.PAGESIZE
_FEWEST_SLOTS = 4
_MOST_BYTES = 256 << 20  # limit for a file that has more than one slot


class BlockAllocator:
    """Allocates blocks of shared memory. Blocks of the same size share files.

    Examples:
        >>> blocks = BlockAllocator()
        >>> one, other = blocks.allocate(100), blocks.allocate(100)
        >>> one.file is other.file
        True
    """

    def __init__(self) -> None:
        self._files: dict[int, list[BlockFile]] = {}

    def allocate(self, nbytes: int) -> SharedBlock:
        """Returns a block of zeros, whose size is ``nbytes`` rounded up to whole pages.

        Raises:
            MemoryError: if the system has no memory for it. Linux since 5.14 can't tell yet; then
                :func:`trawl.backends.memory.populate` raises the error.
        """
        size = -(-max(nbytes, 1) // _PAGE) * _PAGE
        files = self._files.setdefault(size, [])
        # Iterates over a copy, because blocks that are freed meanwhile may change the list.
        for file in reversed(files.copy()):
            if (block := file.allocate_slot()) is not None:
                return block
        slots = max(_FEWEST_SLOTS, sum(file.slots for file in files))
        files.append(BlockFile(size, max(1, min(slots, _MOST_BYTES // size)), files))
        return self.allocate(nbytes)


class BlockFile:
    """A piece of anonymous memory that is divided into slots of one size.

    Args:
        size: size of a slot in bytes, a multiple of the page size.
        slots: number of slots.
        siblings: the files of this size, the newest last. When an older file is no longer in use,
            it is removed from this list and thereby freed.

    Attributes:
        number: number that identifies the file within this process.
        memory: the shared memory that contains the slots.
    """

    _numbers = itertools.count()

    def __init__(self, size: int, slots: int, siblings: list[BlockFile]) -> None:
        self.number = next(self._numbers)
        self.slots = slots
        self.memory = SharedMemory.new(size * slots)
        self._size = size
        self._siblings = siblings
        self._free = deque(range(slots))

    def allocate_slot(self) -> SharedBlock | None:
        """Returns a free slot as a block, or None if all are in use.

        Raises:
            MemoryError: if the system has no memory for the block.
        """
        try:
            slot = self._free.popleft()
        except IndexError:
            return None
        offset = slot * self._size
        try:
            reserve(self.memory.fd, offset, self._size)
        except MemoryError:
            self._free.append(slot)
            raise
        array = np.frombuffer(self.memory.buffer, np.uint8, self._size, offset)
        # Every view of the block keeps this array alive.
        weakref.finalize(array, self._release, slot).atexit = False
        return SharedBlock(self, offset, array)

    def _release(self, slot: int) -> None:
        # May run in any thread at any time, so each of these operations is atomic.
        _clear(self.memory.buffer, slot * self._size, self._size)
        self._free.append(slot)
        files = self._siblings
        if len(self._free) == self.slots and files[-1] is not self:
            with contextlib.suppress(ValueError):  # another thread removed it
                files.remove(self)


class SharedBlock:
    """A block of shared memory.

    Attributes:
        file: the file that contains the block.
        offset: offset of the block in the file, in bytes.
        buffer: the memory of the block. When nothing refers to this array any more, the slot is
            free again.
    """

    def __init__(self, file: BlockFile, offset: int, buffer: NDArray[np.uint8]) -> None:
        self.file = file
        self.offset = offset
        self.buffer = buffer


def _clear(memory: Any, offset: int, size: int) -> None:
    """Gives the pages back to the system. Afterwards, they read as zeros."""
    try:
        memory.madvise(mmap.MADV_REMOVE, offset, size)
    except (AttributeError, OSError):
        # There is no MADV_REMOVE, or the file system can't punch holes into files.
        np.frombuffer(memory, np.uint8, size, offset)[:] = 0
