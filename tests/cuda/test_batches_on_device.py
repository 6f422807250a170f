"""Batches of environments whose data are on a GPU, or on the CPU in miniature."""

import gc
import warnings
from typing import Any

import pytest
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from tests.cuda.device import CPU, DEVICE, ON_GPU, few, needs_gpu
from trawl.collectors import Collector

pytestmark = [
    # What PyTorch says of compilers, graphs and profilers on some devices.
    pytest.mark.filterwarnings("ignore:.*registered in PyTree", "ignore:TensorFloat32 tensor"),
    pytest.mark.filterwarnings("ignore:.*Profiler clears events"),
]

COUNT, WIDTH, LENGTH, SIZE = 64, 256, 7, 3
STACKS = pytest.mark.parametrize("frame_stack", [None, SIZE])


class Counting:
    """Environment on the device whose observations have the number of its steps in all places."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium
    num_envs = COUNT
    device = DEVICE
    single_observation_space = Box(-float("inf"), float("inf"), (WIDTH,))
    single_action_space = Box(-1, 1, (2,))

    def __init__(self) -> None:
        self.unwrapped = self

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Tensor, dict[str, Any]]:
        self.steps = torch.zeros(COUNT, device=DEVICE)
        self.age = torch.arange(COUNT, device=DEVICE) % LENGTH
        self.never = torch.zeros(COUNT, dtype=torch.bool, device=DEVICE)
        return self.steps.unsqueeze(-1).expand(COUNT, WIDTH).clone(), {}

    def step(self, action: Tensor) -> tuple[Any, ...]:
        self.steps = self.steps + 1
        self.age = self.age + 1
        ended = self.age >= LENGTH
        self.age = self.age.masked_fill(ended, 0)
        obs = self.steps.unsqueeze(-1).expand(COUNT, WIDTH).clone()
        return obs, self.steps, ended, self.never, {"final_obs": obs + 0.5}

    def close(self) -> None:
        pass


def policy(frame_stack: int | None = None) -> TensorDictModule:
    net: nn.Module = nn.Linear(WIDTH, 2)
    if frame_stack is not None:
        net = nn.Sequential(nn.Flatten(-2), nn.Linear(frame_stack * WIDTH, 2))
    return TensorDictModule(net.to(DEVICE), in_keys=["observation"], out_keys=["action"])


def expected(first: int, steps: int) -> Tensor:
    return torch.arange(first, first + steps, device=DEVICE).expand(COUNT, steps).float()


@needs_gpu
@pytest.mark.parametrize(
    "options",
    [{}, {"frame_stack": SIZE}, {"normalize_observations": True, "normalize_rewards": True}],
    ids=["plain", "stacked", "normalized"],
)
def test_no_step_waits_for_the_device(options: dict[str, Any]) -> None:
    acting = policy(options.get("frame_stack"))
    with Collector(Counting(), acting, frames_per_batch=COUNT * 10, **options) as collector:
        next(iter(collector))
        writer = collector.parts.loop.rollout.writer
        with torch.no_grad():
            writer.begin()
            act, step = writer.bind(0, 10, False)
            assert act is not None
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
                torch.cuda.set_sync_debug_mode("error")
            try:
                for t in range(10):
                    act(t)
                    step(t)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            writer.finish(10)


@needs_gpu
@STACKS
def test_memory_is_not_reused_while_another_stream_reads_it(frame_stack: int | None) -> None:
    side = torch.cuda.Stream()
    options: dict[str, Any] = {"frames_per_batch": COUNT * 10, "frame_stack": frame_stack}
    with Collector(Counting(), policy(frame_stack), **options) as collector:
        iterator = iter(collector)
        copies = []
        for _ in range(6):
            batch = next(iterator)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # The copy starts long after the next batch is collected.
                torch.cuda._sleep(50_000_000)
                observation = batch["observation"]
                copies.append(observation.clone())
                observation.record_stream(side)
            del batch, observation
        torch.cuda.synchronize()
        for index, copy in enumerate(copies):
            newest = copy if frame_stack is None else copy[:, :, -1]
            assert torch.equal(newest[..., 5], expected(10 * index, 10))


def test_stored_on_the_host() -> None:
    options: dict[str, Any] = {"frames_per_batch": COUNT * 10, "storing_device": "cpu"}
    with Collector(Counting(), policy(), **options) as collector:
        iterator = iter(collector)
        for index in range(3):
            batch = next(iterator)
            assert batch.device == CPU
            assert batch["observation"].is_pinned() == ON_GPU
            assert torch.equal(batch["observation"][..., 5], expected(10 * index, 10).cpu())


@needs_gpu
@STACKS
def test_the_profiler_sees_no_wait_in_the_loop(frame_stack: int | None) -> None:
    options: dict[str, Any] = {"frames_per_batch": COUNT * 10, "frame_stack": frame_stack}
    with Collector(Counting(), policy(frame_stack), **options) as collector:
        next(iter(collector))
        writer = collector.parts.loop.rollout.writer
        with torch.no_grad():
            writer.begin()
            act, step = writer.bind(0, 10, False)
            assert act is not None
            with torch.profiler.profile() as profile:
                for t in range(10):
                    act(t)
                    step(t)
            writer.finish(10)
    assert "cudaLaunchKernel" in {event.key for event in profile.key_averages()}
    # The profiler itself waits when it ends.
    with torch.profiler.profile() as empty:
        pass
    assert waits(profile) == waits(empty)


def waits(profile: Any) -> dict[str, int]:
    found = {event.key: event.count for event in profile.key_averages()}
    words = "Synchronize", "DtoH", "HtoD"
    return {name: n for name, n in found.items() if any(word in name for word in words)}


@pytest.mark.parametrize(
    "options",
    [
        {"policy_device": CPU},
        {"policy_device": DEVICE},
        pytest.param({"policy_device": DEVICE, "cudagraph_policy": True}, marks=needs_gpu),
        pytest.param({"policy_device": DEVICE, "compile_policy": True}, marks=needs_gpu),
        {"storing_device": DEVICE},
        {"device": DEVICE},
    ],
    ids=str,
)
def test_devices_of_the_policy_and_of_batches(options: dict[str, Any]) -> None:
    net = policy()
    with Collector(Counting(), net, frames_per_batch=COUNT * 10, **options) as collector:
        for index in range(3):
            batch = collector.next()
            assert batch["observation"].device == DEVICE
            assert torch.equal(batch["observation"][..., 5], expected(10 * index, 10))
            with torch.no_grad():
                actions = net.module(batch["observation"])
            torch.testing.assert_close(batch["action"], actions, rtol=1e-2, atol=1e-2)


class Noisy(nn.Module):
    def forward(self, observation: Tensor) -> Tensor:
        return torch.rand_like(observation[..., :2])


@pytest.mark.parametrize("seed", [None, 3])
def test_the_generator_of_the_device_is_part_of_the_state(seed: int | None) -> None:
    noisy = TensorDictModule(Noisy(), in_keys=["observation"], out_keys=["action"])
    with (
        Collector(Counting(), noisy, frames_per_batch=COUNT * 10) as collector,
        Collector(Counting(), noisy, frames_per_batch=COUNT * 10) as other,
    ):
        if seed is not None:
            collector.set_seed(seed)
        collector.next()
        state = collector.state_dict()
        after = collector.next().clone()
        other.load_state_dict(state)
        assert (other.next() == after).all()


class Late(nn.Module):
    """Network that keeps the device busy, so that it is far behind the host."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, observation: Tensor) -> Tensor:
        if ON_GPU:
            torch.cuda._sleep(2_000_000)
        return self.net(observation)  # type: ignore[no-any-return]


