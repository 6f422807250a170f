"""Stacks of frames of several agents, and of JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dense_stacks import dense_stacks
from tensor_parts import collected
from tensordict import TensorDictBase
from torch import Tensor

from trawl.data import StackedFrames
from trawl.envs import FrameStack, PettingZooEnv

COUNT, SIZE = 3, 4


def agent_alone(batches: Sequence[TensorDictBase], key: Any, index: int) -> list[TensorDictBase]:
    """Returns batches in which ``"x"`` is an entry of one agent."""
    found: list[TensorDictBase] = []
    for batch in batches:
        one = batch.select(("next", "done"))
        one["x"], one["next", "x"] = (td[key][:, :, index] for td in (batch, batch["next"]))
        found.append(one)
    return found


# --- PettingZoo


def walkers() -> Any:
    from agents import Walkers

    return PettingZooEnv(Walkers("info"), done_on_any=False)


def turns() -> Any:
    from agents import Turns

    return PettingZooEnv(Turns())


def observation_of(batch: TensorDictBase, group: str) -> Any:
    """Returns the key of a group's observation, which is nested if it was in a dict."""
    key = (group, "observation")
    return key if isinstance(batch[key], Tensor) else (*key, "observation")


def check_agents(make: Any, stacked: Any, plain: Any, padding: str) -> None:
    """Compares the stacks of each agent with those of the frames of batches without stacks."""
    for group, agents in make().group_map.items():
        key = observation_of(stacked[0], group)
        for i in range(len(agents)):
            mine = torch.cat([batch["next"][key][:, :, i] for batch in stacked], 1)
            roots = torch.cat([batch[key][:, :, i] for batch in stacked], 1)
            assert torch.equal(mine, dense_stacks(agent_alone(plain, key, i), "x", SIZE, padding))
            # The stack before a step and that after it have all but one frame in common.
            assert torch.equal(roots[:, :, 1:], mine[:, :, :-1])
        for one, other in zip(stacked, plain, strict=True):
            for name in {"mask", "action_mask"} & set(one[group].keys()):
                assert torch.equal(one[group, name], other[group, name])


# With many steps, the first frames of all episodes don't fit into the memory of a batch.
@pytest.mark.parametrize(
    ("make", "steps", "padding"),
    [(walkers, 5, "zero"), (walkers, 70, "reset"), (turns, 5, "reset"), (turns, 70, "zero")],
)
def test_agents_of_pettingzoo_have_stacks(make: Any, steps: int, padding: Any) -> None:
    options = {"frames_per_batch": 2 * steps, "count": 4}
    plain, _ = collected([make] * 2, None, **options)
    stack = FrameStack(SIZE, padding)
    stacked, stats = collected([make] * 2, None, frame_stack=stack, **options)
    check_agents(make, stacked, plain, padding)
    assert stats["env_path"] == "array"
    key = observation_of(stacked[0], next(iter(make().group_map)))
    assert isinstance(stacked[0][key], StackedFrames)
