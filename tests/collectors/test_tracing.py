"""Timelines that collectors write."""

import gc
import os
import threading
import warnings
from functools import partial

import pytest
from collector_parts import Buffer, by_step
from multi_parts import CLASSES, envs, make, until_it_fails
from tensordict.nn import TensorDictModule
from torch import nn
from trace_parts import (
    assert_lanes_nest,
    assert_learner,
    assert_sums,
    assert_whole,
    delivered,
    drawn,
    reasons,
)

from trawl.collectors import AsyncBatchedCollector, Collector, MultiAsyncCollector
from trawl.observe import TraceOptions, read_trace
from trawl.testing import FaultyEnv, NumberedEnv

SYNC, ASYNC = CLASSES


def names(timeline, lane):
    return [span.name for span in timeline.lane(lane)]


def network():
    return TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])


# --- without workers


@pytest.mark.parametrize("detail", ["batch", "step"])
def test_a_collector_draws_its_batches_and_the_learner(tmp_path, detail):
    path = tmp_path / "run.json.gz"
    options = {"frames_per_batch": 600, "total_frames": 3000, "track_policy_version": True}
    trace = TraceOptions(path, detail)
    with Collector("Pendulum-v1", network(), trace=trace, **options) as collector:
        for _ in collector:
            collector.update_policy_weights_()
    stats, timeline = collector.stats(), read_trace(path)
    assert_lanes_nest(timeline)
    assert_learner(timeline, stats)
    assert_sums(timeline, "collector", stats)
    assert names(timeline, "collector")[:3] == ["batch", "policy", "env"]
    assert names(timeline, "learner")[:4] == ["collect", "wait", "learn", "update"]
    assert names(timeline, "learner").count("update") == 5
    assert names(timeline, "learner").count("learn") == 4
    batches = [span for span in timeline.lane("collector") if span.name == "batch"]
    assert [span.args["frames"] for span in batches] == [600] * 5
    assert timeline.counters["policy version"][-1][1] == 5
    assert timeline.counters["batches held"][-1][1] == stats["batches_held"]
    assert timeline.counters["memory"][-1][1] == stats["memory_bytes"]
    assert timeline.counters["process memory"][-1][1] > 0
    rates = [rate for _, rate in timeline.counters["frames/s"]]
    # A busy machine may stand still between batches, but not each time.
    assert any(
        rate == pytest.approx(600 / batch.seconds, rel=0.5)
        for rate, batch in zip(rates, batches, strict=False)
    )
    assert timeline.info["detail"] == detail
    assert (timeline.info["clocks"], timeline.info["steps_dropped"]) == ([], 0)
    # Eight steps in each chunk of 512, and all chunks are shown.
    steps = ["act", "step"] * (5 * 2 * 8)
    assert ("collector steps" in timeline.lanes) == (detail == "step")
    assert names(timeline, "collector steps") == (steps if detail == "step" else [])


def test_steps_are_recorded_only_for_a_timeline_of_steps(tmp_path):
    with Collector(NumberedEnv, by_step(), frames_per_batch=20) as collector:
        collector.next()
        assert collector.parts.loop.rollout.pop_steps() is None
        with collector.trace(TraceOptions(tmp_path / "steps.json.gz", "step")):
            for _ in range(3):
                collector.next()
        collector.next()
        assert collector.parts.loop.rollout.pop_steps() is None
        with collector.trace(tmp_path / "batches.json.gz"):
            collector.next()
    timeline = read_trace(tmp_path / "steps.json.gz")
    batches = [span for span in timeline.lane("collector") if span.name == "batch"]
    steps = timeline.lane("collector steps")
    assert len(steps) == 3 * 16
    for step in steps:
        assert sum(one.start <= step.start and step.end <= one.end for one in batches) == 1
    assert read_trace(tmp_path / "batches.json.gz").lanes == ["learner", "collector"]


class Twice(Collector):
    """Collects each batch in two parts, of which only the last one's times are known."""

    def rollout(self):
        super().rollout()
        return super().rollout()


