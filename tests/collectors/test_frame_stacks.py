"""Stacks of frames: their memory, the observations that are stacked, and mistakes."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from dense_stacks import dense_stacks
from gymnasium.spaces import Box, Dict
from gymnasium.wrappers import FrameStackObservation
from multi_parts import envs, make
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trawl import Collector, Evaluator
from trawl.collectors import NormalizeObservation
from trawl.data import StackedFrames
from trawl.envs import FrameStack, TorchVectorEnv
from trawl.testing import NumberedEnv, NumberedTorchEnv

SIZE, COUNT = 4, 3


class Gpu(TorchVectorEnv):
    """Adapter that does what it does on a GPU."""

    answers_at_once = False  # type: ignore[assignment]


TENSORS = {"cpu": TorchVectorEnv, "gpu": Gpu}
ON_KINDS = pytest.mark.parametrize("kind", ["list", *TENSORS])


def long(kind: str) -> Any:
    """Environments of some kind, whose episodes have 30 steps."""
    if kind == "list":
        return [partial(NumberedEnv, number, [30]) for number in range(COUNT)]
    return TENSORS[kind](NumberedTorchEnv(COUNT, [30]))


def collected(source: Any, policy: Any = None, count: int = 4, **options: Any) -> list[Any]:
    """The first batches of a collector."""
    with Collector(source, policy, frames_per_batch=24, **options) as collector:
        collector.set_seed(1)
        return [collector.next() for _ in range(count)]


# --- memory


class Inputs(TorchFunctionMode):
    """Notes the addresses of tensors that are flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.flatten:
            self.addresses.append(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


def test_a_harmless_policy_reads_windows_without_a_copy() -> None:
    net = nn.Sequential(nn.Flatten(-2), nn.Linear(3 * SIZE, 1))
    policy = TensorDictModule(net, ["observation"], ["action"])
    collector = Collector("Pendulum-v1", policy, frames_per_batch=20, frame_stack=SIZE)
    with collector, Inputs() as inputs:
        collector.next()
    assert set(np.diff(inputs.addresses)) == {3 * 4}  # bytes of a frame


@ON_KINDS
def test_a_batch_stores_each_frame_once(kind: str) -> None:
    with Collector(long(kind), frames_per_batch=100 * COUNT, frame_stack=SIZE) as collector:
        batch = collector.next()
    observation, after = batch["observation"], batch["next", "observation"]
    assert isinstance(observation, StackedFrames)
    assert observation.frames is after.frames
    # 100 steps and 4 frames before them in each environment, and 9 that begin episodes.
    used = len(torch.unique(torch.cat([observation.positions, after.positions])))
    assert used == 104 * COUNT + 9
    assert len(observation.frames) < 1.1 * used


def test_the_parts_of_workers_share_memory() -> None:
    sources = envs(2, 2, lengths=[9, 30])
    options = {"frames_per_batch": 80, "frame_stack": SIZE}
    with make(create_env_fn=sources, policy=None, **options) as collector:
        batch = collector.next()
    observation, after = batch["observation"], batch["next", "observation"]
    assert observation.frames is after.frames
    # 20 steps and 4 frames before them of each of 4 environments; room for the first frames.
    assert len(observation.frames) < 4 * 24 + 20


@ON_KINDS
def test_the_frame_of_zeros_is_written_in_used_memory(kind: str) -> None:
    stack = FrameStack(SIZE, "zero")
    with Collector(long(kind), frames_per_batch=300, frame_stack=stack) as collector:
        addresses = set()
        for _ in range(4):
            batch = collector.next()
            stacks = batch["observation"]
            assert not stacks[batch["observation"][..., -1, 2] == 0][..., :-1, :].any()
            addresses.add(stacks.frames.data_ptr())
            stacks.frames.fill_(1)
            del batch, stacks
    assert len(addresses) < 4


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
        tensors_of(create_env_fn=long(kind), frames_per_batch=COUNT * steps, **options)
        for steps in (10, 1500)
    )
    # Other objects, such as those of the test before, may go in between.
    assert many - few < 500


# --- what is stacked


def shown(obs: Any) -> dict[str, Any]:
    """Several observations of one that numbers its steps."""
    module: Any = torch if isinstance(obs, Tensor) else np
    pixels = module.ones((*obs.shape[:-1], 2, 2), dtype=module.uint8)
    pixels = pixels * module.asarray(obs[..., 2], dtype=module.uint8)[..., None, None]
    mask = module.ones((*obs.shape[:-1], 4), dtype=module.int8)
    return {"a": obs, "b": pixels, "c": obs + 0, "action_mask": mask}


def space(numbers: Any) -> Dict:
    pixels, mask = Box(0, 255, (2, 2), np.uint8), Box(0, 1, (4,), np.int8)
    return Dict({"a": numbers, "b": pixels, "c": numbers, "action_mask": mask})


