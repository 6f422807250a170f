"""Stacks of frames: the batches are those of Gymnasium's wrapper, with each frame stored once."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from dense_stacks import dense_stacks
from gymnasium.spaces import Box, Dict
from gymnasium.wrappers import FrameStackObservation
from multi_parts import make
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from trawl import Collector, Evaluator, MultiSyncCollector
from trawl.collectors import NormalizeObservation
from trawl.data import StackedFrames
from trawl.envs import FrameStack, TorchVectorEnv
from trawl.testing import NumberedEnv, NumberedTorchEnv

SIZE, COUNT = 4, 3
LENGTHS = (2, 9, 1, 4)
ENDS = ("terminated", "truncated", "both")


class Gpu(TorchVectorEnv):
    """Adapter that does what it does on a GPU."""

    answers_at_once = False  # type: ignore[assignment]


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


def numbered(number: int, lengths: Sequence[int], padding: str | None = None) -> Any:
    """An environment; with a padding, Gymnasium's wrapper stacks its frames."""
    env = NumberedEnv(number, [*lengths[number % len(lengths) :], *lengths], ENDS)
    return env if padding is None else FrameStackObservation(env, SIZE, padding_type=padding)


TENSORS = {"cpu": TorchVectorEnv, "gpu": Gpu}
KINDS = ["single", "list", *TENSORS]
ON_KINDS = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, lengths: Sequence[int] = LENGTHS, padding: str | None = None) -> Any:
    """Environments of some kind; those of tensors are arrays where Gymnasium stacks them."""
    if kind == "single":
        return numbered(0, lengths, padding)
    if kind in TENSORS and padding is None:
        return TENSORS[kind](Vector(COUNT, lengths, ENDS), partial_reset="mask")
    return [partial(numbered, number, lengths, padding) for number in range(COUNT)]


def collected(source: Any, policy: Any = None, count: int = 4, **options: Any) -> list[Any]:
    """The first batches of a collector."""
    with Collector(source, policy, **{"frames_per_batch": 24, **options}) as collector:
        collector.set_seed(1)
        return [collector.next() for _ in range(count)]


