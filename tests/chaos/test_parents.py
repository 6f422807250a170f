"""Programs that end in every possible way, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_parts import PATIENCE, family, watched
from forked import Forked
from open_files import check_no_named_memory

LONG = pytest.mark.long
MODES = pytest.mark.parametrize("mode", [pytest.param("sync", marks=LONG), "async"])

PROLOGUE = """
import gc, os, signal, sys, threading
from pathlib import Path
from chaos_parts import *
from trawl.collectors import MultiCollector

sync = {sync}
crew = Crew(Path("."), workers=3)

def say(word):
    # A handler of signals says something, too, and print can't be called within print.
    os.write(1, word.encode() + os.linesep.encode())

def listen():
    # Returns only at a signal.
    signal.pause()

def collect(**options):
    return collector_of(crew, sync, total_frames=-1, **options)
"""


class Script(Forked):
    """Program in a session of its own, which ends as one of a fresh interpreter does."""

    def hear(self, word: str) -> None:
        """Waits until the script prints a word."""
        line = self.stdout.readline().strip()
        assert line == word, f"it said {line!r}, and on stderr {self.stderr.read()}"

    def signal(self, signum: int) -> None:
        """Sends a signal to the script's process group, as a terminal does."""
        os.killpg(self.pid, signum)

    def end(self) -> tuple[int, str]:
        """Waits until the script and all that it started are gone; returns its status and stderr.

        A process that is left would hold stdout and stderr open, so reading them would not end.
        """
        said, errors = self.stdout.read(), self.stderr.read()
        assert said == "", f"it said {said!r}, and on stderr {errors}"
        return self.wait(PATIENCE), errors


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Yields a function that starts a script."""
    with contextlib.ExitStack() as scripts:

        def start(text: str, mode: str = "sync") -> Script:
            prologue = PROLOGUE.format(sync=mode == "sync")
            options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            options |= {"cwd": tmp_path, "env": {"TMPDIR": str(tmp_path)}}
            script = Script(prologue + text, session=True, finalize=True, **options)
            scripts.enter_context(script)
            scripts.callback(script.kill)
            return script

        yield start


def check_folder(folder: Path) -> None:
    """Checks that a folder, also used for temporary files, has only files that tests write."""
    assert all(path.name.startswith(("worker", "once")) for path in folder.iterdir())


def only_interrupted(errors: str) -> bool:
    """Returns True if stderr has one traceback, of KeyboardInterrupt, and nothing else."""
    lines = errors.strip().splitlines()
    return (
        lines[0] == "Traceback (most recent call last):"
        and lines[-1] == "KeyboardInterrupt"
        # In place of code that it can't show, Python prints an empty line.
        and all(line.startswith("  ") or not line for line in lines[1:-1])
    )


# --- killed

LOOP = """
with collect() as collector:
    for number, batch in enumerate(collector):
        crew.add(batch)
        if number == 3:
            say("going")
"""

TRAINS = """
with collect() as collector:
    for number, batch in enumerate(collector):
        if number == 3:
            say("training")
            while True:
                sum(range(1000))
"""


@pytest.mark.parametrize(
    ("mode", "text", "signum"),
    [
        ("sync", LOOP, signal.SIGKILL),
        ("async", LOOP, signal.SIGTERM),
        ("sync", TRAINS, signal.SIGTERM),
        ("async", TRAINS, signal.SIGKILL),
    ],
    ids=["sync-waits-kill", "async-waits-term", "sync-trains-term", "async-trains-kill"],
)
def test_the_parent_is_killed(run: Any, mode: str, text: str, signum: int, tmp_path: Path) -> None:
    script = run(text, mode)
    script.hear("going" if text == LOOP else "training")
    started = family(script.pid)
    # Three workers, and the server process that starts them.
    assert len(started) == 4
    check_no_named_memory([script.pid, *started])
    with watched(*started) as wait:
        os.kill(script.pid, signum)
        wait()
    assert script.end() == (-signum, "")
    check_folder(tmp_path)


@pytest.mark.parametrize(("mode", "what"), [("sync", "block"), ("async", "stay_busy")])
def test_the_parent_is_killed_while_workers_are_deaf(run: Any, mode: str, what: str) -> None:
    script = run(
        """
