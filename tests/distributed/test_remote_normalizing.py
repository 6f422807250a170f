"""Statistics for normalisation that workers on other machines share."""

import numpy as np
import pytest
from distributed_parts import CLASSES, kill_one, make

from trawl.collectors import MultiSyncCollector

OPTIONS = {"normalize_observations": True, "normalize_rewards": True, "frames_per_batch": 40}


def collected(collector):
    with collector:
        collector.set_seed(1)
        found = [collector.next().clone() for _ in range(3)]
        return found, collector.normalization.observations["observation"]


def test_batches_and_statistics_are_those_of_local_workers():
    found, own = collected(make(CLASSES[0], sync=True, policy=None, **OPTIONS))
    expected, same = collected(MultiSyncCollector(["Pendulum-v1"] * 2, **OPTIONS))
    for one, other in zip(found, expected, strict=True):
        assert (one.reshape(-1) == other.reshape(-1)).all()
    assert own.count == 120
    assert np.array_equal(own.mean, same.mean)
    assert np.array_equal(own.var, same.var)


@pytest.mark.filterwarnings("ignore:worker 0 .* a new worker takes its place:RuntimeWarning")
def test_frames_of_a_dead_worker_are_counted_once():
    with make(CLASSES[1], sync=True, **OPTIONS) as collector:
        collector.next()
        kill_one(collector)
        for _ in range(2):
            collector.next()
        assert collector.normalization.observations["observation"].count == 120


def test_workers_of_workers_share_the_statistics():
    options = {"collector_class": "sync", "num_workers_per_collector": 2, "num_workers": 1}
    options["collector_kwargs"] = {"start_method": "inline"}
    with make(CLASSES[0], sync=True, **OPTIONS, **options) as collector:
        frames = sum(collector.next().numel() for _ in range(3))
        assert collector.normalization.observations["observation"].count == frames
        assert collector.next()["observation"].abs().max() < 8
