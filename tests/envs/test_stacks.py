"""Stacks of frames of several agents, and of JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dense_stacks import dense_stacks
from tensor_parts import assert_same, collected
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor

from trawl import Collector, MultiSyncCollector, ParallelEnv
from trawl.backends import InlineBackend
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


def test_agents_have_stacks_of_their_own() -> None:
    padding: Any = "zero"
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
        agent = agent_alone(plain, key, i)
        assert torch.equal(mine, dense_stacks(agent, "x", SIZE, padding))


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


def test_a_policy_reads_the_stacks_of_pettingzoo() -> None:
    seen: list[Tensor] = []

    def act(walker: Tensor, flyer: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(walker.clone())
        return torch.zeros(walker.shape[:-2]).long(), torch.zeros(flyer.shape[:-2]).long()

    names: Any = ["walker", "flyer"]
    policy = TensorDictModule(
        act, [(name, "observation") for name in names], [(name, "action") for name in names]
    )
    for make in (unmasked, [unmasked] * 2):
        seen.clear()
        with Collector(make, policy, frames_per_batch=24, frame_stack=SIZE) as collector:
            batch = next(iter(collector))
        steps = batch.shape[-1]
        found = batch["walker", "observation"]
        assert torch.equal(torch.stack(seen[-steps:], found.ndim - 4), found)


def unmasked() -> Any:
    from agents import Walkers

    return PettingZooEnv(Walkers(), done_on_any=True)


@pytest.mark.parametrize("method", ["inline", "messages"])
def test_workers_stack_the_frames_of_agents(method: str) -> None:
    found = []
    for stack in (None, SIZE):
        backend = {"_new_backend": lambda self: InlineBackend(method == "inline")}
        cls: Any = type("MultiSyncCollector", (MultiSyncCollector,), backend)
        options: Any = {"start_method": "inline", "frame_stack": stack, "cat_results": 0}
        with cls([[walkers] * 2] * 2, None, frames_per_batch=48, **options) as collector:
            collector.set_seed(3)
            found.append([collector.next().clone() for _ in range(3)])
    check_agents(walkers, found[1], found[0], "reset")


def test_a_state_has_the_stacks_of_agents() -> None:
    options: Any = {"frames_per_batch": 14, "frame_stack": SIZE}
    with (
        Collector([walkers] * 2, **options) as one,
        Collector([walkers] * 2, **options) as other,
    ):
        one.set_seed(1)
        one.next()
        other.load_state_dict(one.state_dict())
        assert_same([other.next() for _ in range(3)], [one.next() for _ in range(3)])


def test_agents_in_processes() -> None:
    source = ParallelEnv(2, [walkers] * 2)

    def idle(frame: TensorDictBase) -> TensorDictBase:
        return frame.update(source.full_action_spec.zero())

    options: Any = {"frames_per_batch": 12, "frame_stack": SIZE}
    with (
        Collector([walkers] * 2, idle, **options) as one,
        Collector(source, idle, **options) as other,
    ):
        for collector in (one, other):
            collector.set_seed(0)
        assert_same([other.next() for _ in range(2)], [one.next() for _ in range(2)])
