"""Loop of a worker, which is the same wherever the worker runs."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from typing_extensions import override

from trawl.backends.base import Port, Service
from trawl.backends.failure import Failure

_Result = TypeVar("_Result")
#: Returned in place of a message if there is none.
NOTHING = object()
# Shield count so high that calls never bring it down to 0.
_SEALED = 1 << 30


class Stopped(BaseException):
    """Raised in a worker that is told to stop."""


class _TakenBack(BaseException):
    """Raised in a thread, and caught at once, in place of ``Stopped``."""


class WorkerLoop(Port, ABC):
    """Makes a service, passes messages to it, and lets it work, until the worker is told to stop.

    A subclass carries the messages. Only the service's code can be aborted.

    Args:
        breaker: object that aborts the work of the thread in which the loop runs.
    """

    def __init__(self, breaker: Breaker) -> None:
        self._breaker = breaker

    @abstractmethod
    def make_service(self) -> Service:
        """Waits for the first message, and returns the service that it describes."""

    @abstractmethod
    def next_message(self, wait: bool) -> Any:
        """Returns the next message; ``NOTHING`` if there is none, and ``wait`` is False.

        Raises:
            Stopped: if no more messages will come.
        """

    def run(self) -> Failure | None:
        """Runs the worker to its end; returns the exception that ended it, or None."""
        try:
            self._run()
        except Stopped:
            return None
        except BaseException as error:
            return Failure.of(error)
        return None

    def _run(self) -> None:
        call = self._breaker.call
        service = call(self.make_service)
        try:
            while True:
                while (message := self.next_message(wait=not service.busy)) is not NOTHING:
                    call(service.handle, message)
                call(service.work)
        finally:
            try:
                self._breaker.seal()
            finally:
                # `Stopped` may have been raised just before the seal, but is raised only once.
                self._breaker.seal()
                service.close()

    def stoppable(self) -> AbstractContextManager[None]:
        """Returns a context within which the loop may run."""
        return self._breaker.installed()

    @override
    def undisturbed(self) -> AbstractContextManager[None]:
        return self._breaker.shielded()


class Breaker:
    """Aborts the work of this process's main thread with SIGTERM.

    Only code that is passed to :meth:`call` is aborted. ``Stopped`` is raised there, at most once.

    Attributes:
        stopping: True once the thread was told to stop.
        wake: function to call when SIGTERM arrives, which ends the thread's wait for a message.
    """

    def __init__(self) -> None:
        self.stopping = self._raised = False
        self.wake: Callable[[], object] = lambda: None
        self._owner = 0
        # The thread's work can be aborted while this is 0.
        self._shields = 1

    def installed(self) -> AbstractContextManager[None]:
        """Returns a context within which this thread's work can be aborted."""
        return self._handling()

    @contextmanager
    def _handling(self) -> Iterator[None]:
        self._owner = os.getpid()
        try:
            before = signal.signal(signal.SIGTERM, self._signalled)
        except ValueError:
            raise RuntimeError(
                "a rank must run in the main thread of its process, because signals stop its work"
            ) from None
        _ignored.watch(self)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            _ignored.forget(self)

    def _signalled(self, signum: int, frame: Any) -> None:
        self.stopping = True
        # Processes that an environment forked also have this handler, but must not wake the worker.
        if os.getpid() == self._owner:
            self.wake()
        if not self._shields and not self._raised:
            self._raised = True
            raise Stopped

    def repeat(self, kind: type[BaseException]) -> None:
        """Raises again, in this thread, an exception that the interpreter has just ignored."""
        self._raised = False
        # A signal that this thread sends would be handled at once, and be ignored as well.
        _thread.start_new_thread(signal.pthread_kill, (threading.get_ident(), signal.SIGTERM))

    def seal(self) -> None:
        """Prevents the thread's work from being aborted from now on."""
        self._shields = _SEALED

    def stop(self) -> None:
        """Aborts the thread's work at once, or as soon as that is possible."""
        os.kill(os.getpid(), signal.SIGTERM)

    def kill(self) -> None:
        """Ends the worker at once."""
        os.kill(os.getpid(), signal.SIGKILL)

    @property
    def is_current(self) -> bool:
        """True if the caller runs in the thread whose work can be aborted."""
        return threading.current_thread() is threading.main_thread()

    def call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Calls a function that can be aborted.

        Raises:
            Stopped: if the thread was told to stop.
        """
        try:
            self._expose()
            return function(*arguments)
        finally:
            self._shield()

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Context within which the thread's work is not aborted."""
        self._shield()
        try:
            yield
        finally:
            self._expose()

    def _expose(self) -> None:
        self._shields -= 1
        if self.stopping and not self._shields:
            raise Stopped

    def _shield(self) -> None:
        self._shields += 1


