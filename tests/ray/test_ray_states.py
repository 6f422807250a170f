"""A RayCollector continues from a state, and from snapshots of its actors, bit for bit."""

import io

import pytest
import torch
from multi_parts import same
from ray_parts import kill
from test_ray_collector import Noisy, collector

from trawl.collectors import MultiSyncCollector

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.usefixtures("sent_by_value")]
SOURCE = ["Pendulum-v1"] * 2


def policy():
    torch.manual_seed(0)
    return Noisy()


def batches(collector, count):
    return [collector.next().clone() for _ in range(count)]


def test_a_collector_continues(tmp_path):
    with collector(SOURCE, policy(), frames_per_batch=40) as first:
        first.set_seed(1)
        first.next()
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        first.checkpoint(tmp_path)
        expected = batches(first, 3)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    for load in ("load_state_dict", "load_checkpoint"):
        with collector(SOURCE, policy(), frames_per_batch=40) as other:
            getattr(other, load)(state if load == "load_state_dict" else tmp_path)
            found = batches(other, 3)
        assert all(same(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.filterwarnings("ignore:worker 0 .* a new worker takes its place:RuntimeWarning")
def test_a_kill_changes_no_frame(every):
    inline = {"frames_per_batch": 40, "start_method": "inline"}
    with MultiSyncCollector(SOURCE, policy(), **inline) as first:
        first.set_seed(1)
        expected = batches(first, 8)
    with collector(SOURCE, policy(), frames_per_batch=40, worker_snapshots=every) as other:
        other.set_seed(1)
        found = batches(other, 5)
        kill(other.remote_collectors[0])
        found += batches(other, 3)
        assert other.stats()["restarts"] == 1
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
