"""What several tests of collectors need: policies, buffers and ways to compare batches."""

from __future__ import annotations

import re
import threading
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from trawl.collectors import Collector

# Nothing a test waits for takes longer, unless it is stuck.
PATIENCE = 300


def named(value: object) -> str:
    """The name of a parametrized case: the same in each test process, so without addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def choose_by_step(observation: Tensor) -> Tensor:
    """A policy for ``NumberedEnv``: the action is the number of the step, modulo 4."""
    return nn.functional.one_hot(observation[..., 2].long() % 4, 4)


def by_step() -> TensorDictModule:
    """The same as a TensorDict module."""
    return TensorDictModule(choose_by_step, in_keys=["observation"], out_keys=["action"])


class Chooses(nn.Module):
    """Policy that takes the action that the sum of the observation names."""

    def forward(self, observation: Tensor) -> Tensor:
        return nn.functional.one_hot(observation.sum(-1).long().abs() % 4, 4)


def batches(collector: Collector) -> list[TensorDictBase]:
    """All batches; the collector is closed after."""
    with collector:
        return list(collector)


def first_batch(*args: Any, **options: Any) -> TensorDictBase:
    """The first batch of a collector of these arguments."""
    with Collector(*args, **options) as collector:
        batch: TensorDictBase = next(iter(collector))
    return batch


def layout(batch: TensorDictBase) -> dict[Any, Any]:
    """Shape and dtype of each leaf, by key."""
    return {key: (value.shape, value.dtype) for key, value in batch.items(True, True)}


def keys(batch: TensorDictBase) -> set[Any]:
    """The keys of the leaves."""
    return set(batch.keys(True, True))


class Buffer:
    """A replay buffer of the fewest methods, on which other threads can wait."""

    def __init__(self) -> None:
        self.frames: list[TensorDictBase] = []
        self.changed = threading.Condition()

    def extend(self, batch: TensorDictBase) -> None:
        with self.changed:
            self.frames.extend(batch.reshape(-1).unbind(0))
            self.changed.notify_all()

    def add(self, frame: TensorDictBase) -> None:
        with self.changed:
            self.frames.append(frame)
            self.changed.notify_all()

    def __len__(self) -> int:
        return len(self.frames)

    def wait_for(self, frames: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.frames) >= frames, PATIENCE)

    def content(self) -> TensorDictBase:
        return torch.stack(self.frames)