def check_equal(found: Sequence[TensorDictBase], expected: Sequence[TensorDictBase]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.names == other.names
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key, value in other.items(True, True):
            assert one.get(key).shape == value.shape, key
            assert one.get(key).dtype == value.dtype, key
            assert torch.equal(one.get(key), value), key


def check_as_wrapped(
    kind: str, policy: Any = None, lengths: Sequence[int] = LENGTHS, **options: Any
) -> list[TensorDictBase]:
    """Compares batches with stacks with those of wrapped environments, and returns them."""
    found = collected(made(kind, lengths), policy, frame_stack=FrameStack(SIZE), **options)
    check_equal(found, collected(made(kind, lengths, "reset"), policy, **options))
    return found


# --- policies


def choose_by_stack(observation: Tensor) -> Tensor:
    """A policy whose action depends on all frames of a stack."""
    weights = torch.arange(1, observation.shape[-2] + 1)
    number = (observation[..., 1:3].sum(-1) * weights).sum(-1).long()
    return nn.functional.one_hot(number % 4, 4)


def by_stack(choose: Any = choose_by_stack) -> TensorDictModule:
    return TensorDictModule(choose, ["observation"], ["action"])


class Linear(nn.Module):
    """A policy with weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(-2), nn.Linear(5 * SIZE, 4))

    def forward(self, observation: Tensor) -> Tensor:
        return nn.functional.one_hot(self.layers(observation).argmax(-1), 4)


class Spoiler:
    """A policy that changes its input, and keeps it."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, observation: Tensor) -> Tensor:
        action = choose_by_stack(observation)
        self.kept.append((observation, observation.clone()))
        observation += 1
        return action


@ON_KINDS
def test_batches_may_be_longer_than_a_chunk(kind: str) -> None:
    frames = 520 if kind == "single" else 520 * COUNT
    check_as_wrapped(kind, by_stack(), frames_per_batch=frames, count=2, storing_device="cpu")


@ON_KINDS
def test_a_compiled_policy_reads_stacks(kind: str) -> None:
    compiled = {"backend": "eager"}
    check_as_wrapped(kind, Linear(), compile_policy=compiled, storing_device="cpu")


@ON_KINDS
def test_a_policy_may_change_and_keep_its_input(kind: str) -> None:
    spoiler = Spoiler()
    check_as_wrapped(kind, by_stack(spoiler))
    assert len(spoiler.kept) >= 2 * 4 * 8
    assert all(torch.equal(now, before + 1) for now, before in spoiler.kept)


class Cart(gymnasium.Env):
    """An environment whose action is a vector, with short episodes of different lengths."""

    observation_space, action_space = Box(-99, 999, (3,)), Box(-99, 999, (2,))

    def __init__(self) -> None:
        self.steps = self.episodes = 0

    def reset(self, **_: Any) -> Any:
        self.episodes += 1
        return self.observe(), {}

    def observe(self) -> Any:
        self.steps += 1
        return np.full(3, self.steps, np.float32)

    def step(self, action: Any) -> Any:
        done = self.steps % (3 + self.episodes % 4) == 0
        return self.observe(), float(action[0]), done, False, {}


class Inputs(TorchFunctionMode):
    """Notes the addresses of tensors that are flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.flatten:
            self.addresses.append(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 3])
def test_a_harmless_policy_reads_windows_without_a_copy(count: int) -> None:
    # It picks two of the numbers: sums are rounded as some processors like it in other memory.
    picks = nn.Linear(3 * SIZE, 2, bias=False)
    picks.weight.data.zero_()[[0, 1], [1, 3 * SIZE - 1]] = 1
    policy = by_stack(nn.Sequential(nn.Flatten(-2), picks))
    collector = Collector(Cart(), policy, frames_per_batch=20, frame_stack=SIZE)
    with collector, Inputs() as inputs:
        collector.next()
    assert set(np.diff(inputs.addresses)) == {3 * 4}  # bytes of a frame
    wrapped = [lambda: FrameStackObservation(Cart(), SIZE)] * count
    found = collected([Cart] * count, policy, frame_stack=SIZE)
    check_equal(found, collected(wrapped, policy))


# --- memory


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_batch_stores_each_frame_once(kind: str) -> None:
    (batch,) = check_as_wrapped(kind, None, (30,), count=1, frames_per_batch=100 * COUNT)
    observation, after = batch["observation"], batch["next", "observation"]
    assert isinstance(observation, StackedFrames)
    assert observation.frames is after.frames
    # 100 steps and 4 frames before them in each environment, and 9 that begin episodes.
    used = len(torch.unique(torch.cat([observation.positions, after.positions])))
    assert used == 104 * COUNT + 9
    assert len(observation.frames) < 1.1 * used


def test_a_batch_has_more_memory_if_episodes_are_short() -> None:
    long, short = (
        check_as_wrapped("single", None, lengths, count=1, frames_per_batch=64)[0]
        for lengths in ((100,), (1,))
    )
    assert len(short["observation"].frames) > len(long["observation"].frames)


def test_an_observation_keeps_the_memory_of_its_batch() -> None:
    with Collector(NumberedEnv(lengths=[7]), frames_per_batch=10, frame_stack=3) as collector:
        kept = [collector.next()["next", "observation"][2:] for _ in range(5)]
        values = [one.to_dense() for one in kept]
        for _ in range(5):
            collector.next()
        assert collector.stats()["batches_held"] >= 5
        for one, value in zip(kept, values, strict=True):
            assert torch.equal(one, value)
        del kept, one
        gc.collect()
        collector.next()
        assert collector.stats()["batches_held"] < 3


@ON_KINDS
def test_the_frame_of_zeros_is_written_in_used_memory(kind: str) -> None:
    stack = FrameStack(SIZE, "zero")
    with Collector(made(kind, (30,)), frames_per_batch=300, frame_stack=stack) as collector:
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
        tensors_of(create_env_fn=made(kind), frames_per_batch=COUNT * steps, **options)
        for steps in (10, 3000)
    )
    # Other objects, such as those of the test before, may go in between.
    assert many - few < 500


# --- other environments


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


@pytest.mark.parametrize("padding", ["reset", "zero"])
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("keys", [None, ["b"], "a"], ids=str)
def test_keys_choose_the_observations(kind: str, padding: Any, keys: Any) -> None:
    plain = collected(several(kind))
    found = collected(several(kind), frame_stack=FrameStack(SIZE, padding, keys))
    for key in ("a", "b", "c", "action_mask"):
        after = torch.cat([batch["next", key] for batch in found], 1)
        if key in (keys or ["a", "b", "c"]):
            assert torch.equal(after, dense_stacks(plain, key, SIZE, padding))
            assert found[0][key].shape == found[0]["next", key].shape
        else:
            assert torch.equal(after, torch.cat([batch["next", key] for batch in plain], 1))


def test_tensors_are_normalised_beside_stacks() -> None:
    stack = {"frame_stack": FrameStack(SIZE, keys=["a"])}
    normalize = {
        "normalize_observations": NormalizeObservation(keys=["c"]),
        "normalize_rewards": True,
    }
    found, stacked, normalized = (
        collected(SeveralTensors(), **options)
        for options in ({**stack, **normalize}, stack, normalize)
    )
    for both, one, other in zip(found, stacked, normalized, strict=True):
        for prefix in ((), ("next",)):
            assert torch.equal(both[(*prefix, "a")], one[(*prefix, "a")])
            assert torch.equal(both[(*prefix, "c")], other[(*prefix, "c")])
        assert torch.equal(both["next", "reward"], other["next", "reward"])
    # The first batch has no statistics.
    assert not torch.equal(found[-1]["c"], stacked[-1]["c"])


def test_an_evaluation_stacks_frames() -> None:
    results = []
    for padding in (None, "reset"):
        options = {"frame_stack": SIZE} if padding is None else {}
        env = numbered(0, (9, 30), padding)
        with Evaluator(env, by_stack(), num_trajectories=3, collector_kwargs=options) as evaluator:
            results.append(evaluator.evaluate())
    assert results[0]["eval/reward"] == results[1]["eval/reward"]


@ON_KINDS
def test_a_fake_batch_has_the_layout_of_a_real_one(kind: str) -> None:
    with Collector(made(kind), frames_per_batch=12, frame_stack=SIZE) as collector:
        fake, real = collector.fake_tensordict(), collector.next()
    assert {k: (v.shape, v.dtype) for k, v in fake.items(True, True)} == {
        k: (v.shape, v.dtype) for k, v in real.items(True, True)
    }
    assert not fake["observation"].any()


# --- workers


def of_workers(sources: Any, count: int = 3, **options: Any) -> list[TensorDictBase]:
    options = {"frames_per_batch": 40, **options}
    with make(create_env_fn=sources, policy=by_stack(), **options) as collector:
        collector.set_seed(1)
        return [collector.next().clone() for _ in range(count)]


def in_workers(lengths: Sequence[int], padding: str | None = None, lanes: int = 2) -> list[Any]:
    flat = [partial(numbered, number, lengths, padding) for number in range(2 * lanes)]
    return [flat[:lanes], flat[lanes:]] if lanes > 1 else flat


# With short episodes, the first frames do not fit into the memory of a batch.
@pytest.mark.parametrize(
    ("method", "lengths", "lanes", "options"),
    [
        ("inline", (1, 2), 2, {"cat_results": 0}),
        ("messages", (1, 2), 2, {"cat_results": -1}),
        ("messages", (9, 30), 1, {"cat_results": 0}),
        ("inline", (9, 30), 1, {"cat_results": -1, "frames_per_batch": [12, 30]}),
    ],
)
def test_batches_of_workers_are_combined(method: str, lengths: Any, lanes: int, options: Any):
    options = {"start_method": method, **options}
    found = of_workers(in_workers(lengths, None, lanes), frame_stack=SIZE, **options)
    check_equal(found, of_workers(in_workers(lengths, "reset", lanes), **options))


def test_the_parts_of_workers_share_memory() -> None:
    options = {"frames_per_batch": 80, "frame_stack": SIZE}
    with MultiSyncCollector(in_workers((9, 30)), by_stack(), **options) as collector:
        batch = collector.next()
    observation, after = batch["observation"], batch["next", "observation"]
    assert observation.frames is after.frames
    # 20 steps and 4 frames before them of each of 4 environments; room for the first frames.
    assert len(observation.frames) < 4 * 24 + 20


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


@pytest.mark.parametrize("kind", ["single", "cpu"])
def test_stacks_are_of_observations_that_the_policy_does_not_write(kind: str) -> None:
    def act(frame: TensorDictBase) -> TensorDictBase:
        frame["action"] = choose_by_stack(frame["observation"])
        frame["observation"] = frame["observation"] + 1
        return frame

    options: dict[str, Any] = {"frames_per_batch": 12, "trust_policy": kind == "cpu"}
    with pytest.raises(ValueError, match=r"\['pixels'\], but .* are \['observation'\]"):
        Collector(made(kind), frame_stack=FrameStack(2, keys=["pixels"]), frames_per_batch=12)
    with pytest.raises(ValueError, match=r"the policy writes .*, which frame_stack stacks"):
        Collector(made(kind), act, frame_stack=2, **options)


def test_the_same_object_has_the_stacks_of_each_batch():
    """``return_same_td`` can't write into stacks, so the object gets new ones."""
    options = {"frames_per_batch": 8, "total_frames": 24, "frame_stack": 3, "seed": 0}
    with (
        Collector("CartPole-v1", return_same_td=True, **options) as same,
        Collector("CartPole-v1", **options) as other,
    ):
        objects = set()
        for batch, expected in zip(same, other, strict=True):
            objects.add(id(batch))
            assert (batch == expected).all()
    assert len(objects) == 1
