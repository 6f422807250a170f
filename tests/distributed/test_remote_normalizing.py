"""Statistics for normalisation that workers on other machines share."""

import pytest
from distributed_parts import CLASSES, kill_one, make

OPTIONS = {"normalize_observations": True, "normalize_rewards": True, "frames_per_batch": 40}


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
