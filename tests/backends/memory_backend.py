"""A launcher and a carrier for tests: workers are threads, and messages stay in this process."""

import contextlib
import itertools
import threading
from functools import partial
from queue import SimpleQueue

from trawl.backends.carrier import Carrier, Inlet, Outlet
from trawl.backends.frames import Frame
from trawl.backends.launching.launch import Launcher, Process
from trawl.backends.processes.loop import ThreadBreaker
from trawl.backends.remote_rank import run_rank_at


class KillableBreaker(ThreadBreaker):
    """Breaks off a thread that stands in for a process: once killed, it sends no messages."""

    killed = False

    def kill(self):
        self.killed = True
        self.stop()


class ThreadLauncher(Launcher):
    """Starts workers as threads."""

    def start(self, index, address, ended):
        return _ThreadProcess(address, ended)


_own = threading.local()


class _ThreadProcess(Process):
    reports_end = True

    def __init__(self, address, ended):
        self._began = threading.Event()
        self._ended = ended
        threading.Thread(target=self._run, args=(address,), daemon=True).start()

    def _run(self, address):
        _own.breaker = self._breaker = KillableBreaker()
        self._began.set()
        reason = "failed before it could tell"
        try:
            with contextlib.suppress(OSError, RuntimeError):
                reason = f"exited with status {run_rank_at(address, self._breaker)}"
        finally:
            self._tell(reason)

    def _tell(self, reason):
        ended, self._ended = self._ended, None
        if ended is not None:
            ended(reason)

    def kill(self):
        self._began.wait()
        self._breaker.kill()
        # Its thread may wait for something until the driver closes its connections.
        self._tell("was killed")


_queues = {}
_numbers = itertools.count()


class MemoryCarrier(Carrier):
    """Carries messages by a queue."""

    def open(self, address, store):
        self._of = {}

    def invite(self, index, address):
        number = self._of[address.prefix] = next(_numbers)
        _queues[number] = SimpleQueue()
        return partial(_MemoryOutlet, number)

    def admit(self, address):
        return _MemoryInlet(self._of.pop(address.prefix))


class _MemoryOutlet(Outlet):
    def __init__(self, number, address):
        self._queue = _queues[number]

    def send(self, frame):
        if _own.breaker.killed:
            raise RuntimeError("this worker was killed")
        buffers = [bytearray(view) for view in frame.buffers]
        self._queue.put(Frame(frame.verb, frame.body, buffers))

    def close(self):
        self._queue.put(None)


class _MemoryInlet(Inlet):
    def __init__(self, number):
        self._number, self._queue = number, _queues[number]

    def receive(self):
        frame = self._queue.get()
        if frame is None:
            raise RuntimeError("the worker is gone")
        return frame

    def abandon(self):
        self._queue.put(None)

    def close(self):
        _queues.pop(self._number, None)
