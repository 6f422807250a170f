"""Programs that end in every possible way, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_parts import PATIENCE, family
from forked import Forked
from killing import watched
from open_files import check_no_named_memory

PROLOGUE = """
import gc, os, signal, sys, threading
from pathlib import Path
from chaos_parts import *
from killing import watched
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
            say("going")
            while True:
                sum(range(1000))
"""
#: The only worker does something.
TROUBLED = """
import subprocess
import textwrap

def trouble():
    {}

crew = Crew(Path("."), workers=1, troubles={{0: Trouble({}, trouble)}})
with collect() as collector:
    collector.next()
    say("going")
    for batch in collector:
        pass
"""
BLOCKED = TROUBLED.format('say("going"); block()', '"step", 3')
BUSY = TROUBLED.format('say("going"); stay_busy()', '"step", 3')
MAKING = TROUBLED.format('say("going"); block()', '"make", 0')
STARTING = TROUBLED.format(
    'subprocess.Popen(["sleep", "1000"], start_new_session=True)', '"make", 0'
)
BACKGROUND = """
buffer = Buffer(crew)
collector = collect(replay_buffer=buffer)
collector.start()
buffer.wait_for(100)
say("going")
"""


@pytest.mark.parametrize(
    ("mode", "text", "count", "signum"),
    [
        # The number is that of workers, with the server that starts them and what they start.
        ("sync", LOOP, 4, signal.SIGKILL),
        ("async", TRAINS, 4, signal.SIGTERM),
        ("sync", BLOCKED, 2, signal.SIGKILL),
        ("async", BUSY, 2, signal.SIGKILL),
        ("sync", MAKING, 2, signal.SIGKILL),
        ("async", STARTING, 3, signal.SIGKILL),
    ],
    ids=["waits", "trains", "blocked", "busy", "making", "starting"],
)
def test_the_parent_is_killed(
    run: Any, mode: str, text: str, count: int, signum: int, tmp_path: Path
) -> None:
    script = run(text, mode)
    assert script.hears() == "going"
    started = family(script.pid)
    assert len(started) == count
    check_no_named_memory([script.pid, *started])
    with watched(*started) as wait:
        os.kill(script.pid, signum)
        wait()
    assert script.end() == (-signum, "")
    check_folder(tmp_path)


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("sync", LOOP),
        ("async", TRAINS),
        ("async", TRAINS.replace("with collect() as collector:", "collector = collect()\nif 1:")),
        ("sync", MAKING),
        ("async", f"{BACKGROUND}with collector:\n    listen()"),
    ],
    ids=["waits", "trains", "no with", "making", "background"],
)
def test_interrupted(run: Any, mode: str, text: str, tmp_path: Path) -> None:
    script = run(text, mode)
    assert script.hears() == "going"
    script.signal(signal.SIGINT)
    status, errors = script.end()
    assert status == -signal.SIGINT
    assert only_interrupted(errors), errors
    check_folder(tmp_path)


def test_interrupted_and_then_gone_on(run: Any) -> None:
    # As in a notebook, the program goes on, and makes another collector.
    script = run(
        f"""
try:
{textwrap.indent(LOOP, "    ")}
except KeyboardInterrupt:
    say("interrupted")
crew = Crew(Path("."), workers=3, lives=3)
with collect() as collector:
    crew.add(collector.next())
say("done")
""",
        "async",
    )
    assert script.hears() == "going"
    script.signal(signal.SIGINT)
    assert script.hears() == "interrupted"
    assert script.hears() == "done"
    assert script.end() == (0, "")


def test_interrupted_twice(run: Any) -> None:
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
        "async",
    )
    assert script.hears() == "deaf"
    script.signal(signal.SIGINT)
    assert script.hears() == "told"
    script.signal(signal.SIGINT)
    status, errors = script.end()
    assert status == -signal.SIGINT
    assert errors.strip().endswith("KeyboardInterrupt")
    assert "Error" not in errors


# --- forgotten


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("sync", "collector = collect()\ncollector.next()\nsay('going')"),
        ("async", "one = collect()\none.next()\none.myself = one\nsay('going')"),
        ("sync", BACKGROUND),
    ],
    ids=["plain", "cycle", "background"],
)
def test_never_shut_down(run: Any, mode: str, text: str) -> None:
    script = run(text, mode)
    assert script.hears() == "going"
    assert script.end() == (0, "")


def test_an_exception_in_the_users_loop(run: Any) -> None:
    script = run("for batch in collect():\n    raise ValueError('the learner')", "sync")
    status, errors = script.end()
    assert status == 1
    assert errors.count("Traceback") == 1
    assert errors.endswith("ValueError: the learner\n")


@pytest.mark.parametrize(
    ("mode", "more", "collects"),
    [
        ("sync", "iterator = iter(collector); next(iterator); del iterator", ""),
        ("async", "cycle = [collector]; cycle.append(cycle); del cycle", "gc.collect()"),
    ],
    ids=["iterator", "cycle"],
)
def test_let_go_of(run: Any, mode: str, more: str, collects: str) -> None:
    """Without a cycle, that needs no collection of garbage."""
    script = run(
        f"""
gc.disable()
collector = collect()
batch = collector.next()
for number in range(2):
    next(iter(collector))
{more}
with watched(*crew.pids()) as wait:
    del collector
    {collects}
    wait()
say("gone")
crew.add(batch)
""",
        mode,
    )
    assert script.hears() == "gone"
    assert script.end() == (0, "")
