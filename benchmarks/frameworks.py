"""Contenders that are parts of large frameworks: RLlib's runner, Sample Factory's sampler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from harness import Contender
from rllib import DistributionName, rllib
from samplefactory import sample_factory

DEFAULT = "SingleAgentEnvRunner, default connectors"
FEW = "SingleAgentEnvRunner, one connector; the module draws actions"
SERIAL = "serial_mode, no critic; no true last observations, no ids"


def others(
    make: Callable[[], Any],
    net: nn.Module,
    count: int,
    frames: int,
    distribution: DistributionName | None = None,
    limits: Mapping[str, float] | None = None,
    goal: float | None = None,
) -> tuple[Contender, ...]:
    """RLlib and Sample Factory, each at its own way of the same work.

    Args:
        make: Makes an environment.
        net: Returns actions, or the parameters of a distribution.
        count: Number of environments.
        frames: Frames of a batch.
        distribution: RLlib's class that draws the actions; None if `net` returns them.
        limits: Limits of the actions, which Sample Factory's distributions can't have.
        goal: Trawl shall be at least so many times as fast as RLlib's defaults.
    """
    runner = partial(rllib, make, net, count, frames)
    drawn = {"distribution": distribution, "limits": limits}
    contenders = (
        Contender("RLlib", partial(runner, False, **drawn), goal, DEFAULT),
        Contender("RLlib, one connector", partial(runner, True, **drawn), note=FEW),
    )
    if limits is not None:
        return contenders
    sampler = partial(sample_factory, make, net, count, frames // count, distribution is not None)
    how = "batched_sampling" if count > 1 else "batched_sampling=False"
    return (*contenders, Contender("Sample Factory", sampler, note=f"{how}, {SERIAL}"))
