"""Trawl's and TorchRL's collectors of clusters.

Each function imports what it needs, and returns the call that constructs the collector.
"""

from __future__ import annotations

import multiprocessing
import socket
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from clusters import cluster
from multi.peers import Kind, Make

Where = Literal["ray", "group", "rpc"]
# TorchRL's Ray collector takes -1 for a total that is reached; it has no word for "without end".
ENDLESS = 2**60


def trawl(
    where: Where, kind: Kind, makes: Sequence[Make], policy: Any, frames: int, **options: Any
) -> Callable[[], Any]:
    """Trawl's collector with its defaults; for Ray, on a cluster that is started for it."""
    made = constructor(where, kind, makes, policy, frames, **options)
    _prepare(where, len(makes))
    return made


def constructor(
    where: Where, kind: Kind, makes: Sequence[Make], policy: Any, frames: int, **options: Any
) -> Callable[[], Any]:
    """The same, for a running cluster."""
    from trawl.collectors import distributed

    made, own = {
        "ray": (distributed.RayCollector, {}),
        "group": (distributed.DistributedCollector, {"launcher": "mp"}),
        "rpc": (distributed.RPCCollector, {"launcher": "mp"}),
    }[where]
    return partial(
        made,
        list(makes),
        policy,
        sync=kind == "sync",
        frames_per_batch=frames,
        total_frames=-1,
        **own,
        **options,
    )


def torchrl(
    where: Where, kind: Kind, makes: Sequence[Make], policy: Any, frames: int, **options: Any
) -> Callable[[], Any]:
    """TorchRL's collector; its workers' collectors are spared what `multi.cases` tells of."""
    multiprocessing.set_start_method("spawn", force=True)
    warnings.simplefilter("ignore")
    from torchrl.collectors import distributed

    made, own = {
        "ray": (distributed.RayCollector, {}),
        "group": (distributed.DistributedCollector, {"launcher": "mp", "tcp_port": free_port()}),
        "rpc": (distributed.RPCCollector, {"launcher": "mp", "tcp_port": str(free_port())}),
    }[where]
    _prepare(where, len(makes))
    return partial(
        made,
        list(makes),
        policy,
        sync=kind == "sync",
        frames_per_batch=frames,
        total_frames=ENDLESS,
        collector_kwargs=dict(SPARED),
        **own,
        **options,
    )


def torchrl_updater(makes: Sequence[Make], policy: Any, frames: int) -> Callable[[], Any]:
    """TorchRL's collector with its older way to send weights, which needs to know the actors."""
    made = torchrl("ray", "sync", makes, policy, frames)
    from tensordict import TensorDict
    from torchrl.collectors.weight_update import RayWeightUpdater

    own = TensorDict.from_module(policy).data

    def construct() -> Any:
        collector = made(weight_updater=RayWeightUpdater(own, []))
        collector.weight_updater = RayWeightUpdater(own, collector.remote_collectors)
        return collector

    return construct


# Without them its workers wrap the policy anew.
SPARED = {"trust_policy": True, "auto_register_policy_transforms": False}


def _prepare(where: Where, workers: int) -> None:
    # A cluster runs before anything is measured; one CPU more, for what else wants to be an actor.
    if where == "ray":
        cluster.start(workers + 1)


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
