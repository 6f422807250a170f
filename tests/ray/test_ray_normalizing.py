"""Statistics for normalisation that the actors of a RayCollector share."""

import numpy as np
import pytest
from ray_parts import kill
from test_ray_collector import collector

from trawl.collectors import Evaluator, MultiSyncCollector

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.usefixtures("sent_by_value")]
SOURCE = ["Pendulum-v1"] * 2
OPTIONS = {"normalize_observations": True, "normalize_rewards": True, "frames_per_batch": 40}


def collected(source):
    with source:
        source.set_seed(1)
        found = [source.next().clone() for _ in range(3)]
        return found, source.normalization


def test_batches_and_statistics_are_those_of_local_workers():
    found, own = collected(collector(SOURCE, None, **OPTIONS))
    expected, same = collected(MultiSyncCollector(SOURCE, **OPTIONS))
    assert all(bool((a == b).all()) for a, b in zip(found, expected, strict=True))
    one, other = (n.observations["observation"] for n in (own, same))
    assert one.count == 120
    assert np.array_equal(one.mean, other.mean)
    options = {"num_trajectories": 2, "max_steps": 10, "normalization": own}
    with Evaluator("Pendulum-v1", act, backend="ray", **options) as judge:
        there = judge.evaluate()["eval/reward"]
    with Evaluator("Pendulum-v1", act, **options) as judge:
        assert judge.evaluate()["eval/reward"] == there


def act(observation):
    return observation[..., :1].clamp(-1, 1)


@pytest.mark.filterwarnings("ignore:worker 0 .* a new worker takes its place:RuntimeWarning")
def test_frames_of_a_dead_actor_are_counted_once():
    with collector(SOURCE, None, **OPTIONS) as source:
        source.next()
        kill(source.remote_collectors[0])
        for _ in range(2):
            source.next()
        assert source.normalization.observations["observation"].count == 120
