"""Workers that are killed at any moment: they are replaced, and no frame is wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
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
    crash,
    frames_of,
    kill,
    leave,
    replaced,
    strike,
    survives,
)
from modes import ASYNC, EITHER, SYNC

from trawl.backends.processes.handle import ServerHandle
from trawl.collectors import MultiCollector
from trawl.collectors.workers.pool import WorkerPool

pytestmark = pytest.mark.usefixtures("nobody_is_left")
KILLED = "worker 1 was killed by SIGKILL"
ANY_KILLED = r"worker \d was killed by SIGKILL"


# --- in the middle of something


@pytest.mark.parametrize(
    ("sync", "lanes", "at", "count"),
    [(True, 1, "make", 0), (False, 3, "make", 0), (False, 3, "reset", 0), (True, 3, "reset", 2)],
)
def test_killed_in_an_environment(
    tmp_path: Path, sync: bool, lanes: int, at: str, count: int
) -> None:
    crew = Crew(tmp_path, lanes=lanes, troubles={1: Trouble(at, count)})
    stats = survives(crew, sync, KILLED, policy=act)
    assert stats["batches"] == (3 if sync else 6)
    assert (stats["restarts"], stats["workers_alive"], stats["batches_held"]) == (1, 2, 0)


@pytest.mark.parametrize(("sync", "count"), [(True, 0), (False, 4), (True, 10), (False, 13)])
def test_killed_in_the_policy(tmp_path: Path, sync: bool, count: int) -> None:
    policy = Acting(Once(tmp_path / "policy", count, kill))
    survives(Crew(tmp_path), sync, ANY_KILLED, policy=policy)


@pytest.mark.parametrize(
    ("sync", "name", "count"),
    [
        (True, "pre_collect_hook", 0),
        (False, "pre_collect_hook", 1),
        (False, "post_collect_hook", 0),
        (True, "post_collect_hook", 1),
    ],
)
def test_killed_in_a_hook(tmp_path: Path, sync: bool, name: str, count: int) -> None:
    # In post_collect_hook, the batch is complete, but the driver does not know that yet.
    hook = {name: Once(tmp_path / "hook", count, kill)}
    survives(Crew(tmp_path), sync, ANY_KILLED, policy=act, **hook)


@pytest.mark.parametrize(
    ("sync", "what", "told"),
    [
        (True, leave, "exited with status 3"),
        (False, partial(leave, 0), "exited with status 0"),
        (True, crash, "was killed by SIGSEGV"),
        (False, partial(kill, signal.SIGABRT), "was killed by SIGABRT"),
        (True, partial(kill, signal.SIGTERM), "exited with status 0"),
        (False, partial(kill, signal.SIGRTMIN), "was killed by"),
    ],
    ids=["exit", "exit0", "segfault", "abort", "terminate", "realtime"],
)
def test_other_ways_to_go(tmp_path: Path, sync: bool, what: Callable[[], Any], told: str) -> None:
    survives(Crew(tmp_path, troubles={0: Trouble("step", 3, what)}), sync, f"worker 0 {told}", 2)


# --- from outside


@pytest.mark.parametrize(
    ("victims", "after"), [((1,), 0), ((0, 1), 1), ((0, 1, 2), 0), ((0, 1, 2), 1)]
)
def test_killed_between_batches(tmp_path: Path, victims: tuple[int, ...], after: int) -> None:
    sync = len(victims) % 2 == after
    crew = Crew(tmp_path, workers=3)
    frames = frames_of(sync, crew, 4)
    with collector_of(crew, sync, total_frames=frames) as collector:
        for _ in range(after):
            crew.add(collector.next())
        strike(*map(crew.pid, victims))
        with replaced(ANY_KILLED, len(victims)):
            crew.run(collector)
        stats = collector.stats("both")
    assert crew.frames == stats["frames"] == frames
    restarted = [index for index in range(3) if stats[f"worker_{index}/restarts"]]
    assert restarted == list(victims)


@SYNC
def test_killed_again_and_again(tmp_path: Path, sync: bool) -> None:
    crew = Crew(tmp_path)
    with collector_of(crew, sync, total_frames=-1) as collector:
        for count in range(1, 5):
            strike(crew.pid(1))
            with replaced(KILLED, 1):
                while len(crew.makers[1][0].lives.pids) == count:
                    crew.add(collector.next())
                # Waits for a batch of the replacement before the next kill.
                _next_of(collector, sync, crew, 1, life=count)
        stats = collector.stats()
    assert crew.frames == stats["frames"]
    assert (stats["restarts"], stats["workers_alive"]) == (4, 2)


@EITHER
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


@ASYNC
def test_killed_when_all_is_done(tmp_path: Path, sync: bool) -> None:
    crew = Crew(tmp_path)
    with collector_of(crew, sync, total_frames=frames_of(sync, crew, 1)) as collector:
        crew.run(collector)
        strike(crew.pid(0))
        assert collector.next() is None
    assert crew.frames == frames_of(sync, crew, 1)


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


def _next_of(collector: MultiCollector, sync: bool, crew: Crew, worker: int, life: int = 0) -> Any:
    """Returns a worker's part of its next batch in this life or a later one; checks all batches."""
    while True:
        batch = collector.next()
        crew.add(batch)
        part = batch[worker] if sync else batch
        lived, place = divmod(int(part["observation"][0, 0]), 100)
        if place // 10 == worker and lived >= life:
            return part


