"""What a collector with workers tells of each of them, without asking it."""

import fcntl
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from trawl import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from trawl.testing import FaultyEnv, NumberedEnv

OPTIONS = {"num_workers": 2, "frames_per_batch": 20, "total_frames": 200}


@pytest.mark.parametrize("sync", [True, False])
def test_the_frames_of_workers_are_those_delivered(sync):
    options = OPTIONS | {"start_method": "inline"}
    with MultiCollector(NumberedEnv, sync=sync, **options) as collector:
        for count, _ in enumerate(collector, 1):
            facts = collector.stats("both")
            own = [facts[f"worker_{index}/frames"] for index in range(2)]
            batches = [facts[f"worker_{index}/batches"] for index in range(2)]
            assert sum(own) == facts["frames"] == 20 * count
            assert batches == [count, count] if sync else sum(batches) == count
        # There are three views.
        whole, each, both = (collector.stats(name) for name in ("aggregate", "per_worker", "both"))
        assert set(whole) | set(each) == set(both)
        assert set(whole) & set(each) == {"workers", "workers_alive"}
        with pytest.raises(ValueError, match="workers must be 'aggregate', 'per_worker' or 'both'"):
            collector.stats("all")
    assert [facts[f"worker_{index}/alive"] for index in range(2)] == [True, True]
    assert [facts[f"worker_{index}/restarts"] for index in range(2)] == [0, 0]
    after = collector.stats("per_worker")
    assert sum(after[f"worker_{index}/frames"] for index in range(2)) == 200
    assert not after["worker_0/alive"]
    assert "frames" not in after


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Collector, {"trajs_per_batch": 1, "traj_format": "cat", "on_env_error": "restart"}),
        (MultiSyncCollector, {"track_policy_version": True, "start_method": "inline"}),
        (MultiAsyncCollector, {"start_method": "inline"}),
    ],
)
def test_the_pages_explain_all_figures(cls, options):
    pages = Path(__file__).resolve().parents[2] / "docs"
    names = ("one-process.md", "many-processes.md")
    words = "".join((pages / name).read_text(encoding="utf-8") for name in names)
    workers = {} if cls is Collector else {"num_workers": 2}
    with cls("CartPole-v1", frames_per_batch=100, total_frames=1000, **workers, **options) as one:
        one.next()
        facts = one.stats()
    # Of the seconds of each part of the time, the page names the first of each group.
    found = {name.replace("_seconds", "_share") for name in facts}
    assert len(found) > 20
    assert not [name for name in found if f"`{name}`" not in words]


class Held(NumberedEnv):
    """Steps only while nobody holds the gate: a file, locked by whoever holds it."""

    def __init__(self, gate):
        super().__init__()
        self._gate = gate

    def step(self, action):
        with open(self._gate) as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
        return super().step(action)


def test_workers_are_not_waited_for(tmp_path):
    path = tmp_path / "gate"
    path.touch()
    with (
        MultiAsyncCollector(partial(Held, path), **OPTIONS) as collector,
        open(path) as gate,
    ):
        collector.next()
        fcntl.flock(gate, fcntl.LOCK_EX)
        # No worker answers before the gate is open again.
        for _ in range(10):
            assert collector.stats("both")["workers_alive"] == 2


def fails_at_7():
    return FaultyEnv(at=7, fault=ZeroDivisionError("what a step"))


def test_the_counts_go_on_when_another_takes_the_place(monkeypatch):
    """Those of frames, and those of environments that were built anew."""
    monkeypatch.setenv("RL_WARNINGS", "0")
    options = OPTIONS | {"on_env_error": "restart"}
    with MultiSyncCollector(fails_at_7, **options) as collector:
        assert collector.stats()["env_restarts"] == 0
        for _ in range(3):
            collector.next()
        before = collector.stats("both")
        os.kill(collector._pool.slots[1].worker.pid, signal.SIGKILL)
        for _ in collector:
            pass
        after = collector.stats("both")
    frames = [after[f"worker_{index}/frames"] for index in range(2)]
    assert sum(frames) == after["frames"] >= 200
    assert min(frames) >= 100
    assert [after[f"worker_{index}/restarts"] for index in range(2)] == [0, 1]
    assert after["restarts"] == 1
    assert before["worker_1/env_restarts"] >= 3
    assert after["worker_1/env_restarts"] > before["worker_1/env_restarts"]
    for facts in (before, after):
        own = sum(facts[f"worker_{index}/env_restarts"] for index in range(2))
        assert facts["env_restarts"] == own
