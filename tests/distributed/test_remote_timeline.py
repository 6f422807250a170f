"""Timelines of ranks and RPC workers, whose clocks are aligned."""

import os
import shutil
import subprocess

import pytest
from distributed_parts import CLASSES, exhaust, kill_one, make
from trace_parts import assert_whole, delivered, drawn

from trawl.collectors.distributed import DistributedSyncCollector
from trawl.errors import WorkerDied
from trawl.observe import TraceOptions, read_trace

# Seconds by which the clocks of workers in a time namespace are ahead.
AHEAD = 5000.0


def assert_aligned(timeline, offset=0.0):
    """Checks that the true offset of each clock is within the error of the estimate."""
    # Of a worker that has not finished a batch yet, nothing is known.
    known = [clock for clock in timeline.info["clocks"] if clock["error"] is not None]
    assert known
    for clock in known:
        assert clock["error"] > 0
        assert abs(clock["offset"] - offset) <= clock["error"]


def assert_between_request_and_delivery(timeline, workers=2):
    """Checks that each batch is drawn after its request and before its delivery."""
    errors = {clock["lane"]: clock["error"] for clock in timeline.info["clocks"]}
    at = {
        kind: {one.args["request"]: one.at for one in timeline.instants if one.name == kind}
        for kind in ("request", "deliver")
    }
    for index in range(workers):
        lane = f"worker {index}"
        for span in timeline.lane(lane):
            number = span.args.get("request")
            if number in at["deliver"]:
                assert at["request"][number] - errors[lane] <= span.start
                assert span.end <= at["deliver"][number] + errors[lane]


@pytest.mark.parametrize(
    ("cls", "sync", "detail"), [(CLASSES[0], True, "step"), (CLASSES[1], False, "batch")]
)
def test_workers_draw_their_batches(tmp_path, cls, sync, detail):
    path = tmp_path / "run.json.gz"
    trace = TraceOptions(path, detail)
    with make(cls, sync=sync, trace=trace, total_frames=400) as collector:
        for _ in collector:
            collector.update_policy_weights_()
    timeline = read_trace(path)
    assert_whole(timeline, collector.stats("both"))
    assert sorted(delivered(timeline)) == sorted(drawn(timeline, 2))
    assert_aligned(timeline)
    assert_between_request_and_delivery(timeline)
    assert any(lane.endswith(" steps") for lane in timeline.lanes) == (detail == "step")


def test_the_synchronous_class(tmp_path):
    path = tmp_path / "run.json.gz"
    with make(DistributedSyncCollector, trace=path, total_frames=400) as collector:
        for _ in collector:
            pass
    assert_whole(read_trace(path), collector.stats("both"))
    assert_aligned(read_trace(path))


def test_a_worker_whose_collector_has_workers(tmp_path):
    path = tmp_path / "run.json.gz"
    options = {"collector_class": "async", "num_workers_per_collector": 2, "total_frames": 400}
    options["collector_kwargs"] = {"start_method": "inline"}
    with make(CLASSES[0], trace=path, **options) as collector:
        for _ in collector:
            pass
    assert_whole(read_trace(path), collector.stats("both"), nested=True)


@pytest.mark.filterwarnings("ignore:(?s)worker 0 .*a new worker takes:RuntimeWarning")
def test_a_worker_that_is_replaced(tmp_path):
    path = tmp_path / "run.json.gz"
    with make(CLASSES[0], sync=True, trace=path) as collector:
        collector.next()
        kill_one(collector)
        while not collector.stats()["restarts"]:
            collector.next()
        for _ in range(3):
            collector.next()
    timeline = read_trace(path)
    assert_whole(timeline, collector.stats("both"))
    assert [span.name for span in timeline.lane("worker 0")].count("restart") == 1
    assert [clock["restart"] for clock in timeline.info["clocks"]] == [0, 1, 0]
    assert_aligned(timeline)


def can_have_another_clock():
    """Returns True if programs can be started with a clock of their own."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    command = ["unshare", "--time", "--monotonic", "1", "--fork", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_have_another_clock(), reason="needs time namespaces")
@pytest.mark.filterwarnings("ignore:(?s)worker 0 .*a new worker takes:RuntimeWarning")
def test_workers_with_another_clock(tmp_path):
    """The lanes are moved to the driver's clock, and stay what they are."""
    path = tmp_path / "run.json.gz"
    command = f"exec unshare --time --monotonic {AHEAD:.0f} --fork --kill-child {{worker}}"
    options = {"launcher": "command", "launcher_command": command, "sync": True, "num_workers": 1}
    with make(CLASSES[0], trace=path, **options) as collector:
        for _ in range(5):
            collector.next()
        collector._pool.slots[0].worker.kill()
        while not collector.stats()["restarts"]:
            collector.next()
        before = collector.stats("both")["worker_0/batches"]
        while collector.stats("both")["worker_0/batches"] < before + 5:
            collector.next()
    timeline = read_trace(path)
    assert_whole(timeline, collector.stats("both"), 1)
    assert_aligned(timeline, AHEAD)
    assert_between_request_and_delivery(timeline, 1)
    assert all(0 <= span.start <= timeline.info["seconds"] for span in timeline.spans)
    assert os.listdir(tmp_path) == ["run.json.gz"]


@pytest.mark.skipif(not can_have_another_clock(), reason="needs time namespaces")
def test_a_run_that_fails_with_another_clock(tmp_path):
    path = tmp_path / "run.json.gz"
    command = f"exec unshare --time --monotonic {AHEAD:.0f} --fork --kill-child {{worker}}"
    options = {"launcher": "command", "launcher_command": command, "max_restarts": 0}
    options |= {"sync": True, "num_workers": 1}
    with make(CLASSES[0], trace=path, **options) as collector:
        collector.next()
        collector._pool.slots[0].worker.kill()
        with pytest.raises(WorkerDied, match="worker 0"):
            exhaust(collector)
    timeline = read_trace(path)
    assert_aligned(timeline, AHEAD)
    assert [one.name for one in timeline.instants if one.lane == "worker 0"] == ["died"]