def _actions(collector: MultiCollector, crew: Crew, sync: bool, rounds: int) -> Any:
    """Returns the actions of each worker in its next ``rounds`` batches."""
    found: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    while min(map(len, found.values())) < rounds:
        batch = collector.next()
        crew.add(batch)
        for part in batch.unbind(0) if sync else [batch]:
            worker = int(part["observation"][0, 0]) % 100 // 10
            found[worker].append(part["action"].clone())
    return {worker: torch.stack(actions[:rounds]) for worker, actions in found.items()}


@pytest.mark.parametrize(("sync", "victim"), [(True, 0), (False, 1)])
def test_killed_while_it_is_seeded(tmp_path: Path, sync: bool, victim: int) -> None:
    results = []
    for name, troubles in (("calm", {}), ("rough", {victim: Trouble("reset", 1)})):
        (tmp_path / name).mkdir()
        crew = Crew(tmp_path / name, troubles=troubles)
        with collector_of(crew, sync, total_frames=-1) as collector:
            if troubles:
                with replaced(f"worker {victim} was killed"):
                    following = collector.set_seed(7)
            else:
                following = collector.set_seed(7)
            results.append((following, _actions(collector, crew, sync, 2)))
    (calm, actions), (rough, others) = results
    assert calm == rough
    for worker in (0, 1):
        assert torch.equal(actions[worker], others[worker])


@SYNC
def test_killed_while_another_is_seeded(tmp_path: Path, sync: bool) -> None:
    # The dead worker already had its seed. Its replacement gets a seed too, always the same one.
    results = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        crew = Crew(tmp_path / name)
        with collector_of(crew, sync, total_frames=-1) as collector:
            call = collector._pool.call

            def call_and_strike(calls: Any, *rest: Any) -> Any:
                if 1 in calls:
                    strike(crew.pid(0))  # noqa: B023 - called in this turn
                return call(calls, *rest)  # noqa: B023

            collector._pool.call = call_and_strike
            with replaced("worker 0 was killed"):
                collector.set_seed(7)
                collector._pool.call = call
                results.append(_actions(collector, crew, sync, 2))
    for worker in (0, 1):
        assert torch.equal(results[0][worker], results[1][worker])


@ASYNC
def test_one_in_its_place_draws_other_numbers_from_the_same_seed(
    tmp_path: Path, sync: bool
) -> None:
    results = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        crew = Crew(tmp_path / name, troubles={1: Trouble("step", 3)})
        with collector_of(crew, sync, total_frames=-1) as collector:
            collector.set_seed(7)
            with replaced(KILLED):
                results.append(_actions(collector, crew, sync, 2))
    for worker in (0, 1):
        assert torch.equal(results[0][worker], results[1][worker])


@pytest.mark.parametrize(
    ("sync", "when"), [(True, "before"), (True, "during"), (False, "during"), (False, "after")]
)
def test_killed_about_new_weights(tmp_path: Path, sync: bool, when: str) -> None:
    crew = Crew(tmp_path)
    load = Once(tmp_path / "load", 0, kill) if when == "during" else None
    policy = _Receiving(0, load)
    collector = collector_of(crew, sync, policy, total_frames=-1, track_policy_version=True)
    with collector, replaced(ANY_KILLED):
        if when == "before":
            strike(crew.pid(1))
        collector.update_policy_weights_(policy.choose(2))
        if when == "after":
            strike(crew.pid(1))
        # Batches that were requested before the update have the old weights, unless they are lost.
        parts = [_next_of(collector, sync, crew, worker) for worker in (1, 0, 1, 0, 1, 0)]
        for part in parts:
            chosen = part["action"].argmax(-1).unique().tolist()
            version = part["policy_version"].unique().tolist()
            assert (chosen, version) in (([2], [1]), ([0], [0]))
        assert all(version == 1 for part in parts[-2:] for version in part["policy_version"])
        collector.increment_version()
        strike(crew.pid(0))
        for _ in range(3):
            part = _next_of(collector, sync, crew, 0)
        assert part["policy_version"].unique().tolist() == [2]
        assert part["action"].argmax(-1).unique().tolist() == [2]


