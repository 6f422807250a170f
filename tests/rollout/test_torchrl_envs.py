"""TorchRL's environments, by their protocol: the same frames as from ours."""

import pytest
import torch

from trawl.collectors import Collector
from trawl.envs import GymEnv
from trawl.testing import Ledger, NumberedEnv

torchrl_envs = pytest.importorskip("torchrl.envs")


def numbered(count):
    ends = ["terminated", "truncated", "both"]
    return [NumberedEnv(number, [3 + number, 1, 2], ends) for number in range(count)]


def wrapped(envs):
    return [torchrl_envs.GymWrapper(env) for env in envs]


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


def test_a_batch_that_is_changed_in_place_changes_no_later_one():
    envs = numbered(1)
    ledger = Ledger(envs)
    with Collector(*wrapped(envs), frames_per_batch=4) as collector:
        for _ in range(3):
            batch = collector.next()
            ledger.add(batch)
            batch.zero_()


def test_a_policy_that_returns_the_same_buffer_each_time_has_each_action_recorded():
    buffer = torch.zeros(4, dtype=torch.int64)

    def policy(tensordict):
        action = int(tensordict["observation"][3]) % 4
        return tensordict.set("action", buffer.zero_().index_fill_(0, torch.tensor(action), 1))

    envs = numbered(1)
    with Collector(*wrapped(envs), policy, frames_per_batch=8) as collector:
        batch = collector.next()
    assert batch["action"].argmax(-1).tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
