"""Workers that are killed at any moment: they are replaced, and no frame is wrong."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from chaos_parts import (
    Acting,
    Crew,
    Lives,
    Once,
    Scored,
    Trouble,
    act,
    collector_of,
    frames_of,
    kill,
    leave,
    parts,
    replaced,
    survives,
)
from killing import strike
from modes import ASYNC

from trawl.backends.processes.handle import ServerHandle
from trawl.collectors import MultiCollector
from trawl.collectors.workers.pool import WorkerPool

pytestmark = pytest.mark.usefixtures("nobody_is_left")
ANY_KILLED = r"worker \d was killed by SIGKILL"


# --- in the middle of something


@pytest.mark.parametrize(
    ("sync", "lanes", "trouble", "told"),
    [
        (True, 1, Trouble("make", 0), "was killed by SIGKILL"),
        (False, 3, Trouble("reset", 0), "was killed by SIGKILL"),
        (True, 3, Trouble("reset", 2, partial(leave, 0)), "exited with status 0"),
        (True, 1, Trouble("step", 3, partial(kill, signal.SIGTERM)), "exited with status 0"),
        (False, 1, Trouble("step", 3, partial(kill, signal.SIGRTMIN)), "was killed by"),
    ],
)
def test_killed_in_an_environment(
    tmp_path: Path, sync: bool, lanes: int, trouble: Trouble, told: str
) -> None:
    crew = Crew(tmp_path, lanes=lanes, troubles={1: trouble})
    stats = survives(crew, sync, f"worker 1 {told}", policy=act)
    assert stats["batches"] == (3 if sync else 6)
    assert (stats["restarts"], stats["workers_alive"], stats["batches_held"]) == (1, 2, 0)


@pytest.mark.parametrize(
    ("sync", "name", "count"),
    [
        (False, "policy", 10),
        (True, "pre_collect_hook", 0),
        # The batch is complete, but the driver does not know that yet.
        (False, "post_collect_hook", 0),
        (True, "post_collect_hook", 1),
    ],
)
def test_killed_in_what_else_is_called(tmp_path: Path, sync: bool, name: str, count: int) -> None:
    once: Any = Once(tmp_path / "once", count, kill)
    called = {name: Acting(once)} if name == "policy" else {"policy": act, name: once}
    survives(Crew(tmp_path), sync, ANY_KILLED, **called)


# --- from outside


@pytest.mark.parametrize(
    ("sync", "victims", "after"), [(False, (1,), 0), (True, (0, 1, 2), 1), (False, (0, 1, 2), 1)]
)
def test_killed_between_batches(
    tmp_path: Path, sync: bool, victims: tuple[int, ...], after: int
) -> None:
    crew = Crew(tmp_path, workers=3)
    frames = frames_of(sync, crew, 4)
    with collector_of(crew, sync, total_frames=frames) as collector:
        for _ in range(after):
            crew.add(collector.next())
        strike(*map(crew.pid, victims))
        with replaced(ANY_KILLED, len(victims)):
            crew.run(collector)
        stats = collector.stats("both")
        # Once all is done, nobody is missed.
        strike(crew.pid(0))
        assert collector.next() is None
    assert crew.frames == stats["frames"] == frames
    restarted = [index for index in range(3) if stats[f"worker_{index}/restarts"]]
    assert restarted == list(victims)


@ASYNC
def test_killed_right_after_its_batch(
    tmp_path: Path, sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path)
    frames = frames_of(sync, crew, 3)
    struck: list[int] = []
    read = WorkerPool._read

    def read_and_strike(self: WorkerPool, member: Any, content: Any) -> None:
        read(self, member, content)
        if type(content).__name__ == "BatchReady" and not struck:
            struck.append(member.index)
            strike(crew.pid(member.index))

    monkeypatch.setattr(WorkerPool, "_read", read_and_strike)
    with collector_of(crew, sync, total_frames=frames) as collector:
        with replaced(ANY_KILLED):
            crew.run(collector)
        assert collector.stats()["restarts"] == 1
    # The batch that the dead worker had delivered counts, and is not collected again.
    assert crew.frames == frames


def test_killed_while_others_are_broken_off(tmp_path: Path) -> None:
    # With preemption, a batch may have fewer frames of some workers, but never a wrong frame.
    crew = Crew(tmp_path, workers=3, troubles={2: Trouble("step", 5), 0: Trouble("step", 12)})
    collector = collector_of(crew, True, preemptive_threshold=0.5, cat_results=-1)
    with collector, replaced(ANY_KILLED):
        ledger, seen = crew._ledger, 0
        # A worker that is always broken off early comes to its fault late.
        while collector.stats()["restarts"] < 2:
            batch = collector.next()
            ledger.add(batch)
            seen += batch.numel()
        assert collector.stats()["frames"] == seen == ledger.frames


# --- during calls, and after calls that set something


def _actions(collector: MultiCollector, crew: Crew, sync: bool, rounds: int) -> Any:
    """Returns the actions of each worker in its next ``rounds`` batches."""
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for _, worker, part in parts(collector, crew, sync):
        found[worker].append(part["action"].clone())
        if min(map(len, found.values())) == rounds:
            break
    return {worker: torch.stack(actions[:rounds]) for worker, actions in found.items()}


@pytest.mark.parametrize(
    ("sync", "when"), [(True, "itself"), (False, "itself"), (True, "another"), (False, "later")]
)
def test_killed_about_a_seed(tmp_path: Path, sync: bool, when: str) -> None:
    """A replacement has a seed: that of its worker, which draws nothing yet, or always another."""

    def seeded(name: str, when: str) -> tuple[int, dict[int, torch.Tensor]]:
        (tmp_path / name).mkdir()
        troubles = {"itself": {0: Trouble("reset", 1)}, "later": {0: Trouble("step", 3)}}
        crew = Crew(tmp_path / name, troubles=troubles.get(when))
        with collector_of(crew, sync, total_frames=-1) as collector:
            call = collector._pool.call

            def call_and_strike(calls: Any, *rest: Any) -> Any:
                if when == "another" and 1 in calls:
                    # It already has its seed.
                    strike(crew.pid(0))
                return call(calls, *rest)

            collector._pool.call = call_and_strike
            with replaced("worker 0 was killed", 1) if when else nullcontext():
                following = collector.set_seed(7)
                collector._pool.call = call
                return following, _actions(collector, crew, sync, 2)

    one, other = seeded("one", "" if when == "itself" else when), seeded("other", when)
    assert one[0] == other[0]
    assert all(torch.equal(one[1][worker], other[1][worker]) for worker in (0, 1))


class _Deadly(Scored):
    """Policy that calls a function in one of its methods.

    Args:
        choice: the action that it takes.
        name: name of the method.
        what: the function.
    """

    def __init__(self, choice: int, name: str, what: Callable[[], Any]) -> None:
        super().__init__(choice)
        self._call: tuple[str, Callable[[], Any]] = name, what

    def _reach(self, name: str) -> None:
        if self._call[0] == name:
            self._call[1]()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._reach("load_state_dict")
        return super().load_state_dict(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self._reach("state_dict")
        return super().state_dict(*args, **kwargs)

    def greet(self, name: str) -> str:
        self._reach("greet")
        return f"hello {name}"


@pytest.mark.parametrize(
    ("sync", "during"), [(True, "state_dict"), (False, "greet"), (False, ""), (True, "")]
)
def test_killed_about_a_call(tmp_path: Path, sync: bool, during: str) -> None:
    crew = Crew(tmp_path)
    policy = _Deadly(3, during, Once(tmp_path / "once", 0, kill))
    with collector_of(crew, sync, policy, total_frames=-1) as collector:
        crew.add(collector.next())
        if not during:
            strike(crew.pid(1))
        with replaced(ANY_KILLED, 1):
            if sync:
                state = collector.state_dict()
            given = collector.map_fn("policy.greet", [("a",), ("b",)])
        assert given == ["hello a", "hello b"]
        if sync:
            assert state["frames"] == crew.frames
            policies = [state[f"worker{worker}"]["policy_state_dict"] for worker in (0, 1)]
            assert [one["scores"].tolist() for one in policies] == [[0, 0, 0, 1]] * 2
        crew.add(collector.next())


@pytest.mark.parametrize(("sync", "when"), [(False, "during"), (True, "after")])
def test_killed_about_a_loaded_state(tmp_path: Path, sync: bool, when: str) -> None:
    (tmp_path / "old").mkdir()
    crew = Crew(tmp_path / "old")
    with collector_of(crew, sync, Scored(3), total_frames=-1, track_policy_version=True) as old:
        used = set()
        for _ in range(4):
            batch = old.next()
            crew.add(batch)
            used.update(batch["collector", "traj_ids"].unique().tolist())
        old.increment_version()
        state = old.state_dict()
    # As if the environments could not be captured, so that new episodes begin.
    state["finished"] = []
    for worker in (0, 1):
        del state[f"worker{worker}"]["resume"]

    (tmp_path / "new").mkdir()
    crew = Crew(tmp_path / "new")
    hooked = Lives(tmp_path / "hooked")
    name = "load_state_dict" if when == "during" else ""
    policy = _Deadly(0, name, Once(tmp_path / "load", 0, kill))
    new = collector_of(crew, sync, policy, total_frames=-1, track_policy_version=True)
    with new, replaced(ANY_KILLED):
        new.load_state_dict(state)
        new.pre_collect_hook = hooked.begin
        if when == "after":
            strike(crew.pid(0), crew.pid(1))
        first = int(new.stats()["frames"])
        seen = Counter[int]()
        for _, worker, part in parts(new, crew, sync):
            assert part["action"].argmax(-1).unique().tolist() == [3]
            assert part["policy_version"].unique().tolist() == [1]
            assert used.isdisjoint(part["collector", "traj_ids"].unique().tolist())
            seen[worker] += 1
            if min(seen[0], seen[1]) == 2:
                break
        assert new.stats()["frames"] == first + crew.frames
        # The hook is set again in a replacement.
        assert set(hooked.pids) >= {crew.pid(0), crew.pid(1)}


# --- the server process that starts workers


def test_the_process_that_workers_come_from_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the one that takes its place, while workers are replaced."""
    crew, kills = Crew(tmp_path), 1
    frames = frames_of(True, crew, 3)
    start = ServerHandle.__init__

    def start_and_kill(self: ServerHandle, method: str) -> None:
        nonlocal kills
        start(self, method)
        if kills:
            kills -= 1
            os.kill(self._process.pid, signal.SIGKILL)

    with collector_of(crew, True, total_frames=frames) as collector:
        crew.add(collector.next())
        source = collector._pool.slots[0].worker._source._process
        monkeypatch.setattr(ServerHandle, "__init__", start_and_kill)
        strike(source.pid)
        with replaced(r"worker \d ended together with the process"):
            crew.run(collector)
        assert not kills
        assert collector.stats()["restarts"] >= 2
    assert crew.frames == frames
