"""Statistics have exactly the frames that were delivered, also where the last batch is cut off."""

from functools import partial
from typing import Any

import pytest
import torch
from gymnasium.vector import AutoresetMode
from multi_parts import CLASSES
from tensor_parts import COUNT, on_numpy, on_torch

from trawl.collectors import Collector, MultiSyncCollector
from trawl.testing import NumberedEnv

MASK = ("collector", "mask")
OPTIONS: dict[str, Any] = {"exact_frames": True, "frames_per_batch": 8 * COUNT}
BOTH: dict[str, Any] = {"normalize_observations": True, "normalize_rewards": True}


def frames(batches: list[Any]) -> Any:
    """Returns the observations that were delivered, without rows that hold no frame."""
    masks = [batch.get(MASK, torch.ones(batch.shape, dtype=torch.bool)) for batch in batches]
    return torch.cat(
        [batch["observation"][mask] for batch, mask in zip(batches, masks, strict=True)]
    )


@pytest.mark.parametrize(
    ("cls", "tensors", "total"),
    [(CLASSES[0], False, 31), (CLASSES[0], True, 2), (CLASSES[1], True, 31)],
)
def test_workers(cls: Any, tensors: bool, total: int) -> None:
    make = partial(on_torch if tensors else on_numpy, AutoresetMode.SAME_STEP)
    settings = {"start_method": "inline", "total_frames": total, **OPTIONS, **BOTH}
    with cls([make] * 2, **settings) as collector:
        delivered = len(frames([batch.clone() for batch in collector]))
        assert collector.normalization.observations["observation"].count == delivered == total
        assert collector.normalization.rewards["reward"].count == total


@pytest.mark.parametrize(
    ("cls", "make", "total"),
    [
        (CLASSES[0], on_numpy, 70),
        (CLASSES[0], on_torch, 73),
        (CLASSES[1], on_numpy, 79),
        (CLASSES[1], on_torch, 64),
    ],
)
def test_workers_whose_rows_may_hold_no_frame(cls: Any, make: Any, total: int) -> None:
    settings = {"start_method": "inline", "total_frames": total, **OPTIONS, **BOTH}
    settings["frames_per_batch"] = 4 * COUNT
    workers = [partial(make, AutoresetMode.NEXT_STEP)] * (2 if cls is MultiSyncCollector else 1)
    with cls(workers, **settings) as collector:
        delivered = len(frames([batch.clone() for batch in collector]))
        assert collector.normalization.observations["observation"].count == delivered == total
        assert collector.normalization.rewards["reward"].count == total


class Buffer:
    """Counts what is written to it."""

    count = 0

    def extend(self, batch: Any) -> None:
        self.count += batch.numel()


def test_frames_for_a_buffer() -> None:
    buffer = Buffer()
    envs = [NumberedEnv] * COUNT
    with Collector(envs, total_frames=31, replay_buffer=buffer, **OPTIONS, **BOTH) as collector:
        for _ in collector:
            pass
        assert collector.normalization is not None
        assert collector.normalization.observations["observation"].count == 31 == buffer.count
