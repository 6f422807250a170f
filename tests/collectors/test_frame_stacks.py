"""Stacks of frames: the batches are those of Gymnasium's wrapper, with each frame stored once."""

from __future__ import annotations

import gc

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from stack_parts import (
    SIZE,
    Env,
    by_stack,
    check_as_wrapped,
    check_equal,
    choose_by_stack,
    collected,
    made,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.overrides import TorchFunctionMode

from trawl import Collector, Evaluator
from trawl.data import StackedFrames
from trawl.envs import FrameStack
from trawl.testing import NumberedEnv


@pytest.mark.parametrize("kind", ["single", "list"])
def test_batches_may_be_longer_than_a_chunk(kind):
    options = {"frames_per_batch": 1101, "count": 2, "storing_device": "cpu"}
    check_as_wrapped(kind, policy=by_stack(), lengths=(30,), **options)


def test_a_batch_stores_each_frame_once():
    (batch,) = check_as_wrapped("list", lengths=(30,), count=1, frames_per_batch=300)
    observation, after = batch["observation"], batch["next", "observation"]
    assert isinstance(observation, StackedFrames)
    assert observation.frames is after.frames
    # 100 steps and 4 frames before them in each of 3 environments, and 9 that begin episodes.
    assert len(torch.unique(torch.cat([observation.positions, after.positions]))) == 321
    assert len(observation.frames) < 1.1 * 321


def test_a_batch_has_more_memory_if_episodes_are_short():
    long, short = (
        check_as_wrapped("single", lengths=lengths, count=1, frames_per_batch=64)[0]
        for lengths in ((100,), (1,))
    )
    assert len(short["observation"].frames) > len(long["observation"].frames)


def test_an_observation_keeps_the_memory_of_its_batch():
    with Collector(NumberedEnv(lengths=[7]), frames_per_batch=10, frame_stack=3) as collector:
        batches = iter(collector)
        kept = [next(batches)["next", "observation"][2:] for _ in range(5)]
        values = [one.to_dense() for one in kept]
        for _ in range(5):
            next(batches)
        assert collector.stats()["batches_held"] >= 5
        for one, value in zip(kept, values, strict=True):
            assert torch.equal(one, value)
        del kept, one
        gc.collect()
        next(batches)
        assert collector.stats()["batches_held"] < 3


class Spoiler(nn.Module):
    """A policy that changes its input, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def forward(self, observation):
        action = choose_by_stack(observation)
        self.kept.append((observation, observation.clone()))
        observation += 1
        return action


def test_a_policy_may_change_and_keep_its_input():
    spoiler = Spoiler()
    check_as_wrapped("single", policy=spoiler)
    for now, before in spoiler.kept:
        assert torch.equal(now, before + 1)


class Cart(gymnasium.Env):
    """An environment whose action is a vector, with short episodes of different lengths."""

    observation_space, action_space = Box(-99, 999, (3,)), Box(-99, 999, (2,))

    def __init__(self):
        self.steps = self.episodes = 0

    def reset(self, **_):
        self.episodes += 1
        return self.observe(), {}

    def observe(self):
        self.steps += 1
        return np.full(3, self.steps, np.float32)

    def step(self, action):
        done = self.steps % (3 + self.episodes % 4) == 0
        return self.observe(), float(action[0]), done, False, {}


class Inputs(TorchFunctionMode):
    """Notes the addresses of tensors that are flattened."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.flatten:
            self.addresses.append(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


def test_a_harmless_policy_reads_windows_without_a_copy():
    module = nn.Sequential(nn.Flatten(-2), nn.Linear(3 * SIZE, 2))
    policy = TensorDictModule(module, ["observation"], ["action"])
    collector = Collector(Cart(), policy, frames_per_batch=20, frame_stack=SIZE)
    with collector, Inputs() as inputs:
        next(iter(collector))
    assert set(np.diff(inputs.addresses)) == {3 * 4}  # bytes of a frame


@pytest.mark.parametrize("count", [1, 3])
def test_the_windows_of_a_harmless_policy_are_right(count):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(-2), nn.Linear(3 * SIZE, 2))
    policy = TensorDictModule(module, ["observation"], ["action"])
    wrapped = [lambda: FrameStackObservation(Cart(), SIZE)] * count
    found = collected(5, Collector, [Cart] * count, policy, FrameStack(SIZE), frames_per_batch=24)
    check_equal(found, collected(5, Collector, wrapped, policy, None, frames_per_batch=24))


def test_the_frame_of_zeros_is_written_in_used_memory():
    stack = FrameStack(SIZE, "zero")
    with Collector(NumberedEnv(lengths=[3]), frames_per_batch=9, frame_stack=stack) as collector:
        lease = collector._rollout.writer.pool.lease()
        for tensor in lease.tensors.values():
            tensor.fill_(1)
        del lease, tensor
        batch = next(iter(collector))
    assert not batch["observation"][3, :-1].any()


def test_an_evaluation_stacks_frames():
    results = []
    for padding in (None, "reset"):
        options = {"frame_stack": SIZE} if padding is None else {}
        envs = Env(0, (9, 30), padding)
        with Evaluator(envs, by_stack(), num_trajectories=3, collector_kwargs=options) as evaluator:
            results.append(evaluator.evaluate())
    assert results[0]["eval/reward"] == results[1]["eval/reward"]


def test_a_compiled_policy_reads_stacks():
    check_as_wrapped("list", policy=Linear(), compile_policy={"backend": "eager"})


class Linear(nn.Module):
    """A policy with weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(-2), nn.Linear(5 * SIZE, 4))

    def forward(self, observation):
        return nn.functional.one_hot(self.layers(observation).argmax(-1), 4)


class Several(gymnasium.Env):
    """An environment with several observations."""

    observation_space = Dict(
        {
            "pixels": Box(0, 255, (2, 2), np.uint8),
            "speed": Box(-9, 9, (3,)),
            "action_mask": Box(0, 1, (2,), np.int8),
        }
    )
    action_space = Discrete(2)

    def __init__(self):
        self.steps = 0

    def reset(self, **_):
        return self.observe(), {}

    def observe(self):
        self.steps += 1
        pixels = np.full((2, 2), self.steps, np.uint8)
        return {
            "pixels": pixels,
            "speed": np.full(3, self.steps, np.float32),
            "action_mask": np.ones(2, np.int8),
        }

    def step(self, action):
        return self.observe(), 0.0, self.steps % 5 == 0, False, {}


@pytest.mark.parametrize(
    ("keys", "stacked"),
    [(None, {"pixels", "speed"}), (["pixels"], {"pixels"}), ("speed", {"speed"})],
)
def test_keys_choose_the_observations(keys, stacked):
    with Collector(
        Several(), frames_per_batch=20, frame_stack=FrameStack(2, keys=keys)
    ) as collector:
        batch = next(iter(collector))
    for key, shape in {"pixels": (2, 2), "speed": (3,), "action_mask": (2,)}.items():
        expected = (20, 2, *shape) if key in stacked else (20, *shape)
        assert batch[key].shape == batch["next", key].shape == expected


def test_atari():
    pytest.importorskip("ale_py")
    import ale_py

    gymnasium.register_envs(ale_py)
    found = []
    for wrapped in (False, True):
        env = gymnasium.make("ALE/Breakout-v5", frameskip=1, max_num_frames_per_episode=120)
        env = AtariPreprocessing(env, noop_max=0, terminal_on_life_loss=True)
        if wrapped:
            env = FrameStackObservation(env, 4)
        options = {} if wrapped else {"frame_stack": 4}
        with Collector(env, frames_per_batch=50, **options) as collector:
            collector.set_seed(0)
            found.append([next(iter(collector)) for _ in range(2)])
    for one, other in zip(*found, strict=True):
        assert other["observation"].shape == (50, 4, 84, 84)
        for key, value in other.items(True, True):
            assert torch.equal(one.get(key), value), key
        assert other["next", "done"].any()


def test_a_fake_batch_has_the_layout_of_a_real_one():
    with Collector(made("list"), frames_per_batch=12, frame_stack=SIZE) as collector:
        fake, real = collector.fake_tensordict(), next(iter(collector))
    assert {k: (v.shape, v.dtype) for k, v in fake.items(True, True)} == {
        k: (v.shape, v.dtype) for k, v in real.items(True, True)
    }
    assert not fake["observation"].any()


# --- mistakes


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (1, ValueError, "frame_stack must be at least 2, but it is 1"),
        ("4", TypeError, "frame_stack must be an integer"),
        (True, TypeError, "frame_stack must be an integer"),
    ],
)
def test_a_wrong_number_is_refused(value, error, text):
    with pytest.raises(error, match=text):
        Collector(NumberedEnv(), frames_per_batch=10, frame_stack=value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: FrameStack(0), "size must be at least 2"),
        (lambda: FrameStack(2, "mirror"), "padding must be 'reset' or 'zero', but it is 'mirror'"),
        (lambda: FrameStack(2, keys=[]), "keys must name the observations"),
    ],
)
def test_wrong_stacks_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_unknown_keys_are_named():
    stack = FrameStack(2, keys=["pixels"])
    with pytest.raises(ValueError, match=r"\['pixels'\], but .* are \['observation'\]"):
        Collector(NumberedEnv(), frames_per_batch=10, frame_stack=stack)


def test_the_policy_must_not_write_stacks():
    def act(frame: TensorDict) -> TensorDict:
        frame["action"] = choose_by_stack(frame["observation"])
        frame["observation"] = frame["observation"] + 1
        return frame

    with pytest.raises(ValueError, match=r"the policy writes .*, which frame_stack stacks"):
        Collector(NumberedEnv(), act, frames_per_batch=10, frame_stack=2)
