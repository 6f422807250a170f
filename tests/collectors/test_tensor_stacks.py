"""Stacks of frames of environments of torch tensors: the batches are those on arrays."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from dense_stacks import dense_stacks
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from multi_parts import CLASSES, make
from stack_parts import SIZE, by_stack, check_equal, choose_by_stack
from tensor_parts import collected
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from trawl import Collector
from trawl.envs import FrameStack, TorchVectorEnv
from trawl.testing import NumberedEnv, NumberedTorchEnv, SelfResettingVectorEnv

COUNT = 3
LENGTHS = (2, 9, 1, 4)
ENDS = ("terminated", "truncated", "both")
PADDINGS = ["reset", "zero"]


class Gpu(TorchVectorEnv):
    """Adapter that does what it does on a GPU."""

    answers_at_once = False  # type: ignore[assignment]


KINDS = {"cpu": TorchVectorEnv, "gpu": Gpu}


def on_numpy(mode: AutoresetMode, lengths: Sequence[int] = LENGTHS) -> Any:
    makers: list[Callable[[], NumberedEnv]] = [
        partial(NumberedEnv, i, [*lengths[i % len(lengths) :], *lengths], ENDS)
        for i in range(COUNT)
    ]
    if mode is AutoresetMode.NEXT_STEP:
        # Gymnasium's own environments are reset at once, without a step for it.
        return SelfResettingVectorEnv(makers)
    return SyncVectorEnv(makers, autoreset_mode=mode)


class Vector(NumberedTorchEnv):
    """Numbered environments, whose reset by a mask may be of none of them."""

    shown: Any = None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask = (options or {}).get("reset_mask")
        if mask is None or mask.any():
            self.shown = super().reset(seed=seed, options=options)
        return self.shown

    def step(self, actions: Tensor) -> Any:
        obs, *results, info = super().step(actions)
        self.shown = obs, {}
        return obs, *results, info


def on_torch(
    mode: AutoresetMode = AutoresetMode.SAME_STEP,
    lengths: Sequence[int] = LENGTHS,
    kind: str = "cpu",
) -> TorchVectorEnv:
    env = Vector(COUNT, lengths, ENDS, mode)
    partial_reset = None if mode is AutoresetMode.NEXT_STEP else "mask"
    return KINDS[kind](env, partial_reset=partial_reset)


class Spoiler(nn.Module):
    """Policy that changes its input."""

    def forward(self, observation: Tensor) -> Tensor:
        action = choose_by_stack(observation)
        observation += 1
        return action


class Linear(nn.Module):
    """Policy whose actions depend on each number of a stack, made of harmless modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(-2), nn.Linear(5 * SIZE, 4))

    def forward(self, observation: Tensor) -> Tensor:
        return nn.functional.one_hot(self.layers(observation).argmax(-1), 4)


POLICIES: dict[str, Callable[[], Any]] = {
    "random": lambda: None,
    "module": by_stack,
    "changes": lambda: TensorDictModule(Spoiler(), ["observation"], ["action"]),
    "linear": lambda: TensorDictModule(Linear(), ["observation"], ["action"]),
}
batches = partial(collected, frame_stack=SIZE)


