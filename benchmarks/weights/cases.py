"""The cases of weights: what they cost the learner, and workers, and Trawl's goals.

TorchRL's schemes have their defaults. By its `SharedMemWeightSyncScheme` workers on the CPU act
with the learner's own parameters: its call without weights copies nothing, as there is nothing to
copy, and what the optimiser does is seen in the middle of a batch. With weights that are given,
both copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

import work
from harness import TRAWL
from multi import peers
from multi.cases import AHEAD, FRAMES, TORCHRL, TRUSTED, WORKERS
from multi.collecting import Collecting
from multi.race import Contender, Goal, Measure, Race
from weights import models
from weights.contestants import Learner, Reading, Updating

COUNTS = (2, 8, 16)
SHARED, SENT = "SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"
# More of its workers take minutes to start.
TORCHRL_COUNTS = COUNTS[:2]
ALONE = "without updates"

CALL = {
    "own": Measure("ms, the policy's own weights", less=True, digits=2),
    "own_copies": Measure("memory copies, the policy's own weights", less=True, digits=2),
    "given": Measure("ms, given weights", less=True, digits=2),
    "given_copies": Measure("memory copies, given weights", less=True, digits=2),
}
TAKE = {
    "take": Measure("ms to load them", less=True, digits=2),
    "take_copies": Measure("memory copies to load them", less=True, digits=2),
    "look": Measure("µs to check for new weights and find none", less=True, digits=3),
}


def trawl(
    kind: peers.Kind, makes: Sequence[Callable[[], Any]], frames: int, policy: nn.Module
) -> Callable[[], Any]:
    """Trawl's collector of a policy."""
    return peers.trawl(kind, makes, policy, frames)


def torchrl(
    kind: peers.Kind,
    makes: Sequence[Callable[[], Any]],
    frames: int,
    scheme: str,
    policy: nn.Module,
) -> Callable[[], Any]:
    """TorchRL's collector of a policy, with the scheme of this name."""
    makes = [peers.wrapped(make) for make in makes]
    construct = peers.torchrl(kind, makes, policy, frames)
    from torchrl import weight_update

    return partial(construct, weight_sync_schemes={"policy": getattr(weight_update, scheme)()})


def learners(
    make_policy: Callable[[], nn.Module],
    count: int,
    with_torchrl: bool = True,
    kind: peers.Kind = "sync",
    make: Callable[[], Any] = work.pendulum,
    frames: int | None = None,
) -> tuple[Contender, ...]:
    """Who gives weights to so many workers."""
    makes, frames, asleep = [make] * count, frames or count, kind == "async"
    ours = partial(trawl, kind, makes, frames)
    found = [Contender(TRAWL, partial(Learner, make_policy, ours, asleep))]
    for scheme in (SHARED, SENT) if with_torchrl else ():
        theirs = partial(torchrl, kind, makes, frames, scheme)
        found.append(
            Contender(
                f"{TORCHRL}, {scheme.removesuffix('WeightSyncScheme')}",
                partial(Learner, make_policy, theirs, asleep),
                scheme,
            )
        )
    return tuple(found)


def _ahead(contenders: Sequence[Contender]) -> tuple[Goal, ...]:
    return tuple(Goal("given", 1.0, one.name) for one in contenders if one.name != TRAWL)


def large(count: int) -> Race:
    """Ten million parameters for so many workers."""
    contenders = learners(models.large, count, count in TORCHRL_COUNTS)
    return Race(
        f"weights_{count}",
        f"Sending 10 million parameters to {count} workers",
        contenders,
        CALL,
        (Goal("own_copies", 1.5), Goal("given_copies", 1.5), *_ahead(contenders)),
        stretch=3.0,
    )


def asleep() -> Race:
    contenders = learners(models.large, 2, kind="async", make=work.slow_pendulum, frames=100)
    return Race(
        "weights_asleep",
        "Sending 10 million parameters to 2 workers whose environments are sleeping in `step`",
        contenders,
        CALL,
        (Goal("own_copies", 1.5), Goal("given_copies", 1.5), *_ahead(contenders)),
        stretch=2.0,
    )


def small(size: int) -> Race:
    """A thousand tensors."""
    contenders = learners(partial(models.scattered, 1000, size), 2)
    return Race(
        f"weights_1000x{size}",
        f"Sending 1,000 tensors of {size:,} floats to 2 workers",
        contenders,
        CALL,
        (Goal("own_copies", 2.0), Goal("given_copies", 2.0), *_ahead(contenders)),
    )


def taking(name: str, title: str, make_policy: Callable[[], nn.Module], goal: float | None) -> Race:
    """A worker's side."""
    goals = (Goal("look", 1.0),) if goal is None else (Goal("take_copies", goal), Goal("look", 1.0))
    return Race(
        f"taking_{name}",
        f"A worker loads {title}",
        (Contender(TRAWL, partial(Reading, make_policy)),),
        TAKE,
        goals,
    )


def collecting(kind: peers.Kind) -> Race:
    """Two workers that get weights after each batch, and two that get none."""
    frames = WORKERS * FRAMES if kind == "sync" else FRAMES // 2
    ahead, makes = 1 if kind == "sync" else AHEAD, [work.pendulum] * WORKERS
    ours = partial(_made, trawl, kind, makes, frames)
    theirs = partial(_made, torchrl, kind, makes, frames, SHARED)
    return Race(
        f"updating_{kind}",
        f"{WORKERS} workers {'in lockstep' if kind == 'sync' else 'at their own pace'}, Pendulum, "
        "MLP 2x64, new weights after each batch",
        (
            Contender(TRAWL, partial(Updating, ours, ahead)),
            Contender(ALONE, partial(Collecting, ours, ahead), "Trawl's collector"),
            Contender(TORCHRL, partial(Updating, theirs, ahead), f"{SHARED}, {TRUSTED}"),
        ),
        goals=(Goal("speed", 0.95, ALONE),),
    )


def _made(prepare: Callable[..., Callable[[], Any]], *args: Any) -> Callable[[], Any]:
    return prepare(*args, models.small())


RACES: dict[str, Callable[[], Race]] = {
    **{f"weights_{count}": partial(large, count) for count in COUNTS},
    "weights_asleep": asleep,
    **{f"weights_1000x{size}": partial(small, size) for size in (10_000, 1_000)},
    "taking_large": partial(
        taking, "large", "10 million parameters, an MLP of 6 layers", models.large, 1.1
    ),
    **{
        f"taking_1000x{size}": partial(
            taking,
            f"1000x{size}",
            f"1,000 tensors of {size:,} floats",
            partial(models.scattered, 1000, size),
            None,
        )
        for size in (10_000, 1_000)
    },
    "updating_sync": partial(collecting, "sync"),
    "updating_async": partial(collecting, "async"),
}
