"""The part of a collection that limits its rate, found from ``stats()``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from trawl.observe.waits import DRIVER_PARTS, LIMITS

# A worker is a straggler if its batches take this many times as long as the median worker's.
_SLOWER = 1.5
# If the learner waits for less than this share of the time, workers collect while it learns.
_OVERLAPPED = 0.1
# Workers that are idle for this share of the time could be fewer.
_MOSTLY_IDLE = 0.6
# Parts of a worker's time that can limit the rate, by their names in ``stats()``.
_WORK = {"env": "environment", "policy": "policy", "weights": "weights", "overhead": "overhead"}


@dataclass(frozen=True)
class Bottleneck:
    """The part that limits the rate of a collection.

    Attributes:
        part: ``"environment"``, ``"policy"``, ``"weights"`` (loading new weights), ``"overhead"``
            (preparing and finishing batches), ``"straggler"`` (a worker that others wait for),
            ``"learner"`` (your code in the driver thread, which takes batches from the collector),
            ``"driver"`` (the collector's own work in the driver thread), or ``"unknown"`` before
            the first batch.
        share: share of time that the part takes, from 0 to 1: of the driver thread's time for the
            learner and the driver, of the worker's time for a straggler, and of the workers' busy
            time for other parts.
        sentence: sentence that names the part and suggests a remedy.
        worker: index of the straggler; None for other parts.
    """

    part: str
    share: float
    sentence: str
    worker: int | None = None

    def __str__(self) -> str:
        return self.sentence


def bottleneck_of(stats: Mapping[str, Any]) -> Bottleneck:
    """Returns the part that limits the rate of a collection.

    Args:
        stats: statistics of a collector: ``stats("both")`` with workers, else ``stats()``.
    """
    if "env_share" not in stats:
        return Bottleneck("unknown", 0.0, "No batch has been collected yet.")
    workers = int(stats.get("workers", 0))
    driver = _limiting_thread(stats, workers)
    if driver is not None:
        return driver
    straggler = _straggler(stats, workers)
    return straggler or _limiting_work(stats, workers)


def _limiting_thread(stats: Mapping[str, Any], workers: int) -> Bottleneck | None:
    """Returns the learner or the driver, if the driver thread limits the rate."""
    learner, wait, driver = (stats[f"{name}_share"] for name in DRIVER_PARTS)
    if max(learner, driver) <= wait:
        return None
    if learner >= driver:
        if wait > _OVERLAPPED and not _collects_ahead(stats):
            remedy = _remedy("learner", workers)
        else:
            remedy = "Make its updates faster"
            if workers > 1 and stats["idle_share"] > _MOSTLY_IDLE:
                remedy += ", or save cores with fewer workers"
        text = (
            f"The learner limits the rate: {_percent(learner)} of the time is spent outside the "
            f"collector, and {_percent(wait)} waiting for batches. {remedy}."
        )
        return Bottleneck("learner", learner, text)
    text = (
        f"The driver limits the rate: {_percent(driver)} of the time is spent on the collector's "
        f"own work in the thread that takes batches. {_remedy('driver', workers)}."
    )
    return Bottleneck("driver", driver, text)


def _collects_ahead(stats: Mapping[str, Any]) -> bool:
    """Returns True if workers collect while the learner learns."""
    return stats.get("schedule") in ("prefetch", "asynchronous")


def _straggler(stats: Mapping[str, Any], workers: int) -> Bottleneck | None:
    """Returns the worker that others wait for; None if there is none."""
    if workers < 2 or stats.get("idle_share", 0.0) < 0.1:
        return None
    if stats.get("schedule") == "asynchronous":
        return None  # no worker waits for others
    busy = {
        index: 1.0 - stats[f"worker_{index}/idle_share"]
        for index in range(workers)
        if f"worker_{index}/idle_share" in stats
    }
    if len(busy) < 2:
        return None
    slowest = max(busy, key=busy.__getitem__)
    others = median(share for index, share in busy.items() if index != slowest)
    # A worker that is itself idle for most of the time of waiting holds nobody up.
    if busy[slowest] < max(_SLOWER * others, stats["wait_share"] / 2):
        return None
    times = busy[slowest] / max(others, 1e-9)
    text = (
        f"Worker {slowest} limits the rate: its batches take {times:.1f} times as long as those of "
        f"the other workers, which wait for it. {_remedy('straggler', workers)}."
    )
    return Bottleneck("straggler", busy[slowest], text, slowest)


def _limiting_work(stats: Mapping[str, Any], workers: int) -> Bottleneck:
    """Returns the activity on which the workers spend most of their busy time."""
    shares = {name: stats[f"{name}_share"] for name in _WORK}
    if workers:
        # While the driver thread neither learns nor delivers batches, idle workers wait for
        # requests and answers to arrive.
        outside = stats["learner_share"] + stats["driver_share"]
        shares["overhead"] += max(0.0, stats["idle_share"] - outside)
    waits = workers > 0 and shares["overhead"] > 2 * stats["overhead_share"]
    busy = sum(shares.values()) or 1.0
    name = max(shares, key=shares.__getitem__)
    share = shares[name] / busy
    whose = "a worker's busy time" if workers else "the time in the collector"
    if name == "overhead" and waits:
        whose = "a worker's time, mostly waiting for requests to arrive"
    part = _WORK[name]
    text = (
        f"{LIMITS[part].subject} limits the rate: it takes {_percent(share)} of {whose}, so "
        f"without it, collection would be at most {_times(share)} as fast. "
        f"{_remedy(part, workers)}."
    )
    return Bottleneck(part, share, text)


def _remedy(part: str, workers: int) -> str:
    """Returns the remedy as plain text, for a number of workers."""
    limit = LIMITS[part]
    return (limit.remedy if workers else limit.alone or limit.remedy).replace("`", "")


def driver_line(stats: Mapping[str, Any], learner: str = "learner") -> str:
    """Returns a line that says how the driver thread divides its time.

    Args:
        stats: statistics of a collector after its first batch.
        learner: name of the code between batches.
    """
    own, wait, driver = (_percent(stats[f"{name}_share"]) for name in DRIVER_PARTS)
    return f"driver thread: {wait} waiting, {driver} collector, {own} {learner}"


def _times(share: float) -> str:
    return "100 times or more" if share > 0.99 else f"{1 / (1 - share):.1f} times"


def _percent(share: float) -> str:
    return f"{share:.0%}"
