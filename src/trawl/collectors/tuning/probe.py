"""First look at an environment and a policy, in this process."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from trawl.collectors.single import Collector
from trawl.envs.build import is_env, refuse_policy
from trawl.envs.types import is_list

# Seconds and batches after which a probe ends.
_SECONDS = 0.2
_BATCHES = 2


@dataclass(frozen=True)
class Probe:
    """Findings from a few steps of one environment.

    Attributes:
        seconds_per_frame: wall-clock time of a frame, an upper bound.
        env_batch: number of environments that the source makes at once; 0 for a single one.
        waits: True if the process spent more time waiting, for anything but a processor, than
            running.
    """

    seconds_per_frame: float
    env_batch: int
    waits: bool


def probe(source: Any, policy: Any, options: Mapping[str, Any]) -> Probe:
    """Steps one environment a few times.

    Args:
        source: the source of one environment.
        policy: the policy, or None.
        options: options of the collector.

    Raises:
        Exception: any error of the environment, the policy or the options.
    """
    with Collector(source, policy, frames_per_batch=1, **options) as collector:
        collector.next()
        start, (ran, queued) = time.perf_counter(), processor_seconds()
        frames = batches = 0
        while batches < _BATCHES or time.perf_counter() - start < _SECONDS:
            batch = collector.next()
            assert batch is not None
            frames += batch.numel()
            batches += 1
        wall, after = time.perf_counter() - start, processor_seconds()
        size: Sequence[int] = collector.env.batch_size
        return Probe(
            seconds_per_frame=wall / frames,
            env_batch=math.prod(size) if size else 0,
            waits=mostly_waits(wall, after[0] - ran, after[1] - queued),
        )


def mostly_waits(wall: float, ran: float, queued: float) -> bool:
    """Returns True if a process waited, for anything but a processor, for longer than it ran.

    Args:
        wall: seconds that passed.
        ran: seconds for which the process ran.
        queued: seconds for which it waited for a processor.

    Examples:
        >>> mostly_waits(1.0, ran=0.1, queued=0.0), mostly_waits(1.0, ran=0.1, queued=0.9)
        (True, False)
    """
    return wall - ran - queued > ran


def processor_seconds() -> tuple[float, float]:
    """Returns the seconds for which this process ran, and waited for a processor to run on."""
    # Other threads of the environment run as well.
    ran = time.process_time()
    try:
        _, queued, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
        return ran, int(queued) / 1e9
    except (OSError, ValueError):  # only Linux has this file
        return ran, 0.0


def check_source(source: Any, purpose: str) -> None:
    """Rejects a source from which environments can't be made repeatedly.

    Args:
        source: the argument ``create_env_fn``.
        purpose: name of the function or option that makes the environments.

    Raises:
        TypeError: if the source is a list, an existing environment or a policy.
    """
    refuse_policy(source)
    if is_list(source):
        raise TypeError(
            f"{purpose} needs the source of one environment, but create_env_fn is a list of "
            f"{len(source)}: pass a Gymnasium id, or a function that makes an environment"
        )
    if is_env(source):
        raise TypeError(
            f"{purpose} makes environments repeatedly, but create_env_fn is an existing "
            f"environment: {source!r}. Pass a Gymnasium id, or a function that makes it"
        )


def own_copy(policy: Any) -> Any:
    """Returns a copy of a module, so that trials leave no trace in it; other policies as they are.

    A module that can't be copied is returned as well.
    """
    if not isinstance(policy, nn.Module):
        return policy
    try:
        return copy.deepcopy(policy)
    except Exception:
        return policy
