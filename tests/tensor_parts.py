"""Policies and comparisons for batches of environments whose data are tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase

from trawl.collectors import Collector
from trawl.envs import TorchVectorEnv
from trawl.testing import NumberedTorchEnv

COUNT = 3
LENGTHS = [2, 3, 1, 4]
ENDS = ["terminated", "truncated", "both"]


def on_torch(mode: AutoresetMode, **options: Any) -> TorchVectorEnv:
    env = NumberedTorchEnv(COUNT, LENGTHS, ENDS, mode)
    if mode is AutoresetMode.SAME_STEP:
        options.setdefault("partial_reset", "mask")
    return TorchVectorEnv(env, **options)


def collected(
    env: Any, policy: Any, count: int = 4, seed: int = 3, **options: Any
) -> tuple[list[TensorDictBase], dict[str, Any]]:
    """Returns copies of the first batches of a collector, and its statistics."""
    with Collector(env, policy, **{"total_frames": -1, **options}) as collector:
        collector.set_seed(seed)
        found = []
        for batch in collector:
            found.append(batch.clone())
            if len(found) == count:
                break
        return found, collector.stats()


def assert_same(one: Sequence[TensorDictBase], other: Sequence[TensorDictBase]) -> None:
    """Compares batches in keys, shapes, dtypes and values, also where these are no tensors."""
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        assert a.batch_size == b.batch_size
        assert a.names == b.names
        assert set(a.keys(True, True)) == set(b.keys(True, True))
        for key in a.keys(True, True):
            x, y = a.get(key), b.get(key)
            if isinstance(x, torch.Tensor):
                assert x.dtype is y.dtype, key
                assert torch.equal(x, y), (key, x, y)
            else:
                assert str(x) == str(y), key
