"""Programs that run beside a test, and start at once."""

import contextlib
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

from nursery import shared


class Forked:
    """A program of :func:`nursery.run`, with the methods of ``subprocess.Popen`` that tests use.

    Args:
        code: the program, which may be indented.
        *arguments: what it finds in ``sys.argv``.
        stdin: a descriptor, ``subprocess.PIPE``, or None for an empty input.
        stdout: a descriptor, ``subprocess.PIPE``, or None, which drops the output.
        stderr: the same for errors. Pipes take and give text.
        within: the nursery that it comes from; None for the one that most share.
        namespaces: paths of the namespaces that it is to be in.
        **options: of :meth:`nursery.Nursery.fork`.

    Attributes:
        pid: the id of its process.
        returncode: what it ended with, as far as one of the methods has seen it.
    """

    def __init__(
        self,
        code,
        *arguments,
        stdin=None,
        stdout=None,
        stderr=None,
        within=None,
        namespaces=(),
        **options,
    ):
        self.stdin = self.stdout = self.stderr = self.returncode = None
        self._nursery, self._said = within or shared(), {}
        fds = []
        try:
            for name, given in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
                fds.append(self._opened(name, given))
            fds += [os.open(path, os.O_RDONLY) for path in namespaces]
            self.pid = self._nursery.fork(code, fds, arguments=arguments, **options)
        finally:
            for fd in fds:
                os.close(fd)

    def _opened(self, name, given):
        """A descriptor for the program; of a pipe, the other end is kept."""
        if given is None:
            return os.open(os.devnull, os.O_RDWR)
        if given != subprocess.PIPE:
            return os.dup(given)
        reading, writing = os.pipe()
        if name == "stdin":
            self.stdin = os.fdopen(writing, "w")
            return reading
        setattr(self, name, os.fdopen(reading))
        return writing

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def close(self):
        """Closes its pipes, and waits for its end."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def poll(self):
        """What it ended with; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.status(self.pid, 0)
        return self.returncode

    def wait(self, timeout=None):
        """Waits for its end, for so many seconds."""
        if self.returncode is None:
            self.returncode = self._nursery.status(self.pid, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return self.returncode

    def say(self, line):
        """Says something to it."""
        print(line, file=self.stdin, flush=True)

    def hears(self):
        """What it says next."""
        line = self.stdout.readline()
        assert line, f"it has ended:\n{self.stderr.read()}"
        return line.rstrip("\n")

    def end(self, timeout):
        """Its status, which is 0, once it has ended; it has so many seconds."""
        assert self.wait(timeout) == 0, self.stderr.read()
        return 0

    def send_signal(self, signum):
        """Sends it a signal if it still runs."""
        if self.poll() is None:
            # It may end now, which the nursery sees before it says so.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self):
        """Kills it if it still runs."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, input=None, timeout=None):
        """Sends what is given, and reads all that it says to its end; None for what has no pipe."""
        if self.stdin is not None and not self.stdin.closed:
            with self.stdin as stream:
                stream.write(input or "")
        with ThreadPoolExecutor() as pool:
            reads = {
                name: pool.submit(stream.read)
                for name in ("stdout", "stderr")
                if (stream := getattr(self, name)) is not None and not stream.closed
            }
            try:
                self._said |= {name: read.result(timeout) for name, read in reads.items()}
                self.wait(timeout)
            finally:
                # What still reads ends with the program.
                self.kill()
        for name in reads:
            getattr(self, name).close()
        return self._said.get("stdout"), self._said.get("stderr")
