"""When a collector gives up: no restarts left, exceptions, workers that don't answer."""

from __future__ import annotations

import os
import re
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos_parts import (
    Acting,
    Crew,
    Once,
    Trouble,
    block,
    collector_of,
    fail,
    frames_of,
    replaced,
    stay_busy,
    survives,
)
from killing import strike, watched
from modes import ASYNC, SYNC

from trawl.collectors import MultiCollector
from trawl.collectors.workers import pool
from trawl.errors import WorkerDied, WorkerError

pytestmark = pytest.mark.usefixtures("nobody_is_left")


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never kills workers for closing slowly, so that a test hangs if it waits for a dead one."""
    monkeypatch.setattr(pool, "_CLOSING", 1e6)


def check_closed(collector: MultiCollector, crew: Crew) -> None:
    """Checks that a collector that gave up says so, and that its workers are gone."""
    assert collector.closed
    for call in (collector.next, partial(collector.set_seed, 0)):
        with pytest.raises(RuntimeError, match=r"shut down after \w+: "):
            call()
    with watched(*crew.pids()) as wait:
        wait()


# --- no restarts left


@pytest.mark.parametrize(
    ("sync", "limits", "deaths"),
    [
        (False, {"max_restarts": 1}, 2),
        (True, {"max_restarts": 5, "max_total_restarts": 2}, 3),
    ],
)
def test_out_of_restarts(tmp_path: Path, sync: bool, limits: dict[str, int], deaths: int) -> None:
    crew = Crew(tmp_path, troubles={1: Trouble("step", 12, lives=10)})
    collector = collector_of(crew, sync, total_frames=-1, **limits)
    with (
        replaced("worker 1 was killed by SIGKILL", deaths - 1),
        pytest.raises(WorkerDied) as raised,
    ):
        crew.run(collector)
    message = str(raised.value)
    assert message.startswith("worker 1 was killed by SIGKILL, and is not replaced again")
    for name, value in limits.items():
        assert f"{name}={value}" in message
    assert len(crew.makers[1][0].lives.pids) == deaths
    # All batches before the last death were correct.
    assert crew.frames >= 10 * deaths
    check_closed(collector, crew)


def test_one_that_always_dies_as_it_is_made(tmp_path: Path) -> None:
    crew = Crew(tmp_path, workers=3, troubles={2: Trouble("make", 0, lives=99)})
    with (
        replaced("worker 2 was killed", 3),
        pytest.raises(WorkerDied, match=r"is not replaced again.*max_restarts=3"),
    ):
        collector_of(crew, False, total_frames=-1, max_restarts=3)
    with watched(*crew.pids()) as wait:
        wait()


@ASYNC
def test_calls_end_with_the_last_restart(tmp_path: Path, sync: bool) -> None:
    crew = Crew(tmp_path)
    collector = collector_of(crew, sync, total_frames=-1, max_restarts=0)
    strike(crew.pid(1))
    with pytest.raises(WorkerDied, match="worker 1 was killed by SIGKILL"):
        collector.state_dict()
    # Later calls raise the same error.
    with pytest.raises(WorkerDied, match="worker 1 was killed by SIGKILL"):
        collector.next()
    check_closed(collector, crew)


# --- exceptions


@pytest.mark.parametrize(
    ("sync", "name"),
    [
        (True, "make"),
        (False, "reset"),
        (False, "policy"),
        (True, "post_collect_hook"),
        (True, "init_fn"),
        (False, "policy_factory"),
    ],
)
def test_an_exception_in_what_is_called(tmp_path: Path, sync: bool, name: str) -> None:
    """It arrives with type and traceback, and ends all workers."""
    of_env = name in ("make", "reset")
    crew = Crew(tmp_path, troubles={1: Trouble(name, 0, fail)} if of_env else None)
    once: Any = Once(tmp_path / "called", 0, fail)
    # A factory that doesn't fail would have to return a policy, so this one always fails.
    called = {"policy": Acting(once), "policy_factory": fail}.get(name, once)
    with (
        pytest.raises(WorkerError) as raised,
        collector_of(
            crew, sync, total_frames=-1, **({} if of_env else {name: called})
        ) as collector,
    ):
        crew.run(collector)
    assert isinstance(raised.value, ZeroDivisionError)
    message = str(raised.value)
    worker = "1" if of_env else "[01]"
    assert re.match(f"in worker {worker}: ZeroDivisionError: the sea is rough", message)
    assert ", in fail\n" in message
    assert "chaos_parts.py" in message
    with watched(*crew.pids()) as wait:
        wait()


@SYNC
def test_an_exception_and_a_death(tmp_path: Path, sync: bool) -> None:
    # Both happen in the same batch, and either may be reported first.
    crew = Crew(tmp_path, troubles={0: Trouble("step", 3, fail), 1: Trouble("step", 3)})
    collector = collector_of(crew, sync, total_frames=-1, max_restarts=0)
    with pytest.raises(WorkerError):
        crew.run(collector)
    check_closed(collector, crew)


# --- no answer


def test_one_that_gives_no_answer_is_replaced(tmp_path: Path) -> None:
    """However much others say: whenever this process looks for messages, there are some."""
    stopped = partial(signal.raise_signal, signal.SIGSTOP)
    crew = Crew(
        tmp_path,
        workers=4,
        troubles={0: Trouble("reset", 2, block), 1: Trouble("step", 4, stopped)},
    )
    slow = threading.Event()
    told = r"worker [01] did not respond for 8 s \(worker_timeout\) and was killed"
    collector = collector_of(crew, False, total_frames=-1, worker_timeout=8.0)
    with collector, replaced(told, 2):
        while min(len(crew.makers[worker][0].lives.pids) for worker in (0, 1)) == 1:
            crew.add(collector.next())
            slow.wait(0.02)


def test_one_that_gives_no_answer_as_it_is_made_is_replaced(tmp_path: Path) -> None:
    crew = Crew(tmp_path, troubles={0: Trouble("make", 0, block)})
    survives(crew, True, "worker 0 did not respond for 8 s", worker_timeout=8.0)


def test_without_a_limit_it_is_waited_for(tmp_path: Path) -> None:
    # The worker waits until the timer opens the gate, and is not replaced.
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    crew = Crew(tmp_path, troubles={0: Trouble("step", 3, partial(_read, str(gate)))})
    frames = frames_of(True, crew, 2)
    opened = threading.Event()

    def let_go() -> None:
        opened.set()
        gate.write_bytes(b"go")

    with collector_of(crew, True, total_frames=frames) as collector:
        opener = threading.Timer(1.0, let_go)
        opener.start()
        crew.run(collector)
        assert opened.is_set()
        opener.join()
        assert collector.stats()["restarts"] == 0
    assert crew.frames == frames


def _read(path: str) -> None:
    Path(path).read_bytes()


@ASYNC
def test_who_does_not_close_is_killed(
    tmp_path: Path, sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "_CLOSING", 0.5)
    busy = Trouble("step", 3, stay_busy)
    dies = Trouble("step", 4)
    crew = Crew(tmp_path, workers=3, troubles={0: busy, 1: dies, 2: busy})
    collector = collector_of(crew, sync, total_frames=-1, max_restarts=0)
    with pytest.raises(WorkerDied, match="worker 1 was killed by SIGKILL"):
        crew.run(collector)
    check_closed(collector, crew)
