"""A command that runs on a terminal, as a user sees it."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

from cli_parts import ENVIRONMENT, PATIENCE, TRAWL, start

ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
PLAIN = {"LANG": "C.UTF-8", "LC_ALL": "", "LC_CTYPE": "", "NO_COLOR": "", "COLUMNS": ""}
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """Runs ``trawl`` on a terminal of its own, and keeps what it writes there.

    Args:
        *arguments: those of the command.
        cwd: its folder.
        size: width and height of the terminal.
        fresh: True to start a fresh interpreter, which takes the encoding from its environment.
        **variables: what it has in its environment.

    Attributes:
        written: all that the command wrote so far, with escape codes.
    """

    def __init__(self, *arguments, cwd, size=(100, 30), fresh=False, **variables):
        self.written = ""
        # A character may arrive in two parts.
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._ours, self._theirs = pty.openpty()
        self.resize(*size)
        self.modes = termios.tcgetattr(self._theirs)
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self._theirs)
        variables = {"TERM": "xterm-256color", **PLAIN, **variables}
        if not fresh:
            self._process = start(*arguments, cwd=cwd, env=variables, session=True, **streams)
            return
        self._process = subprocess.Popen(
            [*TRAWL, *map(str, arguments)],
            cwd=cwd,
            env=ENVIRONMENT | variables,
            start_new_session=True,
            # So that Ctrl-C on the terminal reaches the command.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            **streams,
        )

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._process.kill()
        self._process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def resize(self, width, height):
        """Changes the size of the terminal."""
        fcntl.ioctl(self._theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def send(self, keys):
        """Types keys."""
        os.write(self._ours, keys)

    @property
    def text(self):
        """All that was written, without escape codes."""
        return ESCAPES.sub("", self.written)

    def until(self, words):
        """Reads until the words are there; only what is written from now on counts."""
        start = len(self.written)
        self.wait_for(lambda: words in ESCAPES.sub("", self.written[start:]))

    def wait_for(self, condition):
        """Reads until a condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            self._read(deadline)

    def finish(self):
        """Reads until the command has ended; returns its exit code."""
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None:
            self._read(deadline, 0.1)
        while select.select([self._ours], [], [], 0)[0]:
            self._read(deadline)
        assert termios.tcgetattr(self._theirs) == self.modes
        return self._process.returncode

    def _read(self, deadline, wait=PATIENCE):
        assert time.monotonic() < deadline, self.text[-3000:]
        if select.select([self._ours], [], [], wait)[0]:
            self.written += self._decoder.decode(os.read(self._ours, 1 << 16))
