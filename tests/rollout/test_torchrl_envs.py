"""TorchRL's environments, by their protocol: the same frames as from ours."""

import pytest

from trawl.collectors import Collector
from trawl.envs import GymEnv

torchrl_envs = pytest.importorskip("torchrl.envs")


def test_a_batch_has_the_keys_of_a_gymnasium_environment():
    options = {"frames_per_batch": 4, "max_frames_per_traj": 3}
    with (
        Collector(torchrl_envs.GymEnv("Pendulum-v1"), **options) as theirs,
        Collector(GymEnv("Pendulum-v1"), **options) as ours,
    ):
        expected, found = theirs.next(), ours.next()
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in found.keys(True, True):
        assert found[key].shape == expected[key].shape
        assert found[key].dtype == expected[key].dtype