def deafen():
    say("deaf")
    WHAT()

crew = Crew(Path("."), workers=1, troubles={0: Trouble("step", 13, deafen)})
with collect() as collector:
    for batch in collector:
        pass
""".replace("WHAT", what),
        mode,
    )
    script.hear("deaf")
    started = family(script.pid)
    assert len(started) == 2
    with watched(*started) as wait:
        os.kill(script.pid, signal.SIGKILL)
        wait()
    assert script.end() == (-signal.SIGKILL, "")


def test_the_parent_is_killed_while_workers_are_made(run: Any) -> None:
    script = run("""
def linger():
    say("made")
    block()

crew = Crew(Path("."), workers=1, troubles={0: Trouble("make", 0, linger)})
collect()
""")
    script.hear("made")
    with watched(*family(script.pid)) as wait:
        os.kill(script.pid, signal.SIGKILL)
        wait()
    assert script.end() == (-signal.SIGKILL, "")


@pytest.mark.parametrize(("mode", "victim"), [("sync", "parent"), ("async", "worker")])
def test_what_environments_started_goes_too(run: Any, mode: str, victim: str) -> None:
    script = run(
        """
import subprocess

def start():
    subprocess.Popen(["sleep", "1000"], start_new_session=True)

crew = Crew(Path("."), workers=1, troubles={0: Trouble("make", 0, start)})
with collect() as collector:
    collector.next()
    say("going")
    for batch in collector:
        pass
""",
        mode,
    )
    script.hear("going")
    started = family(script.pid)
    assert len(started) == 3
    worker, sleeper = started[1:]
    with watched(sleeper) as wait:
        os.kill(worker if victim == "worker" else script.pid, signal.SIGKILL)
        wait()
    script.kill()
    script.end()


def test_all_of_it_is_killed(run: Any) -> None:
    script = run(LOOP)
    script.hear("going")
    script.signal(signal.SIGKILL)
    assert script.end() == (-signal.SIGKILL, "")


# --- interrupted


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        pytest.param("sync", LOOP, id="sync-waits"),
        pytest.param("async", LOOP, id="async-waits", marks=LONG),
        pytest.param("sync", TRAINS, id="sync-trains", marks=LONG),
        pytest.param("async", TRAINS, id="async-trains"),
    ],
)
def test_interrupted(run: Any, mode: str, text: str, tmp_path: Path) -> None:
    script = run(text, mode)
    script.hear("going" if text == LOOP else "training")
    script.signal(signal.SIGINT)
    status, errors = script.end()
    assert status == -signal.SIGINT
    assert only_interrupted(errors), errors
    check_folder(tmp_path)


def test_interrupted_without_a_with_block(run: Any) -> None:
    script = run(
        TRAINS.replace("with collect() as collector:", "collector = collect()\nif 1:"), "async"
    )
    script.hear("training")
    script.signal(signal.SIGINT)
    status, errors = script.end()
    assert status == -signal.SIGINT
    assert only_interrupted(errors), errors


@MODES
def test_interrupted_and_then_gone_on(run: Any, mode: str) -> None:
    # As in a notebook, the program goes on, and makes another collector.
    script = run(
        """
try:
    with collect() as collector:
        for number, batch in enumerate(collector):
            if number == 3:
                say("going")
except KeyboardInterrupt:
    say("interrupted")
crew = Crew(Path("."), workers=3, lives=3)
with collect() as collector:
    crew.add(collector.next())
say("done")
""",
        mode,
    )
    script.hear("going")
    script.signal(signal.SIGINT)
    script.hear("interrupted")
    script.hear("done")
    assert script.end() == (0, "")


def test_interrupted_while_workers_are_made(run: Any) -> None:
    script = run("""
def linger():
    say("made")
    block()