def check(
    mode: AutoresetMode,
    kind: str,
    policy: str = "module",
    lengths: Sequence[int] = LENGTHS,
    **options: Any,
) -> list[TensorDictBase]:
    """Compares the batches of an environment of tensors with those of the same one on arrays."""
    options.setdefault("frames_per_batch", 8 * COUNT)
    new = POLICIES[policy]
    expected, _ = batches(on_numpy(mode, lengths), new(), **options)
    found, stats = batches(on_torch(mode, lengths, kind), new(), **options)
    check_equal(found, expected)
    assert stats["env_path"] == "tensor"
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_so_are_they_with_a_compiled_policy_and_another_device(kind: str) -> None:
    options = {"compile_policy": {"backend": "eager"}, "storing_device": "cpu"}
    check(AutoresetMode.SAME_STEP, kind, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_may_be_longer_than_a_chunk(kind: str) -> None:
    check(AutoresetMode.SAME_STEP, kind, count=1, frames_per_batch=520 * COUNT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_may_change_and_keep_its_input(kind: str) -> None:
    kept: list[tuple[Tensor, Tensor]] = []

    def act(observation: Tensor) -> Tensor:
        action = choose_by_stack(observation)
        kept.append((observation, observation.clone()))
        observation += 1
        return action

    policy = TensorDictModule(act, ["observation"], ["action"])
    options = {"frames_per_batch": 8 * COUNT}
    found, _ = batches(on_torch(kind=kind), policy, **options)
    check_equal(found, batches(on_torch(kind=kind), by_stack(), **options)[0])
    assert len(kept) >= 4 * 8
    assert all(torch.equal(now, before + 1) for now, before in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_stores_each_frame_once(kind: str) -> None:
    with Collector(
        on_torch(lengths=(30,), kind=kind), frames_per_batch=100 * COUNT, frame_stack=SIZE
    ) as collector:
        batch = next(iter(collector))
    observation, after = batch["observation"], batch["next", "observation"]
    assert observation.frames is after.frames
    # 100 steps and 4 frames before them in each environment, and 9 that begin episodes.
    used = torch.unique(torch.cat([observation.positions, after.positions]))
    assert len(used) == 104 * COUNT + 9
    assert len(observation.frames) < 1.1 * len(used)


@pytest.mark.parametrize("kind", KINDS)
def test_the_frame_of_zeros_is_written_in_used_memory(kind: str) -> None:
    env, stack = on_torch(lengths=(3,), kind=kind), FrameStack(SIZE, "zero")
    with Collector(env, frames_per_batch=9 * COUNT, frame_stack=stack) as collector:
        lease = collector._rollout.writer.pool.lease()
        for tensor in lease.tensors.values():
            tensor.fill_(1)
        del lease, tensor
        batch = next(iter(collector))
    assert not batch["observation"][:, 3, :-1].any()


# --- workers


def in_workers(
    cls: Any, env: Any, lengths: Sequence[int], *more: Any, **options: Any
) -> list[TensorDictBase]:
    """Returns batches of two workers, whose episodes have different lengths."""
    found = []
    options = {"frames_per_batch": 48, "frame_stack": SIZE, **options}
    mode = AutoresetMode.SAME_STEP
    factories = [partial(env, mode, order, *more) for order in (lengths, lengths[::-1])]
    with make(cls, create_env_fn=factories, policy=by_stack(), **options) as collector:
        collector.set_seed(1)
        for batch in collector:
            found.append(batch.clone())
            if len(found) == 3:
                return found
    raise AssertionError


def test_batches_of_workers_are_combined() -> None:
    found, expected = (
        in_workers(CLASSES[0], env, (9, 30), cat_results=-1) for env in (on_torch, on_numpy)
    )
    check_equal(found, expected)


# --- other observations, and failures


class Several(NumberedTorchEnv):
    """Environment with several observations, one of which is an action mask."""

    def __init__(self) -> None:
        super().__init__(COUNT, (3, 5))
        number = self.single_observation_space
        mask = Box(0, 1, (4,), np.int8)
        self.single_observation_space = Dict(
            {"a": number, "b": Box(0, 255, (2, 2), np.uint8), "action_mask": mask}
        )

    def shown(self, obs: Tensor) -> dict[str, Tensor]:
        pixels = obs[:, 2].to(torch.uint8).view(-1, 1, 1).expand(-1, 2, 2)
        return {"a": obs, "b": pixels, "action_mask": torch.ones(COUNT, 4, dtype=torch.int8)}

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return self.shown(obs), info

    def step(self, actions: Tensor) -> Any:
        obs, *rest, info = super().step(actions)
        return self.shown(obs), *rest, {name: self.shown(value) for name, value in info.items()}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [None, ["b"]], ids=str)
def test_keys_choose_the_observations(kind: str, padding: Any, keys: Any) -> None:
    stack, options = FrameStack(SIZE, padding, keys), {"frames_per_batch": 7 * COUNT}
    plain, _ = collected(KINDS[kind](Several()), None, **options)
    found, _ = collected(KINDS[kind](Several()), None, frame_stack=stack, **options)
    for key in ("a", "b", "action_mask"):
        after = torch.cat([batch["next", key] for batch in found], 1)
        if key in (keys or ["a", "b"]):
            assert torch.equal(after, dense_stacks(plain, key, SIZE, padding))
        else:
            assert torch.equal(after, torch.cat([batch["next", key] for batch in plain], 1))


class Failing(NumberedTorchEnv):
    """Environment whose fifth step raises an error, in the first object only."""

    made = 0

    def __init__(self) -> None:
        super().__init__(COUNT, (9,))
        self.first, self.steps = Failing.made == 0, 0
        Failing.made += 1

    def step(self, actions: Tensor) -> Any:
        self.steps += 1
        if self.first and self.steps == 5:
            raise ValueError("broken")
        return super().step(actions)


def test_a_fake_batch_has_the_layout_of_a_real_one() -> None:
    with Collector(on_torch(), frames_per_batch=12, frame_stack=SIZE) as collector:
        fake, real = collector.fake_tensordict(), next(iter(collector))
    assert {k: (v.shape, v.dtype) for k, v in fake.items(True, True)} == {
        k: (v.shape, v.dtype) for k, v in real.items(True, True)
    }
    assert not fake["observation"].any()


def test_the_policy_must_not_write_stacks() -> None:
    def act(frame: TensorDictBase) -> TensorDictBase:
        frame["action"] = choose_by_stack(frame["observation"])
        frame["observation"] = frame["observation"] + 1
        return frame

    with pytest.raises(ValueError, match=r"the policy writes .*, which frame_stack stacks"):
        Collector(on_torch(), act, frames_per_batch=12, frame_stack=2, trust_policy=True)


def test_unknown_keys_are_named() -> None:
    stack = FrameStack(2, keys=["pixels"])
    with pytest.raises(ValueError, match=r"\['pixels'\], but .* are \['observation'\]"):
        Collector(on_torch(), frames_per_batch=12, frame_stack=stack)


def test_lists_are_stacked() -> None:
    with Collector([on_torch, on_torch], frames_per_batch=24, frame_stack=2) as collector:
        first, batch = collector.next(), collector.next()
    stacks, after = batch["observation"], batch["next", "observation"]
    assert batch["observation"].shape[:3] == first.batch_size
    goes_on = ~batch["next", "done"][..., :-1, 0]
    assert torch.equal(stacks[..., 1:, :, :][goes_on], after[..., :-1, :, :][goes_on])
    assert torch.equal(after[..., 0, :], stacks[..., 1, :])


def tensors_of(**options: Any) -> int:
    """Returns the number of tensors that the constructor of a collector makes."""
    gc.collect()
    before = sum(type(one) is Tensor for one in gc.get_objects())
    with Collector(**options):
        return sum(type(one) is Tensor for one in gc.get_objects()) - before


@pytest.mark.parametrize(
    ("kind", "options"), [("cpu", {"frame_stack": 2}), ("gpu", {"normalize_observations": True})]
)
def test_long_batches_need_no_tensor_for_each_row(kind: str, options: Any) -> None:
    few, many = (
        tensors_of(create_env_fn=on_torch(kind=kind), frames_per_batch=COUNT * steps, **options)
        for steps in (10, 3000)
    )
    # Other objects, such as those of the test before, may go in between.
    assert many - few < 500
