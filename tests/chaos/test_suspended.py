"""A process that was suspended, as by Ctrl-Z: nobody is blamed for that, and nothing is lost."""

from __future__ import annotations

import multiprocessing
import os
import select
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos_parts import LENGTHS, PATIENCE, Lives, act

from trawl.backends import ProcessBackend
from trawl.backends.base import Event
from trawl.collectors import AsyncBatchedCollector, MultiSyncCollector
from trawl.envs import ParallelEnv
from trawl.testing import NumberedEnv

# A limit that nobody reaches, and a time beyond it that passes at once.
LIMIT, LONG = 600, 1000


class Suspension:
    """The time that has passed while this process was suspended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, self._seconds = time.monotonic, 0.0
        monkeypatch.setattr(time, "monotonic", lambda: clock() + self._seconds)
        self._patch = monkeypatch

    def pass_by(self) -> None:
        self._seconds += LONG

    def within(self, wait: Callable[[ProcessBackend, float | None], list[Event]]) -> None:
        """Replaces what processes are waited for with."""
        self._patch.setattr(ProcessBackend, "wait", wait)


@pytest.fixture
def suspension(monkeypatch: pytest.MonkeyPatch) -> Suspension:
    return Suspension(monkeypatch)


class Gated(NumberedEnv):
    """Environment that stands in its third step until the gate is open."""

    def __init__(self, number: int, gate: Any) -> None:
        super().__init__(number, lengths=LENGTHS)
        self._gate, self._steps = gate, 0

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self.number and self._steps == 3:
            assert self._gate.wait(PATIENCE)
        return super().step(action)


def gated(gate: Any) -> list[Any]:
    return [partial(Gated, number, gate) for number in range(2)]


@pytest.fixture
def gate() -> Any:
    return multiprocessing.get_context("spawn").Event()


def test_workers_are_not_blamed_for_it(suspension: Suspension, gate: Any) -> None:
    """A message of one had come just before, and the other one was suspended, too."""
    wait = ProcessBackend.wait

    def suspended(backend: ProcessBackend, timeout: float | None = None) -> list[Event]:
        events = wait(backend, timeout)
        if events and collects and not gate.is_set():
            suspension.pass_by()
            gate.set()
        return events

    collects = False
    options: dict[str, Any] = {"frames_per_batch": 20, "worker_timeout": LIMIT}
    with MultiSyncCollector(gated(gate), act, start_method="forkserver", **options) as collector:
        suspension.within(suspended)
        collects = True
        assert collector.next().shape == (2, 10)
        assert gate.is_set()
        assert collector.stats()["restarts"] == 0


def test_who_waits_for_the_user_is_not_silent(suspension: Suspension) -> None:
    """Also if others are asked meanwhile."""
    options: dict[str, Any] = {"num_workers": 2, "frames_per_batch": 20, "worker_timeout": LIMIT}
    with MultiSyncCollector(NumberedEnv, act, **options) as collector:
        collector.next()
        for _ in range(3):
            suspension.pass_by()
            assert collector._pool.call({0: (type,)}).keys() == {0}
        collector.next()
        assert collector.stats()["restarts"] == 0


def test_processes_of_environments_are_not_blamed_for_it(suspension: Suspension, gate: Any) -> None:
    """One of them is in a step while the user has the frames of the other one."""
    with AsyncBatchedCollector(
        gated(gate), policy=act, frames_per_batch=4, worker_timeout=LIMIT
    ) as collector:

        def collect_until(step: int) -> None:
            seen: list[int] = []
            while step not in seen:
                batch = collector.next()
                seen = NumberedEnv.numbers(batch[batch["env_index"] == 1])[:, 3].tolist()

        collect_until(1)
        suspension.pass_by()
        collector.next()
        gate.set()
        collect_until(2)


def ends_before(time_is_up: Callable[[], None], pids: list[int]) -> Callable[..., list[Event]]:
    """Returns a wait in which processes end, and the time passes before their messages are read."""
    wait, handles = ProcessBackend.wait, [os.pidfd_open(pid) for pid in pids]

    def suspended(backend: ProcessBackend, timeout: float | None = None) -> list[Event]:
        if not handles:
            return wait(backend, timeout)
        while handles:
            handle = handles.pop()
            assert select.select([handle], [], [], PATIENCE)[0], "it goes on"
            os.close(handle)
        time_is_up()
        return []

    return suspended


class Jammed(NumberedEnv):
    """Environment that notes its process, and fails to close."""

    def __init__(self, lives: Lives) -> None:
        super().__init__()
        lives.begin()

    def close(self) -> None:
        raise OSError("the door is jammed")


def test_errors_of_workers_that_have_closed_are_raised(
    suspension: Suspension, tmp_path: Path
) -> None:
    lives = Lives(tmp_path / "lives")
    options: dict[str, Any] = {"num_workers": 2, "frames_per_batch": 20}
    collector = MultiSyncCollector(partial(Jammed, lives), act, **options)
    collector.next()
    suspension.within(ends_before(suspension.pass_by, lives.pids))
    with pytest.raises(OSError, match="the door is jammed"):
        collector.shutdown()


def test_errors_of_environments_that_have_closed_are_raised(
    suspension: Suspension, tmp_path: Path
) -> None:
    lives = Lives(tmp_path / "lives")
    env = ParallelEnv(2, partial(Jammed, lives))
    env.rollout(2)
    suspension.within(ends_before(suspension.pass_by, lives.pids))
    with pytest.raises(OSError, match="the door is jammed"):
        env.close()