def test_a_batch_of_several_rollouts(tmp_path):
    path = tmp_path / "run.json.gz"
    with Twice(NumberedEnv, by_step(), frames_per_batch=20, trace=path) as collector:
        for _ in range(5):
            collector.next()
    assert_lanes_nest(read_trace(path))
    assert_sums(read_trace(path), "collector", collector.stats())


def test_background_collection_and_updates_of_another_thread(tmp_path):
    path = tmp_path / "run.json.gz"
    options = {"frames_per_batch": 20, "total_frames": -1, "replay_buffer": Buffer()}
    collector = Collector("Pendulum-v1", network(), trace=path, **options)
    collector.start()
    while collector.stats()["batches"] < 10:
        collector.update_policy_weights_()
    # The other thread takes batches now.
    collector.update_policy_weights_()
    collector.async_shutdown()
    timeline, stats = read_trace(path), collector.stats()
    assert_lanes_nest(timeline)
    assert_learner(timeline, stats)
    assert_sums(timeline, "collector", stats)
    assert names(timeline, "collector").count("batch") == stats["batches"] >= 10
    assert "update" in names(timeline, "updates")


def test_an_inference_process(tmp_path):
    path = tmp_path / "run.json.gz"
    options = {"frames_per_batch": 50, "total_frames": 500, "policy_backend": "multiprocessing"}
    collector = AsyncBatchedCollector([NumberedEnv] * 4, policy=by_step(), trace=path, **options)
    with collector:
        assert sum(len(batch) for batch in collector) == 500
    assert_whole(read_trace(path), collector.stats("both"), workers=1)


# --- with workers


@pytest.mark.parametrize(
    ("cls", "method", "detail"),
    [
        (SYNC, "messages", "step"),
        (ASYNC, "inline", "batch"),
        (ASYNC, "forkserver", "step"),
    ],
)
def test_workers_draw_their_batches(tmp_path, cls, method, detail):
    path = tmp_path / "run.json.gz"
    trace = TraceOptions(path, detail)
    options = {"frames_per_batch": 20, "total_frames": 200, "track_policy_version": True}
    collector = make(
        cls, policy=network(), create_env_fn=["Pendulum-v1"] * 2, trace=trace,
        start_method=method, **options,
    )  # fmt: skip
    with collector:
        for _ in collector:
            collector.update_policy_weights_()
    timeline, stats = read_trace(path), collector.stats("both")
    assert_whole(timeline, stats)
    # Which batches are delivered is known: all that were drawn.
    assert sorted(delivered(timeline)) == sorted(drawn(timeline, 2))
    assert {"env", "policy", "weights", "batch", "wait"} >= set(names(timeline, "worker 0"))
    assert "weights" in names(timeline, "worker 0") + names(timeline, "worker 1")
    assert names(timeline, "learner").count("update") == stats["batches"]
    assert timeline.counters["policy version"][-1][1] == stats["policy_version"]
    assert {"policy lag", "batches held", "memory", "frames/s"} <= set(timeline.counters)
    assert [clock["error"] for clock in timeline.info["clocks"]] == [0, 0]
    assert [clock["lane"] for clock in timeline.info["clocks"]] == ["worker 0", "worker 1"]
    steps = names(timeline, "worker 0 steps")
    count = names(timeline, "worker 0").count("batch")
    assert steps == (["act", "step"] * (8 * count) if detail == "step" else [])


@pytest.mark.parametrize(
    ("cls", "options", "reason"),
    [
        (SYNC, {}, "together"),
        (SYNC, {"prefetch": 1}, "together"),
        (SYNC, {"preemptive_threshold": 0.5, "start_method": "forkserver"}, None),
        (SYNC, {"update_at_each_batch": True}, "together"),
        (ASYNC, {}, "taken"),
        (ASYNC, {"max_policy_lag": 0}, "max_policy_lag"),
    ],
    ids=str,
)
def test_the_timeline_says_why_workers_wait(tmp_path, cls, options, reason):
    path = tmp_path / "run.json.gz"
    options = {"policy": network(), "create_env_fn": ["Pendulum-v1"] * 2, **options}
    with make(cls, trace=path, frames_per_batch=20, total_frames=200, **options) as collector:
        list(collector)
    assert_whole(read_trace(path), collector.stats("both"))
    assert reason is None or reasons(path, 2) == {reason}


