"""Trawl's and TorchRL's collectors of many processes.

Each function imports what it needs, and returns the call that constructs the collector.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import peers

Kind = Literal["sync", "async"]
Make = Callable[[], Any]


def trawl(
    kind: Kind, makes: Sequence[Make], policy: Any, frames: int, **options: Any
) -> Callable[[], Any]:
    """Trawl's collector with its defaults."""
    from trawl.collectors import MultiAsyncCollector, MultiSyncCollector

    made = MultiSyncCollector if kind == "sync" else MultiAsyncCollector
    return partial(made, makes, policy, frames_per_batch=frames, total_frames=-1, **options)


def serial(make: Make, count: int) -> Any:
    """Several environments in one batch."""
    from trawl.envs import SerialEnv

    return SerialEnv(count, make)


def torchrl(
    kind: Kind,
    makes: Sequence[Make],
    policy: Any,
    frames: int,
    start: Literal["spawn", "fork"] = "spawn",
    **options: Any,
) -> Callable[[], Any]:
    """TorchRL's collector; `trust_policy` spares it a wrapper around the policy.

    TorchRL takes the start method that was set for all of `multiprocessing`, "spawn" by default.
    """
    multiprocessing.set_start_method(start, force=True)  # a host may make several
    warnings.simplefilter("ignore")
    from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

    return partial(
        MultiSyncCollector if kind == "sync" else MultiAsyncCollector,
        makes,
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        trust_policy=True,
        auto_register_policy_transforms=False,
        **options,
    )


def trawl_parallel(
    make: Make | Sequence[Make], count: int, policy: Any, frames: int, **options: Any
) -> Callable[[], Any]:
    """Trawl's collector of one process, whose environments have processes of their own."""
    from trawl.collectors import Collector
    from trawl.envs import ParallelEnv

    def construct() -> Any:
        env = ParallelEnv(count, make, **options)
        return Collector(env, policy, frames_per_batch=frames, total_frames=-1)

    return construct


def torchrl_parallel(make: Make, count: int, policy: Any, frames: int) -> Callable[[], Any]:
    """The same of TorchRL."""
    warnings.simplefilter("ignore")
    from torchrl.collectors import Collector
    from torchrl.envs import ParallelEnv

    def construct() -> Any:
        return Collector(
            ParallelEnv(count, wrapped(make)),
            policy,
            frames_per_batch=frames,
            total_frames=-1,
            trust_policy=True,
            auto_register_policy_transforms=False,
        )

    return construct


def wrapped(make: Make) -> Make:
    """Makes the environment as TorchRL wraps it."""
    return partial(peers.torchrl_single, make)


def wrapped_vector(make: Make, count: int) -> Make:
    """Makes Gymnasium's vector environment as TorchRL wraps it."""
    return partial(peers.torchrl_vector, make, count)
