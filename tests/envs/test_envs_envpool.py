"""EnvPool's environments, checked against the equations of the cart and its pole."""

import numpy as np
import pytest
import torch
from libraries import require

from trawl.collectors import Collector
from trawl.envs import GymEnv

require("envpool")


def made(**options):
    import envpool

    return envpool.make_gymnasium("CartPole-v1", **options)


@pytest.fixture
def pool():
    return made(num_envs=4, seed=3)


def dynamics(state, push):
    """The state after one step (R. Sutton's cart-pole, by Euler's method as in Gymnasium)."""
    _, x_dot, theta, theta_dot = state.double().unbind(-1)
    force = torch.where(push.bool(), 10.0, -10.0).double()
    cos, sin = theta.cos(), theta.sin()
    temp = (force + 0.05 * theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    x_acc = temp - 0.05 * theta_acc * cos / 1.1
    rates = torch.stack([x_dot, x_acc, theta_dot, theta_acc], -1)
    return state.double() + 0.02 * rates


def check(batch, before, limit=None):
    """Every frame is a true step, and follows the one before or begins an episode."""
    observation, following = batch["observation"], batch["next", "observation"]
    expected = dynamics(observation, batch["action"].argmax(-1))
    torch.testing.assert_close(following.double(), expected, rtol=1e-4, atol=1e-4)
    fallen = (following[..., 0].abs() > 2.4) | (following[..., 2].abs() > 12 * np.pi / 180)
    assert torch.equal(batch["next", "terminated"][..., 0], fallen)
    lasts = [before, *[batch[:, t] for t in range(batch.shape[1])]]
    for t in range(batch.shape[1]):
        for index in range(batch.shape[0]):
            last = lasts[t] if lasts[t] is None else lasts[t][index]
            if last is None or last["next", "done"]:
                assert observation[index, t].abs().max() <= 0.05
            else:
                assert torch.equal(observation[index, t], last["next", "observation"])
    if limit is not None:
        assert (batch["next", "step_count"] <= limit).all()
    return batch[:, -1]


@pytest.mark.parametrize("limit", [None, 7])
def test_every_frame_is_a_true_step(pool, limit):
    with Collector(
        pool, frames_per_batch=160, total_frames=480, max_frames_per_traj=limit
    ) as collector:
        last, ended = None, 0
        for batch in collector:
            last = check(batch, last, limit)
            ended += int(batch["next", "done"].sum())
        assert collector.stats()["env_path"] == "array"
    assert ended > 10


def test_some_can_be_reset(pool):
    with Collector(pool, frames_per_batch=12) as collector:
        before = collector.next()
        collector.reset([0, 2])
        after = collector.next()
    begun = after["observation"][:, 0].abs().amax(-1) <= 0.05
    assert begun[[0, 2]].all()
    for index in (1, 3):
        if not before["next", "done"][index, -1]:
            last = before["next", "observation"][index, -1]
            assert torch.equal(after["observation"][index, 0], last)
    ids = [batch["collector", "traj_ids"] for batch in (before, after)]
    assert set(ids[0][[0, 2], -1].tolist()).isdisjoint(ids[1][[0, 2], 0].tolist())


def test_its_seed_is_given_when_it_is_made(pool):
    env = GymEnv(pool)
    env.set_seed(3)
    with pytest.raises(ValueError, match=r"takes its seed when it is made: use envpool\.make"):
        env.reset()
    with pytest.raises(ValueError, match="takes its seed when it is made"):
        env.reset(seed=3)
    first, second = (GymEnv(made(num_envs=2, seed=5)) for _ in range(2))
    assert torch.equal(first.reset()["observation"], second.reset()["observation"])
