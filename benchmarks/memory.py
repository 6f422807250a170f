"""Does resident memory stay flat while millions of frames pass through a collector?"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

import peers
import work

BATCH = 1000
INTERVALS = 20


@dataclass(frozen=True)
class Resident:
    """Resident memory in MiB after so many frames."""

    frames: int
    mib: float


def measure_memory(frames: int) -> list[Resident]:
    """Collect `frames` frames from the cheapest environment, and look at intervals."""
    process = psutil.Process()
    policy = work.acting(work.Constant())
    source = peers.trawl(work.ConstantEnv, policy, BATCH)
    step = max(frames // INTERVALS, BATCH)
    collected = 0
    seen: list[Resident] = []
    for count, _ in source:
        collected += count
        if collected >= step * (len(seen) + 1):
            seen.append(Resident(collected, process.memory_info().rss / 2**20))
        if collected >= frames:
            break
    source.close()
    return seen


def growth(seen: list[Resident]) -> float:
    """MiB gained between a tenth of the frames and the end; the first tenth is warm-up."""
    early = next(point for point in seen if point.frames >= seen[-1].frames / 10)
    return seen[-1].mib - early.mib
