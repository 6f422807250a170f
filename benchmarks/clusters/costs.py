"""What a driver's processor does for each batch, by the number of workers and by its bytes."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import work
from clusters import cluster, peers
from multi import peers as local
from multi.host import Host

PLACES = {
    "process": "processes of one machine",
    "ray": "Ray actors",
    "group": "ranks of process groups",
    "rpc": "RPC nodes",
    "tree": "Ray actors with workers of their own",
}
ON_RAY = ("ray", "tree")
# What makes the actors of a tree such.
TREE = {"collector_class": "sync", "num_workers_per_collector": 2}
ROWS = 32
SLICES = 5
WARM_UP = 10
PATIENCE = 300.0


@dataclass(frozen=True)
class Point:
    """A way to collect: the pace, how many workers, and how large an observation is."""

    kind: local.Kind
    workers: int
    observation: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.workers} workers, {self.observation} B"


# By their numbers at their own pace, as what each part costs must not depend on it; and by sizes.
SMALL, LARGE = 64, 256 * 1024
POINTS = (
    Point("async", 1, SMALL),
    *(Point("async", 2, size) for size in (SMALL, 32 * 1024, 128 * 1024, LARGE)),
    Point("async", 4, SMALL),
    Point("async", 4, LARGE),
    *(Point("sync", workers, size) for workers in (2, 4) for size in (SMALL, LARGE)),
)


def points_of(where: str) -> tuple[Point, ...]:
    """The points of a place: a tree is there to take workers out of step with each other."""
    return tuple(
        one for one in POINTS if where != "tree" or (one.kind, one.workers) == ("async", 2)
    )


@dataclass(frozen=True)
class Cost:
    """What one point costs.

    Attributes:
        cpu: the driver's processor time, in seconds per batch.
        parts: how many workers made the batch.
        megabytes: its size.
    """

    cpu: float
    parts: int
    megabytes: float


@dataclass(frozen=True)
class Fit:
    """Costs, as `part` seconds for each part of a batch, and `megabyte` seconds for each MB.

    Attributes:
        error: how far the measured costs are from that, as a share: the median, and the most.
    """

    part: float
    megabyte: float
    error: tuple[float, float]


class Costs:
    """Collects at each of some points, in a process of its own."""

    def __init__(self, where: str, points: Sequence[Point]) -> None:
        self._where = where
        self._points = points
        if where in ON_RAY:
            cluster.start(max(point.workers for point in points) + 1)
        self.facts: dict[str, float] = {}
        self.layout: dict[str, str] = {}

    def turn(self, seconds: float) -> dict[str, float]:
        """Seconds of this process's processors per batch, and MB of a batch; by point."""
        found = {}
        for point in self._points:
            with collecting(self._where, point) as batches:
                found[f"{point.name}: cpu"], found[f"{point.name}: MB"] = cost(batches, seconds)
        return found

    def close(self) -> None:
        if self._where in ON_RAY:
            cluster.end()


@contextmanager
def collecting(where: str, point: Point) -> Iterator[Iterator[Any]]:
    """Batches of a point."""
    makes = [partial(work.BytesEnv, point.observation)] * point.workers
    frames = ROWS * (point.workers if point.kind == "sync" else 1)
    policy = work.acting(work.Constant())
    made: Callable[[], Any]
    if where == "process":
        made = local.trawl(point.kind, makes, policy, frames)
    elif where == "tree":
        made = peers.constructor("ray", point.kind, makes, policy, frames, **TREE)
    else:
        made = peers.constructor(where, point.kind, makes, policy, frames)  # type: ignore[arg-type]
    collector = made()
    try:
        yield iter(collector)
    finally:
        collector.shutdown()


def cost(batches: Iterator[Any], seconds: float) -> tuple[float, float]:
    """Processor seconds per batch, beyond what goes on anyway; and MB of a batch."""
    for _ in range(WARM_UP):
        batch = next(batches)
    megabytes = sum(leaf.numel() * leaf.element_size() for leaf in batch.values(True, True)) / 1e6
    del batch
    slices = [_slice(batches, seconds / SLICES) for _ in range(SLICES)]
    # Workers soon have all the batches made that they may, and then nothing happens.
    time.sleep(0.3)
    cpu, start = time.process_time(), time.perf_counter()
    time.sleep(0.3)
    idle = (time.process_time() - cpu) / (time.perf_counter() - start)
    costs = [(cpu - idle * elapsed) / count for cpu, elapsed, count in slices]
    return max(statistics.median(costs), 0.0), megabytes


def _slice(batches: Iterator[Any], seconds: float) -> tuple[float, float, int]:
    count = 0
    cpu, start = time.process_time(), time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or count < 2 * SLICES:
        next(batches)
        count += 1
    return time.process_time() - cpu, elapsed, count


def fit(costs: Sequence[Cost]) -> Fit:
    """Least squares of the costs' relative errors; neither of the two is below nothing."""
    cpu = np.array([one.cpu for one in costs])
    known = np.array([(one.parts, one.megabytes) for one in costs]) / cpu[:, None]
    found, *_ = np.linalg.lstsq(known, np.ones(len(costs)), rcond=None)
    if found.min() < 0:
        column = known[:, int(found.argmax())]
        found = np.where(found < 0, 0.0, column.sum() / (column**2).sum())
    errors = np.abs(known @ found - 1)
    return Fit(float(found[0]), float(found[1]), (float(np.median(errors)), float(np.max(errors))))


def measure(where: str, points: Sequence[Point], seconds: float) -> dict[str, Any]:
    """What is known of a place: its costs, and how they are explained at each pace."""
    host = Host(partial(Costs, where, points), PATIENCE)
    try:
        values = host.turn(seconds)
    finally:
        host.close()
    costs = {
        point: Cost(
            values[f"{point.name}: cpu"],
            point.workers if point.kind == "sync" else 1,
            values[f"{point.name}: MB"],
        )
        for point in points
    }
    fits = {
        kind: fit([costs[point] for point in points if point.kind == kind])
        for kind in sorted({point.kind for point in points})
    }
    return {
        "title": PLACES[where],
        "points": [
            {**dataclasses.asdict(point), **dataclasses.asdict(one)} for point, one in costs.items()
        ],
        "fits": {kind: dataclasses.asdict(found) for kind, found in fits.items()},
    }