class Several(gymnasium.ObservationWrapper):
    """An environment with several observations, one of which is an action mask."""

    def __init__(self, number: int) -> None:
        super().__init__(NumberedEnv(number, (3, 5)))
        self.observation_space = space(self.env.observation_space)

    def observation(self, observation: Any) -> Any:
        return shown(observation)


class SeveralTensors(NumberedTorchEnv):
    """The same on tensors."""

    def __init__(self) -> None:
        super().__init__(COUNT, (3, 5))
        self.single_observation_space: Any = space(self.single_observation_space)

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return shown(obs), info

    def step(self, actions: Tensor) -> Any:
        obs, *rest, info = super().step(actions)
        return shown(obs), *rest, {name: shown(value) for name, value in info.items()}


def several(kind: str) -> Any:
    if kind == "list":
        return [partial(Several, number) for number in range(COUNT)]
    return TENSORS[kind](SeveralTensors())


@ON_KINDS
def test_keys_choose_the_observations(kind: str) -> None:
    plain = collected(several(kind))
    for keys, padding in ((None, "reset"), (["b"], "zero"), ("a", "reset")):
        stack = FrameStack(SIZE, padding, keys)  # type: ignore[arg-type]
        found = collected(several(kind), frame_stack=stack)
        for key in ("a", "b", "c", "action_mask"):
            after = torch.cat([batch["next", key] for batch in found], 1)
            if key in (keys or ["a", "b", "c"]):
                assert torch.equal(after, dense_stacks(plain, key, SIZE, padding))
                assert found[0][key].shape == found[0]["next", key].shape
            else:
                assert torch.equal(after, torch.cat([batch["next", key] for batch in plain], 1))


def test_tensors_are_normalised_beside_stacks() -> None:
    stack = {"frame_stack": FrameStack(SIZE, keys=["a"])}
    normalize = {"normalize_observations": NormalizeObservation(keys=["c"])}
    found, stacked, normalized = (
        collected(SeveralTensors(), **options)
        for options in ({**stack, **normalize}, stack, normalize)
    )
    for both, one, other in zip(found, stacked, normalized, strict=True):
        for prefix in ((), ("next",)):
            assert torch.equal(both[(*prefix, "a")], one[(*prefix, "a")])
            assert torch.equal(both[(*prefix, "c")], other[(*prefix, "c")])
    # The first batch has no statistics.
    assert not torch.equal(found[-1]["c"], stacked[-1]["c"])


def choose_by_stack(observation: Tensor) -> Tensor:
    """A policy whose action depends on all frames of a stack."""
    weights = torch.arange(1, observation.shape[-2] + 1)
    number = (observation[..., 1:3].sum(-1) * weights).sum(-1).long()
    return nn.functional.one_hot(number % 4, 4)


def test_an_evaluation_stacks_frames() -> None:
    policy = TensorDictModule(choose_by_stack, ["observation"], ["action"])
    plain, stacked = NumberedEnv(0, (9, 30)), FrameStackObservation(NumberedEnv(0, (9, 30)), SIZE)
    results = []
    for env, options in ((plain, {"frame_stack": SIZE}), (stacked, {})):
        with Evaluator(env, policy, num_trajectories=3, collector_kwargs=options) as evaluator:
            results.append(evaluator.evaluate())
    assert results[0]["eval/reward"] == results[1]["eval/reward"]


# --- mistakes


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        *(
            (lambda n=n: Collector(NumberedEnv(), frames_per_batch=10, frame_stack=n), kind, words)
            for n, kind, words in (
                (1, ValueError, "frame_stack must be at least 2, but it is 1"),
                ("4", TypeError, "frame_stack must be an integer"),
                (True, TypeError, "frame_stack must be an integer"),
                (4.0, TypeError, "frame_stack must be an integer, but it is float: 4.0"),
            )
        ),
        (lambda: FrameStack(0), ValueError, "size must be at least 2"),
        (
            lambda: FrameStack(2, "mirror"),  # type: ignore[arg-type]
            ValueError,
            "padding must be 'reset' or 'zero', but it is 'mirror'",
        ),
        (lambda: FrameStack(2, keys=[]), ValueError, "keys must name the observations"),
    ],
)
def test_wrong_stacks_are_refused(call: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call()
    assert FrameStack(4, keys=["a", "b", ("a",)]).keys == (("a",), ("b",))  # each counts once


@pytest.mark.parametrize("kind", ["list", "cpu"])
def test_stacks_are_of_observations_that_the_policy_does_not_write(kind: str) -> None:
    def act(frame: TensorDictBase) -> TensorDictBase:
        frame["action"] = choose_by_stack(frame["observation"])
        frame["observation"] = frame["observation"] + 1
        return frame

    options: dict[str, Any] = {"frames_per_batch": 12, "trust_policy": kind == "cpu"}
    with pytest.raises(ValueError, match=r"\['pixels'\], but .* are \['observation'\]"):
        Collector(long(kind), frame_stack=FrameStack(2, keys=["pixels"]), frames_per_batch=12)
    with pytest.raises(ValueError, match=r"the policy writes .*, which frame_stack stacks"):
        Collector(long(kind), act, frame_stack=2, **options)