@pytest.mark.parametrize("stored", [CPU, DEVICE], ids=str)
def test_batches_are_whole_when_the_device_is_far_behind(stored: torch.device) -> None:
    late = TensorDictModule(Late(policy().module), in_keys=["observation"], out_keys=["action"])
    options: dict[str, Any] = {"frames_per_batch": COUNT * 10, "storing_device": stored}
    with Collector(Counting(), late, **options) as collector:
        held = [collector.next() for _ in range(4)]
        for index, batch in enumerate(held):
            assert torch.equal(batch["observation"][..., 5], expected(10 * index, 10).to(stored))
            after = batch["next", "observation"][..., 5] - batch["next", "done"][..., 0] / 2
            assert torch.equal(after, expected(10 * index + 1, 10).to(stored))


@pytest.mark.parametrize("options", [{}, {"storing_device": CPU}, {"frame_stack": SIZE}], ids=str)
def test_memory_stays_flat(options: dict[str, Any]) -> None:
    acting = policy(options.get("frame_stack"))
    with Collector(Counting(), acting, frames_per_batch=COUNT * 2, **options) as collector:
        used = []
        for count in (100, few(9_900, 100)):
            for _ in range(count):
                collector.next()
            used.append(torch.cuda.memory_allocated() if ON_GPU else _blocks())
    assert used[0] == used[1]


def _blocks() -> int:
    """Counts the tensors of batches that are alive."""
    gc.collect()
    return sum(type(one) is Tensor and one.shape[-1:] == (WIDTH,) for one in gc.get_objects())
