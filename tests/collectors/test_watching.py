"""Rates, shares of time and episodes of a running collector, and the part that limits it."""

import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from multi_parts import Chooser, envs, make
from tensordict.nn import TensorDictModule

from tests.oracle.watching import check_episodes
from trawl import Collector, MultiSyncCollector
from trawl.observe import read_trace
from trawl.testing import NumberedEnv
from trawl.testing.oracle import Options

LENGTHS = (3, 5, 1)


class Gated(NumberedEnv):
    """Environment whose second copy waits in each step until a file exists."""

    def __init__(self, number, gate):
        super().__init__(number)
        self.gate = gate

    def step(self, action):
        while self.number and not Path(self.gate).exists():
            time.sleep(0.001)
        return super().step(action)


def test_batches_that_are_not_delivered_give_no_shares(tmp_path):
    """Another thread may ask while the first batch waits for a worker."""
    gate = tmp_path / "gate"
    sources = [partial(Gated, i, str(gate)) for i in range(2)]
    with make(create_env_fn=sources, start_method="forkserver") as collector:
        facts = collector.stats("both")
        assert not {"env_share", "frames_per_second"} & facts.keys()
        assert facts["episodes"] == 0
        assert np.isnan(facts["episode_return_mean"])
        taker = threading.Thread(target=collector.next)
        taker.start()
        try:
            while "worker_0/env_share" not in collector.stats("both"):
                time.sleep(0.001)
            limit, facts = collector.bottleneck(), collector.stats()
            report = str(collector.report())
        finally:
            gate.touch()
            taker.join()
        assert limit.part == "unknown"
        assert report == limit.sentence
        assert "env_share" not in facts
        assert "learner_share" not in facts
        assert {"env_share", "learner_share"} <= collector.stats().keys()
        assert collector.bottleneck().part != "unknown"


@pytest.mark.filterwarnings("ignore:worker 0 was killed:RuntimeWarning")
def test_a_replacement_counts_no_batch_twice(tmp_path):
    """Batches since the last snapshot are collected again, but not counted again."""
    sources = [partial(NumberedEnv, i, lengths=[3]) for i in range(2)]
    options = {"frames_per_batch": 12, "start_method": "forkserver", "worker_snapshots": 10}
    trace = tmp_path / "run.json.gz"
    with make(create_env_fn=sources, trace=trace, **options) as collector:
        batches = [collector.next() for _ in range(3)]
        collector._pool.slots[0].worker.kill()
        while not collector.stats()["restarts"]:
            batches.append(collector.next())
        batches.append(collector.next())
        facts = collector.stats("both")
    check_episodes(facts, batches, Options())
    # Each batch is as long as its steps, at least.
    assert not any("seconds" in span.args for span in read_trace(trace).lane("worker 0"))


def test_only_whole_episodes_of_delivered_frames_count():
    source = partial(NumberedEnv, lengths=[10])
    options = {"frames_per_batch": 5, "total_frames": 60, "policy": None}
    with Collector(source, **options) as collector, Collector(source, **options) as other:
        # A reset begins episodes anew.
        collector.next()
        collector.reset()
        collector.next()
        other.load_state_dict(collector.state_dict())
        for one in (collector, other):
            one.next()
            facts = one.stats()
            assert facts["episodes"] == 1
            assert facts["episode_length_mean"] == 10
        # What is collected by hand does not count.
        for _ in range(2):
            collector.rollout()
        assert collector.stats()["episodes"] == 1
        for _ in range(2):
            collector.next()
        facts = collector.stats()
    assert facts["episodes"] == 2
    busy = facts["env_seconds"] + facts["policy_seconds"] + facts["overhead_seconds"]
    assert busy == pytest.approx(facts["wait_seconds"])


# --- what limits

# A batch has four steps of this length, which exceed everything else on a machine that isn't busy.
LONG = 0.02
# A busy one may stand still for longer, but not each time.
TIMES = 20


class SlowEnv(NumberedEnv):
    """Takes its time for each step, if it is one of those that are slow."""

    slow = (0, 1)

    def step(self, action):
        if self.number in self.slow:
            time.sleep(LONG)
        return super().step(action)


class Straggling(SlowEnv):
    slow = (1,)


class SlowToReset(NumberedEnv):
    """Takes its time to begin an episode after the first one."""

    resets = 0

    def reset(self, **options):
        self.resets += 1
        if self.resets > 1:
            time.sleep(4 * LONG)
        return super().reset(**options)


class SlowPolicy(Chooser):
    def forward(self, observation):
        time.sleep(LONG)
        return super().forward(observation)


class SlowToLoad(Chooser):
    """Takes its time to load new weights."""

    def get_extra_state(self):
        return {"time": time.perf_counter()}

    def set_extra_state(self, state):
        time.sleep(4 * LONG)


def wait_before_delivery(batch):
    time.sleep(4 * LONG)
    return batch


def limited_by(kind=NumberedEnv, learn=0.0, update=False, policy=None, **options):
    """Returns the bottleneck of a collector with two workers."""
    sources = envs(2, kind=kind)
    options = {"frames_per_batch": 8, "total_frames": 48} | options
    with MultiSyncCollector(sources, policy, start_method="forkserver", **options) as collector:
        for _ in collector:
            time.sleep(learn)
            if update:
                collector.update_policy_weights_()
        return collector.bottleneck()


def acting(network):
    return TensorDictModule(network, ["observation"], ["action"])


@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("straggler", {"kind": Straggling}),
        ("environment", {"kind": SlowEnv}),
        ("policy", {"policy": acting(SlowPolicy())}),
        ("weights", {"policy": acting(SlowToLoad()), "update": True}),
        ("learner", {"learn": 4 * LONG}),
        ("driver", {"postproc": wait_before_delivery}),
    ],
)
def test_the_part_that_limits_is_found(part, options):
    tries = (limited_by(**options) for _ in range(TIMES))
    worker = 1 if part == "straggler" else None
    assert any(
        (found.part, found.worker) == (part, worker) and found.share > 0.5 for found in tries
    )


def test_resets_count_for_the_environment():
    def limit():
        source = partial(SlowToReset, lengths=[30])
        with Collector(source, acting(Chooser()), frames_per_batch=60) as collector:
            collector.next()
            assert collector.env.env.resets == 3
            return collector.bottleneck().part

    assert any(limit() == "environment" for _ in range(TIMES))


def test_a_collector_without_workers_tells_what_limits_it():
    def limits():
        with Collector(SlowEnv, frames_per_batch=4, total_frames=8) as collector:
            assert collector.bottleneck().part == "unknown"
            collector.next()
            first = collector.bottleneck().part
            time.sleep(20 * LONG)
            collector.next()
            return first, collector.bottleneck().part

    assert any(limits() == ("environment", "learner") for _ in range(TIMES))
