"""Contestants that collect with actors of a Ray cluster, which they started and end."""

from __future__ import annotations

import statistics
import time
from bisect import bisect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torch import nn

from clusters import cluster
from harness import tidy
from multi.collecting import Collecting, Prepare

# Each memory that may be written to has been written to by then.
WARM_UP = 4
# Batches after which weights that nobody acts with count as lost.
LOST = 10
# What an untrained policy gives is far smaller.
STEP = 10.0


class OnRay(Collecting):
    """Collects on a Ray cluster, which ends with it."""

    def close(self) -> None:
        super().close()
        cluster.end()


class Bringing(OnRay):
    """Collects, and tells what batches cost the driver."""

    def turn(self, seconds: float) -> dict[str, float]:
        """Frames per second; ms of the driver's time, and MB of its own memory, per batch."""
        self._begin()
        frames = count = 0
        batch = None
        cpu, start = time.process_time(), time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            batch = next(self._batches)
            frames += batch.numel()
            count += 1
        cpu = time.process_time() - cpu
        assert batch is not None
        return {"speed": frames / elapsed, "cpu": 1e3 * cpu / count, "own": own_bytes(batch) / 1e6}


class Starting:
    """What it takes from a collector's constructor to its first batch, on a running cluster."""

    def __init__(self, prepare: Prepare) -> None:
        self._construct = prepare()
        self.facts: dict[str, float] = {}
        self.layout: dict[str, str] = {}

    def turn(self, seconds: float) -> dict[str, float]:
        """One start, however long that takes."""
        del seconds
        tidy()
        start = time.perf_counter()
        collector = self._construct()
        next(iter(collector))
        took = time.perf_counter() - start
        collector.shutdown()
        return {"first_batch": took}

    def close(self) -> None:
        cluster.end()


class Acting:
    """What new weights take, to be sent and to be acted with by all actors.

    An update changes what the last layer adds, so that actions tell which weights made them. Actors
    wait for orders meanwhile, and then make batches of one frame each: what a batch takes by itself
    is a part of what is measured, for everybody.

    Args:
        make_policy: makes the policy.
        prepare: as for `Collecting`, of the policy.
    """

    def __init__(
        self,
        make_policy: Callable[[], nn.Module],
        prepare: Callable[[nn.Module], Callable[[], Any]],
    ) -> None:
        policy = make_policy()
        *_, self._bias = policy.parameters()
        self._collector = prepare(policy)()
        self._shown = 0.0
        self._collector.update_policy_weights_()
        self._batches = iter(self._collector)
        self.facts: dict[str, float] = {}
        self.layout: dict[str, str] = {}
        for _ in range(WARM_UP):
            self._update()

    def turn(self, seconds: float) -> dict[str, float]:
        """Medians of the milliseconds of the call, and until everybody acts by what it brought."""
        tidy()
        found = []
        start = time.perf_counter()
        while time.perf_counter() - start < seconds or len(found) < 2:
            found.append(self._update())
        calls, acted = zip(*found, strict=True)
        return {"call": 1e3 * statistics.median(calls), "acted": 1e3 * statistics.median(acted)}

    def _update(self) -> tuple[float, float]:
        self._shown += STEP
        self._bias.data.fill_(self._shown)
        start = time.perf_counter()
        self._collector.update_policy_weights_()
        called = time.perf_counter() - start
        for _ in range(LOST):
            if bool((next(self._batches)["action"] > self._shown - STEP / 2).all()):
                return called, time.perf_counter() - start
        raise RuntimeError(f"new weights are not acted with after {LOST} batches")

    def close(self) -> None:
        self._collector.shutdown()
        cluster.end()


def own_bytes(batch: TensorDictBase) -> int:
    """How much of a batch is in memory of this process, and not in that of Ray's object store.

    What the store has, this process maps: so addresses tell.
    """
    spans = sorted(stores())
    found = 0
    for leaf in batch.values(True, True):
        before = bisect(spans, (leaf.data_ptr(), 2**64)) - 1
        if before < 0 or leaf.data_ptr() >= spans[before][1]:
            found += leaf.numel() * leaf.element_size()
    return found


def stores(maps: str | None = None) -> list[tuple[int, int]]:
    """Where in this process's addresses Ray's object store is."""
    lines = (Path("/proc/self/maps").read_text() if maps is None else maps).splitlines()
    spans = [line.split()[0].split("-") for line in lines if "/plasma" in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in spans]
