"""The cases of clusters: who does the same work, at what settings, and Trawl's goals.

All of a cluster is on this machine: its processes share two cores, and nothing goes over a wire.
What is measured is what a collector adds. TorchRL's workers have the settings of `multi.cases`;
what it sends weights by are its defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import work
from clusters import peers
from clusters.contestants import Acting, Bringing, OnRay, Starting
from harness import TRAWL
from multi import peers as local
from multi.cases import AHEAD, TORCHRL, TRUSTED, WORKERS
from multi.collecting import Collecting
from multi.race import Contender, Goal, Measure, Race
from weights import models

FRAMES = 1000
ACTORS = 8
# Seconds without an answer after which a peer counts as hung.
PATIENCE = 180.0
MULTI = "MultiCollector"
SCHEME, UPDATER = "RayWeightSyncScheme", "RayWeightUpdater"
TITLES: dict[peers.Where, str] = {
    "ray": "Ray, {} actors",
    "group": "Process groups (gloo), {} ranks",
    "rpc": "RPC, {} nodes",
}
PACES: dict[peers.Kind, str] = {"sync": "in lockstep", "async": "at their own pace"}


def trawl(
    where: peers.Where, kind: peers.Kind, make: Callable[[], Any], frames: int, policy: Any
) -> Callable[[], Any]:
    """Trawl's collector of two workers."""
    return peers.trawl(where, kind, [make] * WORKERS, policy, frames)


def torchrl(
    where: peers.Where, kind: peers.Kind, make: Callable[[], Any], frames: int, policy: Any
) -> Callable[[], Any]:
    """TorchRL's."""
    return peers.torchrl(where, kind, [local.wrapped(make)] * WORKERS, policy, frames)


def speed(where: peers.Where, kind: peers.Kind) -> Race:
    """Frames per second, next to workers that share memory, and to TorchRL's."""
    policy = work.acting(work.mlp(3, 1))
    made = OnRay if where == "ray" else Collecting
    # Asynchronous workers of TorchRL have one batch each that waits.
    ours, theirs = (1, 1) if kind == "sync" else (AHEAD, WORKERS)
    shared = partial(local.trawl, kind, [work.pendulum] * WORKERS, policy, FRAMES)
    given = where, kind, work.pendulum, FRAMES, policy
    return Race(
        f"{where}_{kind}",
        f"{TITLES[where].format(WORKERS)} {PACES[kind]}, Pendulum, MLP 2x64, batches of {FRAMES:,}",
        (
            Contender(TRAWL, partial(made, partial(trawl, *given), ours)),
            Contender(
                MULTI, partial(Collecting, shared, ours), "Trawl's collector over shared memory"
            ),
            Contender(
                TORCHRL, partial(made, partial(torchrl, *given), theirs), TRUSTED, may_fail=True
            ),
        ),
        goals=(
            Goal("speed", 0.85, MULTI),
            Goal("speed", 6.0 if where == "ray" else 4.0, TORCHRL),
        ),
        stretch=2.0,
        patience=PATIENCE,
    )


def images() -> Race:
    """Large batches, and what of them the driver has in memory of its own."""
    given = "ray", "async", work.ImageEnv, FRAMES, work.acting(work.Constant())
    return Race(
        "ray_images",
        f"{TITLES['ray'].format(WORKERS)} {PACES['async']}, 84x84x4 uint8 frames, constant policy, "
        f"batches of {FRAMES:,}",
        (
            Contender(TRAWL, partial(Bringing, partial(trawl, *given), AHEAD)),
            Contender(
                TORCHRL,
                partial(Bringing, partial(torchrl, *given), WORKERS),
                TRUSTED,
                may_fail=True,
            ),
        ),
        {
            "speed": Measure("frames/s"),
            "cpu": Measure("ms of the driver's time per batch", less=True, digits=2),
            "own": Measure("MB of a batch copied to the driver's memory", less=True, digits=2),
        },
        (Goal("speed", 4.0, TORCHRL), Goal("own", 0.1)),
        stretch=2.0,
        patience=PATIENCE,
    )


def first_batch() -> Race:
    """A start on a running cluster already."""
    frames = WORKERS * 100
    given = "ray", "sync", work.pendulum, frames, work.acting(work.mlp(3, 1))
    return Race(
        "ray_first_batch",
        f"From the constructor's call to the first batch, {TITLES['ray'].format(WORKERS)}, on a "
        "running cluster",
        (
            Contender(TRAWL, partial(Starting, partial(trawl, *given))),
            Contender(TORCHRL, partial(Starting, partial(torchrl, *given)), TRUSTED, may_fail=True),
        ),
        {"first_batch": Measure("s", less=True, digits=2)},
        (Goal("first_batch", 2.0, TORCHRL),),
        patience=PATIENCE,
    )


def weights() -> Race:
    """Ten million parameters for eight actors."""
    makes = [work.pendulum] * ACTORS
    wrapped = [local.wrapped(work.pendulum)] * ACTORS
    ours = partial(_fed, partial(peers.trawl, "ray", "sync", makes))
    theirs = partial(_fed, partial(peers.torchrl, "ray", "sync", wrapped))
    updated = partial(_fed, partial(peers.torchrl_updater, wrapped))
    names = {SCHEME: f"{TORCHRL}, scheme", UPDATER: f"{TORCHRL}, updater"}
    prepared = {SCHEME: theirs, UPDATER: updated}
    return Race(
        f"ray_weights_{ACTORS}",
        f"Sending {models.LARGE} million parameters to {ACTORS} Ray actors",
        (
            Contender(TRAWL, partial(Acting, models.large, ours)),
            *(
                Contender(name, partial(Acting, models.large, prepared[how]), how, may_fail=True)
                for how, name in names.items()
            ),
        ),
        {
            "acted": Measure("ms until all actors act with them", less=True, digits=1),
            "call": Measure("ms until the learner's call returns", less=True, digits=1),
        },
        tuple(Goal(measure, 2.0, name) for name in names.values() for measure in ("acted", "call")),
        patience=PATIENCE,
    )


def _fed(prepare: Callable[..., Callable[[], Any]], policy: Any) -> Callable[[], Any]:
    """The collector of a policy that gets new weights, with batches of one frame of each actor."""
    return prepare(policy, ACTORS)


RACES: dict[str, Callable[[], Race]] = {
    **{
        f"{where}_{kind}": partial(speed, where, kind)
        for where in ("ray", "group", "rpc")
        for kind in ("sync", "async")
    },
    "ray_images": images,
    "ray_first_batch": first_batch,
    f"ray_weights_{ACTORS}": weights,
}