crew = Crew(Path("."), workers=1, troubles={0: Trouble("make", 0, linger)})
collect()
""")
    script.hear("made")
    script.signal(signal.SIGINT)
    status, errors = script.end()
    assert status == -signal.SIGINT
    assert only_interrupted(errors), errors


@MODES
def test_interrupted_twice(run: Any, mode: str) -> None:
    # The worker does not close. The first Ctrl-C waits for it, and the second does not. The worker
    # becomes deaf before it has sent anything, because an interrupt during the arrival of a message
    # kills the worker at once.
    script = run(
        """
from trawl.collectors.workers import pool
pool._CLOSING = 1e6

def deafen():
    signal.signal(signal.SIGTERM, lambda *_: say("told"))
    signal.signal = lambda *_: None
    say("deaf")
    while True:
        try:
            listen()
        except BaseException:
            pass

crew = Crew(Path("."), workers=1, troubles={0: Trouble("step", 0, deafen)})
with collect() as collector:
    for batch in collector:
        pass
""",
        mode,
    )
    script.hear("deaf")
    script.signal(signal.SIGINT)
    script.hear("told")
    script.signal(signal.SIGINT)
    status, errors = script.end()
    assert status == -signal.SIGINT
    assert errors.strip().endswith("KeyboardInterrupt")
    assert "Error" not in errors


# --- forgotten


@pytest.mark.parametrize(
    ("mode", "held"), [("sync", ""), ("async", "collector.myself = collector")]
)
def test_never_shut_down(run: Any, mode: str, held: str) -> None:
    script = run(f"collector = collect()\ncollector.next()\n{held}\nsay('bye')", mode)
    script.hear("bye")
    assert script.end() == (0, "")


def test_an_exception_in_the_users_loop(run: Any) -> None:
    script = run("for batch in collect():\n    raise ValueError('the learner')", "sync")
    status, errors = script.end()
    assert status == 1
    assert errors.count("Traceback") == 1
    assert errors.endswith("ValueError: the learner\n")


@pytest.mark.parametrize(
    ("mode", "how"),
    [pytest.param("sync", "plain", marks=LONG), ("async", "cycle"), ("sync", "iterator")],
)
def test_let_go_of(run: Any, mode: str, how: str) -> None:
    script = run(
        """
collector = collect()
batch = collector.next()
for number in range(2):
    next(iter(collector))
how = "HOW"
if how == "cycle":
    cycle = [collector]
    cycle.append(cycle)
    del cycle
if how == "iterator":
    iterator = iter(collector)
    next(iterator)
    del iterator
say("going")
sys.stdin = None
with watched(*crew.pids()) as wait:
    del collector
    gc.collect()
    wait()
say("gone")
crew.add(batch)
""".replace("HOW", how),
        mode,
    )
    script.hear("going")
    script.hear("gone")
    assert script.end() == (0, "")


def test_let_go_of_needs_no_collection_of_garbage(run: Any) -> None:
    script = run(
        """
gc.disable()
collector = collect()
collector.next()
with watched(*crew.pids()) as wait:
    del collector
    wait()
say("gone")
""",
        "async",
    )
    script.hear("gone")
    assert script.end() == (0, "")


def test_never_shut_down_while_it_collects_in_the_background(run: Any) -> None:
    script = run(
        """
buffer = Buffer(crew)
collector = collect(replay_buffer=buffer)
collector.start()
buffer.wait_for(100)
say("bye")
""",
        "sync",
    )
    script.hear("bye")
    assert script.end() == (0, "")


@MODES
def test_interrupted_while_it_collects_in_the_background(run: Any, mode: str) -> None:
    script = run(
        """
buffer = Buffer(crew)
with collect(replay_buffer=buffer) as collector:
    collector.start()
    buffer.wait_for(100)
    say("going")
    listen()
""",
        mode,
    )
    script.hear("going")
    script.signal(signal.SIGINT)
    status, errors = script.end()
    assert status == -signal.SIGINT
    assert only_interrupted(errors), errors
