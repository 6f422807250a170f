"""How many workers a driver can serve: a formula, and events that it is checked against.

    python benchmarks/clusters/simulate.py              # writes benchmarks/results/planning.json
    python benchmarks/clusters/simulate.py --speed 500 --frame-bytes 56448 --frames 200

Each worker makes batches of so many frames at a speed of its own. The driver's processor takes so
much for each batch and so much for each MB of it, by what `driver_cost.py` measured, one batch
after the other. From that follow the frames per second of any number of workers:

- at their own pace: what all workers make, but no more than the driver takes in;
- in lockstep: the workers wait while the driver takes in the batches of all of them.

Events show what a formula leaves out: batches that take longer than others, and queues.
"""

from __future__ import annotations

import dataclasses
import heapq
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

RESULTS = Path(__file__).resolve().parents[1] / "results"

Kind = Literal["sync", "async"]
# Requests that a worker has at a time: trawl.collectors.workers.scheduler.
AHEAD = 2
COUNTS = tuple(2**power for power in range(13))
# Workers whose collectors share a node, in a tree.
BRANCH = 16
# Where workers can write into a replay buffer themselves.
WRITING = ("process", "ray")
# Events of more workers take long, and show nothing else.
MOST_EVENTS = 1024


@dataclass(frozen=True)
class Driver:
    """What a driver's processor needs, in seconds: for each batch of a worker, and for each MB."""

    part: float
    megabyte: float

    def cost(self, megabytes: float) -> float:
        """Seconds for one batch of a worker."""
        return self.part + self.megabyte * megabytes


@dataclass(frozen=True)
class Work:
    """What each worker does.

    Attributes:
        frames: frames of its batches.
        frame_bytes: bytes of a frame in a batch, all entries together.
        speed: frames per second.
        spread: standard deviation of the time that a batch takes, as a share of it.
    """

    frames: int = 200
    frame_bytes: int = 56_448 + 64
    speed: float = 500.0
    spread: float = 0.0

    @property
    def seconds(self) -> float:
        """How long a batch takes."""
        return self.frames / self.speed

    @property
    def megabytes(self) -> float:
        """How large it is."""
        return 1e-6 * self.frames * self.frame_bytes


def formula(kind: Kind, workers: int, work: Work, driver: Driver) -> float:
    """Frames per second, if all batches take the same time."""
    cost = driver.cost(work.megabytes)
    if kind == "sync":
        return workers * work.frames / (work.seconds + workers * cost)
    if not cost:
        return workers * work.speed
    return min(workers * work.speed, work.frames / cost)


def most_workers(work: Work, driver: Driver) -> float:
    """How many workers, each at its own pace, keep one processor of the driver busy."""
    cost = driver.cost(work.megabytes)
    return work.seconds / cost if cost else float("inf")


def branched(work: Work, branch: int) -> Work:
    """The same work, with the batches of so many workers put together before the driver."""
    return dataclasses.replace(work, frames=branch * work.frames, speed=branch * work.speed)


@dataclass(frozen=True)
class Run:
    """What events came to.

    Attributes:
        speed: frames per second.
        served: which worker's batch the driver took, in order.
    """

    speed: float
    served: list[int]


def events(
    kind: Kind, workers: int, work: Work, driver: Driver, batches: int = 40, seed: int = 0
) -> Run:
    """Plays so many batches of each worker."""
    generator = np.random.default_rng(seed)
    if work.spread:
        shape = work.spread**-2
        times = generator.gamma(shape, work.seconds / shape, (batches, workers))
    else:
        times = np.full((batches, workers), work.seconds)
    cost = driver.cost(work.megabytes)
    return _in_step(times, cost, work.frames) if kind == "sync" else _at_own_pace(times, cost, work)


def _in_step(times: np.ndarray[Any, Any], cost: float, frames: int) -> Run:
    """All begin together; who is ready is taken in, one after the other."""
    now = 0.0
    served = []
    for row in times:
        free = now
        for index in np.argsort(row, kind="stable"):
            free = max(free, now + row[index]) + cost
            served.append(int(index))
        now = free
    return Run(times.size * frames / now, served)


