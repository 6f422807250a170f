"""``trawl collect`` on a terminal: its panel, Ctrl-C, and terminals that can do less."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import termios
import time

import pytest
from cli_parts import PATIENCE, start

from trawl.data import info

ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
PLAIN = {"LANG": "C.UTF-8", "LC_ALL": "", "LC_CTYPE": "", "NO_COLOR": "", "COLUMNS": ""}
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


class Terminal:
    """Runs ``trawl collect`` on a terminal of its own, and keeps what it writes there."""

    def __init__(self, *arguments, size=(100, 30), **variables):
        self.written = ""
        # A character may arrive in two parts.
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._ours, self._theirs = pty.openpty()
        self.resize(*size)
        self.modes = termios.tcgetattr(self._theirs)
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self._theirs)
        variables = {"TERM": "xterm-256color", **PLAIN, **variables}
        arguments = ["collect", *arguments, "--out", "d"]
        self._process = start(*arguments, cwd=".", env=variables, session=True, **streams)

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

    @property
    def cursor_is_visible(self):
        return self.written.rfind(SHOW) > self.written.rindex(HIDE)

    def until(self, words):
        """Reads until the words are there; only what is written from now on counts."""
        begin = len(self.written)
        self.wait_for(lambda: words in ESCAPES.sub("", self.written[begin:]))

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


@pytest.fixture
def gate(tmp_path):
    """The pipe that the environment waits at; the function opens it for all who wait."""
    path = tmp_path / "gate"
    os.mkfifo(path)

    def open_gate():
        with open(path, "w"):
            # Those who come later find no pipe that they would have to wait at.
            path.rename(tmp_path / "open")
            path.touch()

    return open_gate


# The environment waits in its second batch.
GATED = ["cli_envs:Gated", "--frames", 300, "--frames-per-batch", 100]


def width_of_last_panel(terminal):
    """The width of the first line of the last panel that is complete."""
    line = terminal.text.rpartition("limits the rate")[0].rpartition("cli_envs:Gated  ")[2]
    return len("cli_envs:Gated  ") + len(line.splitlines()[0]) if line else 0


def test_the_panel_is_there_while_a_batch_takes_its_time(gate):
    with Terminal(*GATED) as terminal:
        terminal.until("100/300 frames")
        terminal.until("33%")
        assert not terminal.cursor_is_visible
        # A thread of its own draws it, again and again, in the size of the terminal.
        terminal.until("frames/s")
        terminal.resize(60, 30)
        # Panels of the old width may still be on their way.
        terminal.wait_for(lambda: width_of_last_panel(terminal) == 60)
        gate()
        assert terminal.finish() == 0
    assert terminal.cursor_is_visible
    last = terminal.text[terminal.text.rindex("300/300 frames") - 300 :]
    for words in ("cli_envs:Gated  ━", "100%", " frames/s", "30 episodes", "return 10.0", "█ env",
                  "collector", "limits the rate", "environment  cli_envs:Gated"):  # fmt: skip
        assert words in last, words
    assert re.search(r"\n +limit  \w.* limits the rate.*\n", last)


def test_workers_have_rows_without_color():
    with Terminal("Pendulum-v1", "--frames", 2000, "--workers", 2, size=(60, 30),
                  NO_COLOR="1") as terminal:  # fmt: skip
        assert terminal.finish() == 0
    for label in ("worker 0", "worker 1", "all"):
        assert re.search(rf"\n{label} +[█▓▒░·]+ +[\d,]+ +\d+%", terminal.text), label
    assert re.search(r"driver thread: .*% writing", terminal.text)
    panel = terminal.text[: terminal.text.index("environment  ")]
    assert max(map(len, re.split(r"[\r\n]+", panel))) <= 60
    assert set(re.findall(r"\x1b\[([\d;]*)m", terminal.written)) <= {"0", "1", "2"}
    assert "█ env" in terminal.text


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_the_terminal_as_it_was(times, gate):
    with Terminal(*GATED) as terminal:
        terminal.until("100/300 frames")
        terminal.send(b"\x03")
        terminal.until("finishing this batch; press Ctrl-C again to stop at once")
        terminal.send(b"\x03") if times == 2 else gate()
        assert terminal.finish() == 130
    assert terminal.cursor_is_visible
    assert f"kept the {200 if times == 1 else 100} frames" in terminal.text
    # The bar stays where it was, and nothing was printed into it.
    assert times == 2 or "66%" in terminal.text
    assert "Traceback" not in terminal.text
    assert info("d")["stopped_by"] == "SIGINT"


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TTY_INTERACTIVE": "0"}])
def test_a_terminal_without_a_cursor_gets_lines(variables):
    with Terminal("Pendulum-v1", "--frames", 300, **variables) as terminal:
        assert terminal.finish() == 0
    assert HIDE not in terminal.written
    assert ("TERM" in variables) <= ("\x1b" not in terminal.written)
    assert terminal.text.startswith("Pendulum-v1  300/300 frames  ")
