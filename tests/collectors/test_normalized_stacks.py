"""Collectors that both stack and normalise."""

import pytest
import torch
from stack_parts import SIZE, Env

from trawl import Collector
from trawl.collectors import NormalizeObservation
from trawl.envs import FrameStack


def batches(count=3, **options):
    """Collects batches that end inside an episode."""
    with Collector(Env(0, (3, 9), None), frames_per_batch=25, **options) as collector:
        collector.set_seed(0)
        return [collector.next().clone() for _ in range(count)]


def test_rewards_are_normalised_beside_stacks():
    found = batches(frame_stack=SIZE, normalize_rewards=True)
    stacked, normalized = batches(frame_stack=SIZE), batches(normalize_rewards=True)
    for batch, stacks, rewards in zip(found, stacked, normalized, strict=True):
        for key in ("observation", ("next", "observation")):
            assert torch.equal(batch[key], stacks[key])
        assert torch.equal(batch["next", "reward"], rewards["next", "reward"])
        assert not torch.equal(batch["next", "reward"], stacks["next", "reward"])


def test_an_observation_is_not_both_stacked_and_normalised():
    with pytest.raises(ValueError, match=r"can't both change \['observation'\]: choose"):
        Collector(
            "CartPole-v1",
            frames_per_batch=10,
            frame_stack=FrameStack(2),
            normalize_observations=NormalizeObservation(),
        )


def test_the_discount_of_dm_env_is_neither_stacked_nor_normalised():
    pytest.importorskip("dm_control")
    name = "dm_control:cartpole/swingup"
    for options in ({"normalize_observations": True}, {"frame_stack": 3}):
        with Collector(name, frames_per_batch=50, **options) as collector:
            discounts = collector.next()["next", "discount"]
        assert discounts.shape == (50, 1)
        assert (discounts == 1).all()