@pytest.mark.parametrize("background", [True, False])
def test_workers_that_write_into_a_buffer(tmp_path, background):
    """Batches that are counted only when the collector is closed are drawn, too."""
    from torchrl.data import LazyMemmapStorage, ReplayBuffer

    path = tmp_path / "run.json.gz"
    buffer = ReplayBuffer(storage=LazyMemmapStorage(10_000), shared=True)
    options = {"frames_per_batch": 20, "replay_buffer": buffer, "trace": path}
    options["total_frames"] = 400 if background else -1
    with MultiAsyncCollector(envs(2), by_step(), **options) as collector:
        if background:
            collector.start()
            while collector.is_running():
                collector.stats()
            collector.async_shutdown()
        else:
            for _ in range(3):
                collector.next()
            while not collector._pool.batches:
                collector._pool._pump(None)
    timeline = read_trace(path)
    assert collector.stats()["batches"] > 3
    assert_whole(timeline, collector.stats("both"))
    assert sorted(delivered(timeline)) == sorted(drawn(timeline, 2))


@pytest.mark.filterwarnings("ignore:worker 0 was killed:RuntimeWarning")
@pytest.mark.parametrize("cls", CLASSES, ids=["sync", "async"])
def test_a_worker_that_is_replaced(tmp_path, cls):
    path = tmp_path / "run.json.gz"
    options = {"frames_per_batch": 20, "trace": path, "start_method": "forkserver"}
    collector = make(cls, **options)
    with collector:
        collector.next()
        collector._pool.slots[0].worker.kill()
        while not collector.stats()["restarts"]:
            collector.next()
        # The replacement makes batches, too.
        before = collector.stats("both")["worker_0/batches"]
        while collector.stats("both")["worker_0/batches"] < before + 3:
            collector.next()
    timeline = read_trace(path)
    assert_whole(timeline, collector.stats("both"))
    (died,) = (one for one in timeline.instants if one.name == "died")
    (restart,) = (span for span in timeline.lane("worker 0") if span.name == "restart")
    assert died.lane == "worker 0"
    assert restart.start == pytest.approx(died.at)
    assert restart.seconds > 0
    after = [span for span in timeline.lane("worker 0") if span.start > restart.end]
    assert [span.name for span in after].count("batch") >= 3
    assert [clock["restart"] for clock in timeline.info["clocks"]] == [0, 1, 0]


def test_a_run_that_fails_leaves_a_timeline(tmp_path):
    path = tmp_path / "run.json.gz"
    collector = make(
        create_env_fn=[partial(FaultyEnv, 35, RuntimeError("broken")), NumberedEnv], trace=path
    )
    with pytest.raises(RuntimeError, match="broken"):
        until_it_fails(collector)
    timeline = read_trace(path)
    assert_lanes_nest(timeline)
    assert len(delivered(timeline)) == 2 * collector.stats()["batches"] > 0


# --- beginning and end


@pytest.mark.parametrize("cls", CLASSES, ids=["sync", "async"])
def test_a_timeline_of_a_part_of_a_run(tmp_path, cls):
    path = tmp_path / "run.json.gz"
    with make(cls, start_method="forkserver", frames_per_batch=20) as collector:
        collector.next()
        with collector.trace(path):
            for _ in range(3):
                collector.next()
        timeline = read_trace(path)
        assert_lanes_nest(timeline)
        assert len(delivered(timeline)) == (6 if cls is SYNC else 3)
        assert [span.args["frames"] for span in timeline.spans if span.name == "collect"] == (
            [20] * 3
        )
        content = path.read_bytes()
        collector.next()
    assert path.read_bytes() == content
    assert not any(slot.lane for slot in collector._pool.slots)


