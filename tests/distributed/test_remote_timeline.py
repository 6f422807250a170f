"""Timelines of workers whose clocks are not the driver's."""

import os
import shutil
import subprocess

import pytest
from cluster_conformance import (
    assert_aligned,
    assert_between_request_and_delivery,
    until_one_is_replaced,
)
from distributed_parts import CLASSES, exhaust, make
from trace_parts import assert_whole

from trawl.errors import WorkerDied
from trawl.observe import read_trace

# Seconds by which the clocks of workers in a time namespace are ahead.
AHEAD = 5000.0


def can_have_another_clock():
    """Returns True if programs can be started with a clock of their own."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        return False
    command = ["unshare", "--time", "--monotonic", "1", "--fork", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_have_another_clock(), reason="needs time namespaces")
@pytest.mark.filterwarnings("ignore:(?s)worker 0 .*a new worker takes:RuntimeWarning")
def test_workers_with_another_clock(tmp_path):
    """The lanes are moved to the driver's clock, and stay what they are, also of a run that fails.

    That run is the part after the worker was replaced as often as it may be.
    """
    path = tmp_path / "run.json.gz"
    command = f"exec unshare --time --monotonic {AHEAD:.0f} --fork --kill-child {{worker}}"
    options = {"launcher": "command", "launcher_command": command, "sync": True, "num_workers": 1}
    with make(CLASSES[0], trace=path, max_restarts=1, **options) as collector:
        for _ in range(5):
            collector.next()
        collector._pool.slots[0].worker.kill()
        until_one_is_replaced(collector)
        before = collector.stats("both")["worker_0/batches"]
        while collector.stats("both")["worker_0/batches"] < before + 5:
            collector.next()
        collector._pool.slots[0].worker.kill()
        with pytest.raises(WorkerDied, match="worker 0"):
            exhaust(collector)
    timeline = read_trace(path)
    assert_whole(timeline, collector.stats("both"), 1)
    assert_aligned(timeline, AHEAD)
    assert_between_request_and_delivery(timeline, 1)
    assert all(0 <= span.start <= timeline.info["seconds"] for span in timeline.spans)
    own = [one.name for one in timeline.instants if one.lane == "worker 0"]
    assert own == ["died", "died"]
    assert [span.name for span in timeline.lane("worker 0")].count("restart") == 1
    assert os.listdir(tmp_path) == ["run.json.gz"]
