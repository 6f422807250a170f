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


@pytest.mark.parametrize("num_envs", [1, 3])
def test_batches_that_are_kept_do_not_change(num_envs: int) -> None:
    source = [lambda: GymEnv("CartPole-v1")] * num_envs
    with Collector(source, frames_per_batch=num_envs) as collector:
        kept = [collector.next() for _ in range(50)]
        copies = [batch.clone() for batch in kept]
        again = [collector.next() for _ in range(50)]
        assert all((one == copy).all() for one, copy in zip(kept, copies, strict=True))
        assert collector.stats()["batches_held"] == 100
        # Each frame goes on from the one before it.
        for one, other in zip([*kept, *again], [*kept[1:], *again], strict=False):
            ended = one["next", "done"].reshape(-1)
            same = one["next", "observation"] == other["observation"]
            assert (same.reshape(num_envs, -1).all(1) | ended).all()


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
