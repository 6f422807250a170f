"""What several tests of stacked frames need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FrameStackObservation
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from trawl import Collector, ParallelEnv
from trawl.envs import FrameStack
from trawl.testing import NumberedEnv

SIZE = 4
MASK = ("collector", "mask")
MODES = {"same_step": "SAME_STEP", "next_step": "NEXT_STEP", "disabled": "DISABLED"}
KINDS = ["single", "list", *MODES]
LENGTHS = (1, 2, 3, 9)


def choose_by_stack(observation: Tensor) -> Tensor:
    """A policy for stacks of ``NumberedEnv``: the action depends on all frames of a stack."""
    weights = torch.arange(1, observation.shape[-2] + 1)
    number = (observation[..., 1:3].sum(-1) * weights).sum(-1).long()
    return nn.functional.one_hot(number % 4, 4)


def by_stack() -> TensorDictModule:
    """The same as a TensorDict module."""
    return TensorDictModule(choose_by_stack, ["observation"], ["action"])


class Env:
    """A factory of a numbered environment, which stacks its frames with Gymnasium's wrapper."""

    def __init__(self, number: int, lengths: Sequence[int], padding: str | None) -> None:
        self.number, self.lengths, self.padding = number, lengths, padding

    def __call__(self) -> Any:
        first = self.number % len(self.lengths)
        env = NumberedEnv(self.number, [*self.lengths[first:], *self.lengths[:first]])
        if self.padding is None:
            return env
        return FrameStackObservation(env, SIZE, padding_type=self.padding)


def made(kind: str, lengths: Sequence[int] = LENGTHS, padding: str | None = None) -> Any:
    """Environments of some kind; with a padding, Gymnasium's wrapper stacks their frames."""
    several = [Env(number, lengths, padding) for number in range(4)]
    if kind == "single":
        return several[0]
    if kind == "list":
        return several[:3]
    if kind == "parallel":
        return ParallelEnv(2, several[:2])
    if kind == "groups":
        return ParallelEnv(4, several, groups=2)
    return lambda: SyncVectorEnv(several[:2], autoreset_mode=AutoresetMode[MODES[kind]])


def collected(
    count: int, cls: Any, envs: Any, policy: Any, stack: FrameStack | None, **options: Any
) -> list[TensorDictBase]:
    """The first batches of a collector."""
    found = []
    with cls(envs, policy, frame_stack=stack, **options) as collector:
        collector.set_seed(1)
        for batch in collector:
            found.append(batch)
            if len(found) == count:
                break
    return found


def check_as_wrapped(
    kind: str,
    padding: Any = "reset",
    lengths: Sequence[int] = LENGTHS,
    count: int = 4,
    policy: Any = None,
    **options: Any,
) -> list[TensorDictBase]:
    """Compares the batches of a collector that stacks frames with those of wrapped ones.

    Returns:
        The batches of the collector that stacks frames.
    """
    options.setdefault("frames_per_batch", 24)
    stack = FrameStack(SIZE, padding)
    found = collected(count, Collector, made(kind, lengths), policy, stack, **options)
    wrapped = made(kind, lengths, padding)
    check_equal(found, collected(count, Collector, wrapped, policy, None, **options))
    return found


def check_equal(found: Sequence[TensorDictBase], expected: Sequence[TensorDictBase]) -> None:
    """Compares batches, but not the observations of steps that are masked out."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.names == other.names
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        mask = other.get(MASK, torch.ones(other.shape, dtype=torch.bool))
        for key, value in other.items(True, True):
            assert one.get(key).shape == value.shape, key
            assert one.get(key).dtype == value.dtype, key
            assert torch.equal(one.get(key)[mask], value[mask]), key