class _Loading(Scored):
    """Policy that calls a function when its ``load_state_dict`` is called."""

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self._load is not None:
            self._load()
        return super().load_state_dict(*args, **kwargs)


class _Receiving(Scored):
    """Policy that calls a function when new weights are loaded in a worker."""

    def get_extra_state(self) -> Any:
        return None

    def set_extra_state(self, state: Any) -> None:
        if self._load is not None:
            self._load()


class _Telling(Scored):
    """Policy that calls a function when its ``state_dict`` is called."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if self._load is not None:
            self._load()
        return super().state_dict(*args, **kwargs)


@pytest.mark.parametrize(("sync", "during"), [(True, True), (False, False)])
def test_killed_about_its_state(tmp_path: Path, sync: bool, during: bool) -> None:
    crew = Crew(tmp_path)
    tell = Once(tmp_path / "tell", 0, kill) if during else None
    with collector_of(crew, sync, _Telling(3, tell), total_frames=-1) as collector:
        crew.add(collector.next())
        if not during:
            strike(crew.pid(1))
        with replaced(ANY_KILLED):
            state = collector.state_dict()
        assert state["frames"] == crew.frames
        for worker in (0, 1):
            scores = state[f"worker{worker}"]["policy_state_dict"]["scores"]
            assert scores.tolist() == [0, 0, 0, 1]
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
    load = Once(tmp_path / "load", 0, kill) if when == "during" else None
    policy = _Loading(0, load)
    new = collector_of(crew, sync, policy, total_frames=-1, track_policy_version=True)
    with new, replaced(ANY_KILLED):
        new.load_state_dict(state)
        if when == "after":
            strike(crew.pid(0), crew.pid(1))
        first = int(new.stats()["frames"])
        for worker in (0, 1, 0, 1):
            part = _next_of(new, sync, crew, worker)
            assert part["action"].argmax(-1).unique().tolist() == [3]
            assert part["policy_version"].unique().tolist() == [1]
            assert used.isdisjoint(part["collector", "traj_ids"].unique().tolist())
        assert new.stats()["frames"] == first + crew.frames


@pytest.mark.parametrize(("sync", "during"), [(False, True), (True, False)])
def test_killed_about_a_call(tmp_path: Path, sync: bool, during: bool) -> None:
    crew = Crew(tmp_path)
    policy = _Greeting(0, Once(tmp_path / "once", 0, kill) if during else None)
    with collector_of(crew, sync, policy, total_frames=-1) as collector:
        crew.add(collector.next())
        if not during:
            strike(crew.pid(1))
        with replaced(ANY_KILLED):
            given = collector.map_fn("policy.greet", [("a",), ("b",)])
        assert given == ["hello a", "hello b"]
        crew.add(collector.next())
        assert collector.get_distant_attr("policy.training") == [True, True]


class _Greeting(Scored):
    """Policy with a method that workers can be told to call."""

    def greet(self, name: str) -> str:
        if self._load is not None:
            self._load()
        return f"hello {name}"


@SYNC
def test_killed_after_a_hook_was_set(tmp_path: Path, sync: bool) -> None:
    crew = Crew(tmp_path)
    hooked = Lives(tmp_path / "hooked")
    with collector_of(crew, sync, total_frames=-1) as collector:
        crew.add(collector.next())
        collector.pre_collect_hook = hooked.begin
        strike(crew.pid(0), crew.pid(1))
        with replaced(ANY_KILLED):
            for worker in (0, 1):
                _next_of(collector, sync, crew, worker, life=1)
    assert set(hooked.pids) >= {crew.pid(0), crew.pid(1)}


# --- the server process that starts workers


def test_the_process_that_workers_come_from_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that take its place, while workers are replaced."""
    crew, kills = Crew(tmp_path), 3
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
