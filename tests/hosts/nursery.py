"""Programs that start at once: they are forked from a process that has imported all they need.

That process is run by :func:`serve`. To start a program it is sent its code and descriptors: of
its output, input and errors, and of the namespaces that it is to be in. It tells of its end.
"""

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback

_PR_SET_PDEATHSIG = 1
_STREAMS = 3
_MOST = 1 << 16


class Nursery:
    """The process that programs are forked from, as the tests see it.

    Args:
        modules: what they need beside what all need.
        environment: what they have in their environment.
    """

    def __init__(self, *modules, **environment):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ended = {}
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import nursery; nursery.serve({theirs.fileno()}, {modules})",
                ],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
            )

    def start(self, code, namespaces, environment):
        """Starts a program in namespaces, which are given by paths."""
        return Program(self, code, namespaces, environment)

    def fork(self, code, environment, fds):
        """A process that runs code; its id."""
        request = json.dumps([code, environment]).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self._socket.sendmsg([request], rights)
        self._hear_until(lambda: "begun" in self._ended)
        return self._ended.pop("begun")

    def status(self, pid, timeout):
        """What a process ended with; None if it takes longer."""
        self._hear_until(lambda: pid in self._ended, timeout)
        return self._ended.pop(pid, None)

    def _hear_until(self, reached, timeout=None):
        self._socket.settimeout(timeout)
        with contextlib.suppress(TimeoutError):
            while not reached():
                said = self._socket.recv(_MOST)
                assert said, "the process that programs are forked from is gone"
                key, value = json.loads(said)
                self._ended[key] = value

    def close(self):
        """Ends it, and all programs."""
        self._socket.close()
        self._process.wait()


class Program:
    """A program that talks with the test by its output and input, line by line."""

    def __init__(self, nursery, code, namespaces, environment):
        self._nursery = nursery
        # A file takes as much as there is: nobody reads it before the end.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        theirs, ours = os.pipe()
        our_output, their_output = os.pipe()
        self._input, self._output = os.fdopen(ours, "w"), os.fdopen(our_output)
        fds = [theirs, their_output, os.dup(self._errors.fileno())]
        fds += [os.open(path, os.O_RDONLY) for path in namespaces]
        try:
            self.pid = nursery.fork(code, environment, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def hears(self):
        """What it says next."""
        line = self._output.readline()
        assert line, f"it has ended:\n{self._said()}"
        return line.rstrip("\n")

    def say(self, line):
        """Says something to it."""
        print(line, file=self._input, flush=True)

    def end(self, timeout):
        """Its status, once it has ended; it has so many seconds."""
        status = self._nursery.status(self.pid, timeout)
        assert status is not None, f"it does not end:\n{self._said()}"
        assert status == 0, self._said()
        return status

    def close(self):
        """Lets go of it."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        self._output.close()
        self._errors.close()

    def _said(self):
        self._errors.seek(0)
        return self._errors.read()


# --- what runs there


def serve(fd, modules):
    """Forks programs, until nobody is there to ask for any."""
    for module in ("hosts_parts", *modules):
        importlib.import_module(module)
    # What is there from the beginning is no garbage at the end: to look for it takes a second.
    gc.freeze()
    with socket.socket(fileno=fd) as asked:
        living = {}
        while True:
            for ready in select.select([asked, *living], [], [])[0]:
                if ready is not asked:
                    pid = living.pop(ready)
                    os.close(ready)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    asked.send(json.dumps([pid, status]).encode())
                    continue
                request, fds, _, _ = socket.recv_fds(asked, _MOST, 16)
                if not request:
                    return
                pid = os.fork()
                if pid == 0:
                    asked.close()
                    _become(*json.loads(request), fds)
                    return
                for one in fds:
                    os.close(one)
                living[os.pidfd_open(pid)] = pid
                asked.send(json.dumps(["begun", pid]).encode())


def _become(code, environment, fds):
    """Makes this process a program."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    here = os.getcwd()
    for namespace in fds[_STREAMS:]:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "no such namespace")
    os.chdir(here)
    for number, fd in enumerate(fds[:_STREAMS]):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    os.environ.update(environment)
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