def test_no_trace_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for cls in (Collector, SYNC):
        with make(cls) as collector:
            collector.next()
    assert os.listdir(tmp_path) == []


def test_a_shutdown_ends_a_timeline(tmp_path):
    path = tmp_path / "run.json.gz"
    collector = Collector(NumberedEnv, by_step(), frames_per_batch=20)
    with collector.trace(path):
        collector.next()
        collector.shutdown()
        assert read_trace(path).complete
    assert read_trace(path).complete
    with pytest.raises(RuntimeError, match=r"trace\(\) failed because the collector was shut down"):
        collector.trace(path)


@pytest.mark.parametrize("of_constructor", [True, False])
def test_one_timeline_after_the_other(tmp_path, of_constructor):
    first, second = tmp_path / "first.json.gz", tmp_path / "second.json.gz"
    options = {"trace": first} if of_constructor else {}
    with Collector(NumberedEnv, by_step(), frames_per_batch=20, **options) as collector:
        if not of_constructor:
            for number in range(3):
                with collector.trace(first):
                    for _ in range(number):
                        collector.next()
                assert names(read_trace(first), "collector").count("batch") == number
            collector.trace(first)
        with pytest.raises(RuntimeError, match="because this collector is already writing one"):
            collector.trace(second)
        collector.next()
    assert not second.exists()
    assert names(read_trace(first), "collector").count("batch") == 1


def constructor(trace):
    Collector(NumberedEnv, by_step(), frames_per_batch=20, trace=trace)


def method(trace):
    with Collector(NumberedEnv, by_step(), frames_per_batch=20) as collector:
        collector.trace(trace)


@pytest.mark.parametrize("begin", [constructor, lambda trace: make(trace=trace), method])
def test_a_file_that_can_not_be_written_is_an_error_of_the_call(tmp_path, begin):
    none = r"must be the path of a file, but it is None"
    for trace, error, text in (
        (tmp_path / "nowhere" / "run.json.gz", FileNotFoundError, r"can't be written to .*nowhere"),
        (tmp_path, IsADirectoryError, "can't be written"),
        (7, TypeError, "must be the path of a file, or"),
        ("", ValueError, "must name a file"),
        *([(None, TypeError, none)] if begin is method else []),
        *([("/dev/full", OSError, "No space left")] if os.path.exists("/dev/full") else []),
    ):
        with pytest.raises(error, match=f"trace {text}" if trace != "/dev/full" else text):
            begin(trace)


@pytest.mark.parametrize("cls", [Collector, *CLASSES])
def test_a_constructor_that_fails_closes_the_file(tmp_path, cls):
    path = tmp_path / "run.json.gz"

    def fail():
        raise RuntimeError("no environment")

    options = {} if cls is Collector else {"start_method": "inline"}
    with pytest.raises(RuntimeError, match="no environment"):
        cls([fail], by_step(), frames_per_batch=20, trace=path, **options)
    gc.collect()
    assert read_trace(path).complete
    assert read_trace(path).spans == []


def test_a_disk_that_gets_full_is_one_warning(tmp_path):
    path = tmp_path / "run.json.gz"
    with Collector(NumberedEnv, by_step(), frames_per_batch=5, trace=path) as collector:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, collector.parts.timeline.tracer.writer._file._file.fileno())
        os.close(full)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(400):
                collector.next()
    assert [str(one.message).split(",")[0] for one in found] == [f"the timeline {path} ends here"]
    assert not read_trace(path).complete


def test_updates_of_several_threads_have_lanes_of_their_own(tmp_path):
    path = tmp_path / "run.json.gz"
    with Collector("Pendulum-v1", network(), frames_per_batch=20, trace=path) as collector:
        collector.next()
        barrier = threading.Barrier(2)

        def update():
            barrier.wait()
            collector.update_policy_weights_()
            barrier.wait()

        threads = [threading.Thread(target=update) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        collector.update_policy_weights_()
    timeline = read_trace(path)
    assert_lanes_nest(timeline)
    for lane in ("learner", "updates", "updates 2"):
        assert names(timeline, lane).count("update") == 1
