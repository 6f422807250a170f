"""TorchRL's buffers of all kinds, and what a collector must have put into them.

Tests of each place where workers may live use these.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from multi_parts import envs
from tensordict import TensorDictBase

from trawl.testing import NumberedEnv

data = pytest.importorskip("torchrl.data")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FRAMES, SIZE = 240, 1000


def prioritized(sampler: Any) -> Any:
    """A buffer whose frames are drawn by priority."""
    return data.TensorDictReplayBuffer(
        storage=data.LazyTensorStorage(SIZE), sampler=sampler, batch_size=64, priority_key="error"
    )


def own_prioritized() -> Any:
    """By the sampler of the DQN example, which is one for TorchRL's buffers."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        sampler = importlib.import_module("dqn").Prioritized(SIZE, 1.0, 1.0)
    finally:
        sys.path.remove(str(EXAMPLES))
    return prioritized(sampler)


def torchrl_prioritized() -> Any:
    """By TorchRL's compiled sampler."""
    try:
        sampler = data.replay_buffers.samplers.PrioritizedSampler(SIZE, alpha=1.0, beta=1.0)
    except RuntimeError as error:
        pytest.skip(f"TorchRL's sampler does not load with this PyTorch: {error}")
    return prioritized(sampler)


BUFFERS: dict[str, Callable[[], Any]] = {
    "memory": lambda: data.ReplayBuffer(storage=data.LazyTensorStorage(SIZE), batch_size=64),
    "disk": lambda: data.ReplayBuffer(storage=data.LazyMemmapStorage(SIZE), batch_size=64),
    "shared": lambda: data.ReplayBuffer(
        storage=data.LazyMemmapStorage(SIZE), batch_size=64, shared=True
    ),
    "list": lambda: data.ReplayBuffer(storage=data.ListStorage(SIZE), batch_size=64),
    "prioritized": own_prioritized,
    "torchrl_prioritized": torchrl_prioritized,
}
kinds = pytest.mark.parametrize("kind", BUFFERS)

# Takes options, and gives a collector of two workers with one environment each.
Make = Callable[..., Any]


def check_contents(content: TensorDictBase, frames: int = FRAMES) -> None:
    """Each environment's frames are there once, from its first on, without a gap."""
    assert content.shape == (frames,)
    numbers = NumberedEnv.numbers(content)
    assert set(numbers[:, 0].tolist()) <= {0, 1}
    for env in numbers[:, 0].unique().tolist():
        steps = numbers[numbers[:, 0] == env][:, 3].sort().values
        assert torch.equal(steps, torch.arange(len(steps)).to(steps))


def check_iteration(make: Make, kind: str, **options: Any) -> None:
    """Iteration fills the buffer with exactly the frames that were asked for."""
    buffer = BUFFERS[kind]()
    source = envs(2, lengths=[1000])
    with make(source, replay_buffer=buffer, total_frames=FRAMES, **options) as collector:
        for batch in collector:
            assert batch is None
        assert collector.stats()["frames"] == FRAMES
    content = buffer[:]
    check_contents(torch.stack(content) if isinstance(content, list) else content)
    assert buffer.sample().shape == (64,)
    if "prioritized" in kind:
        _check_priorities(buffer)


def _check_priorities(buffer: Any) -> None:
    numbers = torch.arange(FRAMES)
    buffer.update_priority(numbers, 1e-3 * torch.ones(FRAMES))
    buffer.update_priority(numbers[7:8], torch.tensor([1e6]))
    assert (buffer.sample()["index"] == 7).float().mean() > 0.9


def check_background(make: Make, buffer: Any, **options: Any) -> None:
    """It is filled while others sample, and nothing is added during a pause."""
    source = envs(2, lengths=[1000])
    collector = make(source, replay_buffer=buffer, total_frames=10_000_000, **options)
    collector.start()
    try:
        _wait(collector, lambda: len(buffer) >= 40)
        assert buffer.sample() is not None
        with collector.pause():
            count = buffer.write_count
            collector.update_policy_weights_()
            time.sleep(0.05)  # many batches, if it were not held
            assert buffer.write_count == count == collector.stats()["frames"]
        assert collector.is_running()
        _wait(collector, lambda: buffer.write_count > count)
    finally:
        ending = collector.async_shutdown()
        if inspect.isawaitable(ending):  # that of Ray collectors, as TorchRL's
            asyncio.run(_wait_for(ending))
    assert buffer.write_count == collector.stats()["frames"]


async def _wait_for(ending: Awaitable[Any]) -> None:
    await ending


def _wait(collector: Any, ready: Callable[[], bool]) -> None:
    while not ready():
        collector.stats()  # raises what went wrong there
        time.sleep(0.01)
