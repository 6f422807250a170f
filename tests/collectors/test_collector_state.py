import random

import gymnasium
import numpy as np
import pytest
import torch
from collector_parts import Scorer, first_batch

from trawl.collectors import Collector
from trawl.testing import NumberedEnv, SelfResettingVectorEnv

TRAJ_IDS = ("collector", "traj_ids")


def same(one, other):
    return bool((one == other).all())


def noisy():
    """A policy that draws from every global generator."""

    def policy(observation):
        draw = torch.rand(*observation.shape[:-1], 1) + np.random.rand() + random.random()
        return draw - 1.5

    return policy


# --- seeds


def test_without_a_seed_batches_differ():
    one, other = (first_batch("Pendulum-v1", frames_per_batch=10) for _ in range(2))
    assert not torch.equal(one["observation"], other["observation"])
    assert not torch.equal(one["action"], other["action"])


def test_a_seed_covers_random_frames():
    found = []
    for _ in range(2):
        with Collector(
            "Pendulum-v1", noisy(), frames_per_batch=20, init_random_frames=20
        ) as collector:
            collector.set_seed(5)
            iterator = iter(collector)
            found.append([next(iterator), next(iterator)])
    assert all(same(one, other) for one, other in zip(*found, strict=True))


def test_the_first_frame_after_a_seed_is_the_environments():
    env = gymnasium.make("Pendulum-v1")
    first, _ = env.reset(seed=9)
    with Collector("Pendulum-v1", noisy(), frames_per_batch=2) as collector:
        next(iter(collector))
        collector.set_seed(9)
        batch = next(iter(collector))
    second, reward, *_ = env.step(batch["action"][0].numpy())
    assert np.array_equal(batch["observation"][0].numpy(), first)
    assert np.array_equal(batch["next", "observation"][0].numpy(), second)
    assert batch["next", "reward"][0].item() == pytest.approx(reward, rel=1e-6)
    env.close()


# --- resets


def test_an_index_that_is_none_of_the_environments_is_refused():
    with (
        Collector([NumberedEnv, NumberedEnv], frames_per_batch=4) as collector,
        pytest.raises(IndexError, match=r"index 5 is out of bounds.* size 2"),
    ):
        collector.reset(5)


# --- checkpoints


def test_a_state_says_what_was_done():
    with Collector(
        NumberedEnv(), Scorer(2), frames_per_batch=5, total_frames=20, track_policy_version=True
    ) as collector:
        next(iter(collector))
        collector.increment_version()
        state = collector.state_dict()
    assert (state["frames"], state["iter"], state["policy_version"]) == (5, 1, 1)
    # Weights are named as in the user's policy.
    assert set(state["policy_state_dict"]) == set(Scorer().state_dict())
    assert state["policy_state_dict"]["scores"].tolist() == [0, 0, 1, 0]
    assert state["env_state_dict"] == {}
    assert int(state["traj_pool"]["traj_id"]) == 2


def test_ids_are_not_used_again_in_new_episodes():
    def vector():
        return SelfResettingVectorEnv([lambda: NumberedEnv(lengths=[2])])

    with Collector(vector(), frames_per_batch=5) as collector:
        seen = set(next(iter(collector))[TRAJ_IDS].reshape(-1).tolist())
        state = collector.state_dict()
    with Collector(vector(), frames_per_batch=5) as resumed:
        resumed.load_state_dict(state)
        assert seen & set(next(iter(resumed))[TRAJ_IDS].reshape(-1).tolist()) == {-1}


def test_weights_that_do_not_fit_are_refused():
    with Collector(NumberedEnv(), Scorer(), frames_per_batch=5) as collector:
        state = collector.state_dict() | {"policy_state_dict": {"other": torch.zeros(4)}}
        with pytest.raises(RuntimeError, match=r'Missing key.*"scores".*\n.*Unexpected.*"other"'):
            collector.load_state_dict(state)
