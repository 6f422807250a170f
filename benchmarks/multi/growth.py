"""How things grow: from 1 worker to 32, and from observations of 1 KB to those of 1 MB."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import work
from harness import HAND, TRAWL
from multi import peers
from multi.cases import BLOCKS, TORCHRL, TRUSTED, collecting, hand_single
from multi.collecting import Several, SideBySide
from multi.race import Contender, Goal, Measure, Race, Result, Verdict

COUNTS = (1, 2, 4, 8, 16, 32)
# More workers of TorchRL take minutes to start.
TORCHRL_COUNTS = COUNTS[:4]
FRAMES = 200
KILOBYTES = (1, 16, 128, 1024)
BATCH_KILOBYTES = 16 * 1024
PER_WORKER = "per further worker"


def workers(count: int) -> Race:
    """The same work with so many workers: its speed, and what starting it took."""
    net, frames = work.mlp(3, 1), count * FRAMES
    contenders = [
        Contender(TRAWL, collecting(peers.trawl, "sync", [work.pendulum] * count, net, frames)),
        Contender(
            HAND,
            partial(SideBySide, partial(hand_single, work.pendulum, net, FRAMES), count),
            "side by side",
        ),
    ]
    if count in TORCHRL_COUNTS:
        theirs = [peers.wrapped(work.pendulum)] * count
        made = collecting(peers.torchrl, "sync", theirs, net, frames)
        contenders.append(Contender(TORCHRL, made, TRUSTED))
    return Race(
        f"workers_{count}",
        f"{count} worker{'s' if count > 1 else ''} in lockstep, Pendulum, MLP 2x64",
        tuple(contenders),
        {
            "speed": Measure("frames/s"),
            "first_batch": Measure("s to the first batch", less=True, digits=2),
            "rss": Measure("MiB in the driver (RSS)", less=True, digits=1),
            "pss": Measure("MiB in the driver (PSS)", less=True, digits=1),
            "batch": Measure("MiB, the batch", less=True, digits=2),
        },
    )


def sizes() -> Race:
    """Two workers in lockstep, whose observations are small or large."""
    return _sizes("sizes", "sync", "in lockstep")


def sizes_async() -> Race:
    """Two workers at their own pace, whose observations are small or large."""
    return _sizes("sizes_async", "async", "at their own pace")


def _sizes(name: str, kind: peers.Kind, pace: str) -> Race:
    net, sync = work.Constant(), kind == "sync"

    def several(part: Callable[[int, int], Any]) -> partial[Several]:
        frames = {size: min(256, max(4, BATCH_KILOBYTES // size)) for size in KILOBYTES}
        return partial(Several, {str(size): part(size, frames[size]) for size in KILOBYTES})

    def env(size: int) -> partial[work.BytesEnv]:
        return partial(work.BytesEnv, size * 1024)

    def collected(prepare: Callable[..., Any], make: Callable[[], Any], frames: int) -> Any:
        return collecting(prepare, kind, [make] * 2, net, 2 * frames if sync else frames)

    def ours(size: int, frames: int) -> Any:
        return collected(peers.trawl, env(size), frames)

    def by_hand(size: int, frames: int) -> Any:
        loop = partial(hand_single, env(size), net, frames, BLOCKS[kind])
        return partial(SideBySide, loop, 2, stacked=sync)

    def theirs(size: int, frames: int) -> Any:
        return collected(peers.torchrl, peers.wrapped(env(size)), frames)

    return Race(
        name,
        f"2 workers {pace}, observations of various sizes, constant policy",
        (
            Contender(TRAWL, several(ours)),
            Contender(HAND, several(by_hand), f"two side by side, {BLOCKS[kind]} blocks each"),
            Contender(TORCHRL, several(theirs), TRUSTED),
        ),
        {f"speed_{size}": Measure(f"frames/s with {size} KB observations") for size in KILOBYTES},
        tuple(
            Goal(f"speed_{size}", bound, name)
            for name, bound in ((HAND, 0.75), (TORCHRL, 8.0))
            for size in KILOBYTES
        ),
        stretch=2.0,
    )


@dataclass(frozen=True)
class PerWorker:
    """What each further worker adds, between the fewest and the most that were measured."""

    fewest: int
    most: int
    start_ms: float
    rss_mib: float
    pss_mib: float
    batch_mib: float


def per_worker(results: Sequence[Result]) -> dict[str, PerWorker]:
    """By contender, for those that were measured with several numbers of workers."""
    found = {}
    for name in (TRAWL, TORCHRL):
        points = {
            COUNTS[i]: result
            for i, result in enumerate(results)
            if result.median(name, "first_batch") is not None
        }
        if len(points) > 1:
            found[name] = _between(name, points)
    return found


def _between(name: str, points: dict[int, Result]) -> PerWorker:
    fewest, most = min(points), max(points)

    def slope(measure: str) -> float:
        low, high = (points[count].median(name, measure) for count in (fewest, most))
        assert low is not None
        assert high is not None
        return (high - low) / (most - fewest)

    return PerWorker(
        fewest,
        most,
        start_ms=1e3 * slope("first_batch"),
        rss_mib=slope("rss"),
        pss_mib=slope("pss"),
        batch_mib=slope("batch"),
    )


def verdicts(found: dict[str, PerWorker]) -> list[Verdict]:
    """What became of the goals of each further worker."""
    if TRAWL not in found:
        return []
    trawl = found[TRAWL]
    # Batches rotate through a few slabs, all of which are in the driver's memory once it read them.
    beyond = trawl.rss_mib - 3 * trawl.batch_mib
    goals = (
        (Goal("start_ms", 150.0), "≤ 150 ms to start", trawl.start_ms),
        (Goal("rss_mib", 0.25), "≤ 0.25 MiB in the driver beyond its slabs", beyond),
    )
    return [
        Verdict(goal, f"{wanted} {PER_WORKER}", [value], value <= goal.bound)
        for goal, wanted, value in goals
    ]
