"""Timelines of Ray actors, whose clocks are aligned."""

import pytest
from multi_parts import envs
from ray_parts import kill
from trace_parts import assert_whole, delivered, drawn

from trawl.collectors.distributed import RayCollector
from trawl.observe import TraceOptions, read_trace

pytestmark = pytest.mark.usefixtures("cluster")
FREE = {"num_cpus": 0, "memory": 0}


def make(path, sync=True, **options):
    options = {"remote_configs": FREE, "frames_per_batch": 12, "total_frames": 120, **options}
    return RayCollector(envs(2), None, sync=sync, trace=path, **options)


def assert_aligned(timeline):
    """Checks that the true offset, which is 0 here, is within the error of the estimate."""
    # Of a worker that has not finished a batch yet, nothing is known.
    known = [clock for clock in timeline.info["clocks"] if clock["error"] is not None]
    assert known
    for clock in known:
        assert clock["error"] > 0
        assert abs(clock["offset"]) <= clock["error"]


@pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])
def test_actors_draw_their_batches(tmp_path, sync):
    path = tmp_path / "run.json.gz"
    with make(TraceOptions(path, "step"), sync) as collector:
        assert sum(batch.numel() for batch in collector) == 120
    timeline = read_trace(path)
    assert_whole(timeline, collector.stats("both"))
    assert sorted(delivered(timeline)) == sorted(drawn(timeline, 2))
    assert_aligned(timeline)
    assert any(lane.endswith(" steps") for lane in timeline.lanes)


@pytest.mark.parametrize("kind", ["sync", pytest.param("async", marks=pytest.mark.long)])
def test_actors_whose_collectors_have_workers(tmp_path, kind):
    path = tmp_path / "run.json.gz"
    options = {"collector_class": kind, "num_workers_per_collector": 2}
    with make(TraceOptions(path, "step"), **options) as collector:
        for _ in collector:
            pass
    timeline = read_trace(path)
    assert_whole(timeline, collector.stats("both"), nested=True)
    assert_aligned(timeline)
    # The steps of their workers are not drawn.
    assert timeline.lanes == ["learner", "scheduler", "worker 0", "worker 1"]


@pytest.mark.filterwarnings("ignore:worker 0 .*a new worker takes:RuntimeWarning")
def test_an_actor_that_is_replaced(tmp_path):
    path = tmp_path / "run.json.gz"
    with make(path, total_frames=-1) as collector:
        collector.next()
        kill(collector.remote_collectors[0])
        while not collector.stats()["restarts"]:
            collector.next()
        for _ in range(3):
            collector.next()
    timeline = read_trace(path)
    assert_whole(timeline, collector.stats("both"))
    assert [span.name for span in timeline.lane("worker 0")].count("restart") == 1
    assert_aligned(timeline)


def test_workers_that_are_added(tmp_path):
    path = tmp_path / "run.json.gz"
    with make(path, total_frames=-1) as collector:
        collector.next()
        collector.add_collectors(envs(3)[2:])
        for _ in range(3):
            collector.next()
    assert_whole(read_trace(path), collector.stats("both"), workers=3)
