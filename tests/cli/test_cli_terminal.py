"""``trawl collect`` on a terminal: its panel, Ctrl-C, and terminals that can do less."""

import os
import re

import pytest
from terminal_parts import HIDE, SHOW, Terminal

from trawl.data import info


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


def collecting(tmp_path, *arguments, **options):
    """A collection whose environment waits in its second batch."""
    return Terminal("collect", "cli_envs:Gated", "--frames", 300, "--frames-per-batch", 100,
                    "--out", "d", *arguments, cwd=tmp_path, **options)  # fmt: skip


def cursor_is_visible(terminal):
    return terminal.written.rfind(SHOW) > terminal.written.rindex(HIDE)


def width_of_last_panel(terminal):
    """The width of the first line of the last panel that is complete."""
    line = terminal.text.rpartition("limits the rate")[0].rpartition("cli_envs:Gated  ")[2]
    return len("cli_envs:Gated  ") + len(line.splitlines()[0]) if line else 0


def test_the_panel_is_there_while_a_batch_takes_its_time(tmp_path, gate):
    with collecting(tmp_path) as terminal:
        terminal.until("100/300 frames")
        terminal.until("33%")
        assert not cursor_is_visible(terminal)
        # A thread of its own draws it, again and again.
        for _ in range(3):
            terminal.until("frames/s")
        gate()
        assert terminal.finish() == 0
    assert cursor_is_visible(terminal)
    last = terminal.text[terminal.text.rindex("300/300 frames") - 300 :]
    for words in ("cli_envs:Gated  ━", "100%", " frames/s", "30 episodes", "return 10.0", "█ env",
                  "collector", "limits the rate", "environment  cli_envs:Gated"):  # fmt: skip
        assert words in last, words
    assert re.search(r"\n +limit  \w.* limits the rate.*\n", last)


def test_workers_have_rows(tmp_path):
    with Terminal("collect", "Pendulum-v1", "--frames", 2000, "--workers", 2, "--out", "d",
                  cwd=tmp_path, size=(60, 30)) as terminal:  # fmt: skip
        assert terminal.finish() == 0
    for label in ("worker 0", "worker 1", "all"):
        assert re.search(rf"\n{label} +[█▓▒░·]+ +[\d,]+ +\d+%", terminal.text), label
    assert "driver thread: " in terminal.text
    panel = terminal.text[: terminal.text.index("environment  ")]
    assert max(map(len, re.split(r"[\r\n]+", panel))) <= 60


def test_it_follows_the_size_of_the_terminal(tmp_path, gate):
    with collecting(tmp_path, size=(100, 30)) as terminal:
        terminal.until("33%")
        terminal.resize(60, 30)
        # Panels of the old width may still be on their way.
        terminal.wait_for(lambda: width_of_last_panel(terminal) == 60)
        gate()
        assert terminal.finish() == 0


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path, gate):
    with collecting(tmp_path) as terminal:
        terminal.until("100/300 frames")
        terminal.send(b"\x03")
        terminal.until("finishing this batch; press Ctrl-C again to stop at once")
        gate()
        assert terminal.finish() == 130
    assert cursor_is_visible(terminal)
    assert "kept the 200 frames" in terminal.text
    # The bar stays where it was, and nothing was printed into it.
    assert "66%" in terminal.text
    assert "Traceback" not in terminal.text


def test_a_second_ctrl_c_leaves_the_terminal_as_it_was(tmp_path, gate):
    with collecting(tmp_path) as terminal:
        terminal.until("100/300 frames")
        terminal.send(b"\x03")
        terminal.until("finishing this batch")
        terminal.send(b"\x03")
        assert terminal.finish() == 130
    assert cursor_is_visible(terminal)
    assert "kept the 100 frames" in terminal.text
    assert "Traceback" not in terminal.text
    assert info(tmp_path / "d")["stopped_by"] == "SIGINT"


@pytest.mark.parametrize("variables", [{"LANG": "C"}, {"LC_ALL": "C"}])
def test_without_utf_8_the_panel_is_ascii(tmp_path, variables):
    with Terminal("collect", "Pendulum-v1", "--frames", 300, "--out", "d", cwd=tmp_path,
                  fresh=True, **variables) as terminal:  # fmt: skip
        assert terminal.finish() == 0
    panel = terminal.text[: terminal.text.index("environment  ")]
    assert panel.isascii()
    assert re.search(r"Pendulum-v1  \[#+\]  100%", panel)


@pytest.mark.parametrize("variables", [{"TERM": "dumb"}, {"TTY_INTERACTIVE": "0"}])
def test_a_terminal_without_a_cursor_gets_lines(tmp_path, variables):
    with Terminal("collect", "Pendulum-v1", "--frames", 300, "--out", "d", cwd=tmp_path,
                  **variables) as terminal:  # fmt: skip
        assert terminal.finish() == 0
    assert HIDE not in terminal.written
    assert ("TERM" in variables) <= ("\x1b" not in terminal.written)
    assert terminal.text.startswith("300/300 frames  ")


def test_without_color_the_panel_has_none(tmp_path):
    with Terminal("collect", "Pendulum-v1", "--frames", 300, "--out", "d", cwd=tmp_path,
                  NO_COLOR="1") as terminal:  # fmt: skip
        assert terminal.finish() == 0
    assert set(re.findall(r"\x1b\[([\d;]*)m", terminal.written)) <= {"0", "1", "2"}
    assert "█ env" in terminal.text
