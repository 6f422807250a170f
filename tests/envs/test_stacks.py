"""Stacks of frames of VMAS and JAX."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_stacks import dense_stacks
from tensor_parts import collected
from tensordict.nn import TensorDictModule
from torch import Tensor

from trawl import Collector
from trawl.data import StackedFrames
from trawl.envs import FrameStack

COUNT, SIZE = 3, 4


@pytest.mark.parametrize("padding", ["reset", "zero"])
def test_agents_have_stacks_of_their_own(padding: Any) -> None:
    vmas = pytest.importorskip("vmas")
    key = ("agents", "observation")
    found = []
    for stack in (None, FrameStack(SIZE, padding, [key])):
        env = vmas.make_env("balance", num_envs=COUNT, max_steps=5, seed=0)
        found.append(collected(env, None, 3, frames_per_batch=7 * COUNT, frame_stack=stack)[0])
    plain, stacked = found
    shape = plain[0][key].shape
    assert stacked[0][key].shape == (*shape[:-1], SIZE, shape[-1])
    assert stacked[0]["agents"].batch_size == (*shape[:-1],)
    for i in range(shape[-2]):
        mine = torch.cat([batch["next"][key][:, :, i] for batch in stacked], 1)
        agent = [batch.select() for batch in plain]
        for one, batch in zip(agent, plain, strict=True):
            one["next"] = batch["next"].select("done")
            one[str(i)], one["next", str(i)] = (td[key][:, :, i] for td in (batch, batch["next"]))
        assert torch.equal(mine, dense_stacks(agent, str(i), SIZE, padding))


def test_the_policy_reads_the_stacks_of_agents() -> None:
    vmas = pytest.importorskip("vmas")
    key: Any = ("agents", "observation")
    seen = []

    def act(observation: Tensor) -> Tensor:
        seen.append(observation.clone())
        return observation[..., -1, :2].clamp(-1, 1)

    policy = TensorDictModule(act, [key], [("agents", "action")])
    env = vmas.make_env("balance", num_envs=COUNT, max_steps=5, seed=0)
    with Collector(env, policy, frames_per_batch=12 * COUNT, frame_stack=SIZE) as collector:
        batch = next(iter(collector))
    assert torch.equal(torch.stack(seen[-12:], 1), batch[key])


def test_jax_has_stacks() -> None:
    pytest.importorskip("jax")
    from jax_parts import Scripted

    from trawl.envs import JaxEnv

    options = {"frames_per_batch": 9 * COUNT, "count": 2}
    env = JaxEnv(Scripted(), COUNT)
    plain, _ = collected(env, None, **options)
    found, _ = collected(env, None, frame_stack=SIZE, **options)
    after = torch.cat([batch["next", "observation"] for batch in found], 1)
    assert torch.equal(after, dense_stacks(plain, "observation", SIZE))
    assert isinstance(found[0]["observation"], StackedFrames)