class _Ignored:
    """Exceptions of breakers that were raised where the interpreter ignores exceptions.

    These places are finalizers and callbacks, such as JAX's callback for collections of garbage.
    While a breaker may raise exceptions, ``sys.unraisablehook`` has those repeated.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._breakers: tuple[Breaker, ...] = ()
        self._hook = self._report
        self._otherwise: Callable[[sys.UnraisableHookArgs], object] = sys.unraisablehook

    def watch(self, breaker: Breaker) -> None:
        """Has exceptions of a breaker repeated from now on."""
        with self._lock:
            if sys.unraisablehook is not self._hook:
                self._otherwise, sys.unraisablehook = sys.unraisablehook, self._hook
            self._breakers += (breaker,)

    def forget(self, breaker: Breaker) -> None:
        """Ends what :meth:`watch` began."""
        with self._lock:
            self._breakers = tuple(one for one in self._breakers if one is not breaker)
            if not self._breakers and sys.unraisablehook is self._hook:
                sys.unraisablehook = self._otherwise

    def _report(self, ignored: sys.UnraisableHookArgs) -> None:
        kind = ignored.exc_type
        if issubclass(kind, (Stopped, _TakenBack)):
            for breaker in self._breakers:
                if breaker.is_current:
                    breaker.repeat(kind)
                    return
        self._otherwise(ignored)


_ignored = _Ignored()


def _would_stall() -> bool:
    """Returns True if this thread would stand still while another one has an exception to raise.

    So it does in Python 3.11 if a debugger, a profiler or a measurement of coverage follows it, and
    the other one may wait for what this thread does next.
    """
    followed = sys.gettrace() is not None or sys.getprofile() is not None
    return followed and sys.version_info[:2] == (3, 11)


class ThreadBreaker(Breaker):
    """Aborts the work of a thread other than the main one, as soon as it runs Python code.

    Args:
        thread: the thread whose work can be aborted; by default, the current thread.
    """

    def __init__(self, thread: threading.Thread | None = None) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._thread = thread or threading.current_thread()
        self._taken_back = False

    @override
    def installed(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def stop(self) -> None:
        with self._lock:
            self.stopping = True
            if not self._shields and not self._raised and not _would_stall():
                self._raised = True
                _ignored.watch(self)
                self._raise(Stopped)

    @override
    def repeat(self, kind: type[BaseException]) -> None:
        # Raised by this thread, it would be ignored as well.
        _thread.start_new_thread(self._raise_again, (kind,))

    def _raise_again(self, kind: type[BaseException]) -> None:
        with self._lock:
            if not self._taken_back and (kind is _TakenBack or not self._shields):
                self._raise(kind)

    @property
    @override
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    @override
    def _expose(self) -> None:
        with self._lock:
            super()._expose()

    @override
    def seal(self) -> None:
        with self._lock:
            super().seal()
        self._take_back()

    @override
    def _shield(self) -> None:
        shields = self._shields + 1
        while True:
            try:
                with self._lock:
                    self._shields = shields
                self._take_back()
                return
            except Stopped:
                continue

    def _take_back(self) -> None:
        """Prevents a pending ``Stopped`` from being raised in this thread.

        Another exception takes its place, and is raised here. Without that exception, the
        interpreter would check for a pending exception at every function call in any thread until
        the process ends, and Python 3.11 would never leave the first function called under a
        profiler.
        """
        if not self._raised or self._taken_back:
            return
        try:
            self._raise(_TakenBack)
            while True:
                pass
        except _TakenBack:
            self._taken_back = True
            _ignored.forget(self)

    def _raise(self, kind: type[BaseException]) -> None:
        """Raises an exception in the thread, in place of any exception that is still pending."""
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(kind))


def leave(status: int) -> NoReturn:
    """Ends this process at once, after flushing its output."""
    for stream in (sys.stdout, sys.stderr):
        # The stream may be closed, or nobody may read it any more.
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


@dataclass(frozen=True)
class Surroundings:
    """Settings of the driver's process that its workers' processes share.

    Attributes:
        path: the places of modules.
        arguments: the command's arguments.
        environ: the environment variables.
        directory: the current directory; None if it has been removed.
        key: key with which objects of ``multiprocessing`` authenticate themselves.
    """

    path: list[str]
    arguments: list[str]
    environ: dict[str, str]
    directory: str | None
    key: bytes

    @classmethod
    def here(cls) -> Surroundings:
        """Returns those of this process."""
        try:
            directory = os.getcwd()
        except FileNotFoundError:
            directory = None
        key = bytes(multiprocessing.current_process().authkey)
        return cls(list(sys.path), list(sys.argv), dict(os.environ), directory, key)

    def restore(self) -> None:
        """Takes them over in this process."""
        multiprocessing.current_process().authkey = self.key
        sys.path[:], sys.argv[:] = self.path, self.arguments
        os.environ.clear()
        os.environ.update(self.environ)
        if self.directory is not None:
            # The driver's directory may be one that this process has no permission to enter.
            with contextlib.suppress(OSError):
                os.chdir(self.directory)


def interpreter_command(code: str) -> list[str]:
    """Returns the command line that runs ``code`` in an interpreter like this one."""
    from multiprocessing.spawn import get_command_line

    # The options of this interpreter, up to the code that multiprocessing would run.
    options = itertools.takewhile(lambda option: option != "-c", get_command_line()[1:])
    path = f"import sys; sys.path[:] = {sys.path!r}; "
    return [sys.executable, *options, "-c", path + code]


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
