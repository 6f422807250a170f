"""Batches of few frames, whose memory is bound once."""

from __future__ import annotations

from typing import Any

import gymnasium
import pytest
import torch

from trawl import Collector
from trawl.envs import GymEnv, SerialEnv


class Doubled(gymnasium.RewardWrapper[Any, Any]):
    """Doubles the rewards."""

    def reward(self, reward: Any) -> Any:
        return 2 * reward


@pytest.mark.parametrize("several", [False, True])
def test_a_wrapper_that_is_added_between_batches_takes_effect(several: bool) -> None:
    one = GymEnv("CartPole-v1")
    env: Any = SerialEnv(2, [lambda: one, "CartPole-v1"]) if several else one
    with Collector(env, frames_per_batch=4) as collector:
        before = [collector.next() for _ in range(3)]
        one.env = Doubled(one.env)
        after = [collector.next() for _ in range(3)]
    rewards = torch.stack(
        [batch["next", "reward"].reshape(-1, 4 // (1 + several)) for batch in after]
    )
    assert (rewards[:, 0] == 2).all()
    assert not several or (rewards[:, 1] == 1).all()
    assert all((batch["next", "reward"] == 1).all() for batch in before)


def test_methods_that_are_replaced_between_batches_take_effect() -> None:
    env = GymEnv("CartPole-v1")
    with Collector(env, frames_per_batch=4) as collector:
        collector.next()
        step = env.env.step

        def rewarded(action: Any) -> Any:
            obs, _, *rest = step(action)
            return obs, 100.0, *rest

        env.env.step = rewarded
        assert (collector.next()["next", "reward"] == 100).all()