def _at_own_pace(times: np.ndarray[Any, Any], cost: float, work: Work) -> Run:
    """Who is ready goes on, if it has an order; the driver gives one for each batch it takes."""
    batches, workers = times.shape
    begun, orders = [1] * workers, [AHEAD - 1] * workers
    waits: list[float | None] = [None] * workers  # since when a worker has had no order
    ready = [(float(times[0, index]), index) for index in range(workers)]
    heapq.heapify(ready)
    served: list[int] = []
    ends: list[float] = []
    free = 0.0

    def begin(index: int, now: float) -> None:
        if begun[index] < batches:
            heapq.heappush(ready, (now + float(times[begun[index], index]), index))
            begun[index] += 1

    while ready:
        made, index = heapq.heappop(ready)
        if orders[index]:
            orders[index] -= 1
            begin(index, made)
        else:
            waits[index] = made
        free = max(free, made) + cost
        served.append(index)
        ends.append(free)
        if waits[index] is None:
            orders[index] += 1
        else:
            waits[index] = None
            begin(index, free)
    # In the middle all are at work: neither the first batches nor the last count.
    low, high = len(ends) // 4, 3 * len(ends) // 4
    return Run((high - low) * work.frames / (ends[high] - ends[low]), served)


@dataclass(frozen=True)
class Options:
    """How many workers a driver can serve."""

    frames: int = 200
    """Frames of each worker's batches."""
    frame_bytes: int = Work.frame_bytes
    """Bytes of a frame, all entries together: by default, two images of 84x84x4 and a few numbers.
    """
    speed: float = 500.0
    """Frames per second of one worker."""
    spread: float = 0.2
    """How unlike the times of batches are, in the events: standard deviation over mean."""
    costs: Path = RESULTS / "driver_cost.json"
    """What a driver costs: written by driver_cost.py."""
    json: Path = RESULTS / "planning.json"
    """Where the curves go."""


def curves(costs: dict[str, Any], work: Work, spread: float) -> dict[str, Any]:
    """The curves of each place and pace, and where the driver has no more time."""
    found = {}
    for where, place in costs["places"].items():
        branch = BRANCH if where == "tree" else 1
        for kind, fit in place["fits"].items():
            driver = Driver(fit["part"], fit["megabyte"])
            found[f"{where}, {kind}"] = curve(kind, work, driver, spread, branch)
        if where in WRITING:
            # What workers write elsewhere, the driver only hears of.
            told = Driver(place["fits"]["async"]["part"], 0.0)
            found[f"{where}, written"] = curve("async", work, told, spread)
    return found


def curve(kind: Kind, work: Work, driver: Driver, spread: float, branch: int = 1) -> dict[str, Any]:
    """Frames per second by the number of workers; by events for as many as that is quick for."""
    counts = [count for count in COUNTS if count >= branch]
    together = branched(work, branch)
    uneven = dataclasses.replace(together, spread=spread)
    most = most_workers(together, driver)
    cost = driver.cost(together.megabytes)
    return {
        "driver": dataclasses.asdict(driver),
        "workers": counts,
        "formula": [formula(kind, count // branch, together, driver) for count in counts],
        "events": [
            events(kind, count // branch, uneven, driver).speed
            for count in counts
            if count <= MOST_EVENTS
        ],
        "most_workers": branch * most,
        "most_gigabytes": together.megabytes / cost / 1e3,
        "most_frames": together.frames / cost,
    }


def planning(options: Options) -> dict[str, Any]:
    """All that is written."""
    costs = json.loads(options.costs.read_text())
    work = Work(options.frames, options.frame_bytes, options.speed)
    return {
        "date": costs["date"],
        "machine": costs["machine"],
        "work": {**dataclasses.asdict(work), "megabytes": work.megabytes},
        "spread": options.spread,
        "branch": BRANCH,
        "places": {
            where: {"title": place["title"], "fits": place["fits"]}
            for where, place in costs["places"].items()
        },
        "curves": curves(costs, work, options.spread),
    }


def main(options: Options) -> None:
    """Calculates, and writes."""
    found = planning(options)
    for name, one in found["curves"].items():
        print(
            f"{name:18} one processor of the driver serves {one['most_workers']:10,.0f} workers: "
            f"{one['most_frames']:12,.0f} frames/s, {one['most_gigabytes']:8,.2f} GB/s"
        )
    options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"Written: {options.json}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
