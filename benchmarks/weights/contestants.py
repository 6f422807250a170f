"""Contestants that hand over weights, take them, or collect meanwhile.

A time is compared with that of one copy of as many bytes, from one flat tensor to another, which is
taken right before it in the same process: what else the machine does burdens both alike.
"""

from __future__ import annotations

import copy
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from harness import tidy
from multi.collecting import Collecting, Prepare, frames_of
from weights.models import numel

Call = Callable[[], Any]
# Each memory that may be written to has been written to by then.
WARM_UP = 6


class Learner:
    """What the call costs that gives a collector's workers new weights.

    Args:
        make_policy: makes the policy.
        prepare: as for `Collecting`, of the policy.
        asleep: workers are in the middle of a batch all the time, in which they sleep; otherwise
            each takes what it is given, and waits, before the next is given.
    """

    def __init__(
        self,
        make_policy: Callable[[], nn.Module],
        prepare: Callable[[nn.Module], Callable[[], Any]],
        asleep: bool = False,
    ) -> None:
        policy = make_policy()
        elsewhere = TensorDict.from_module(make_policy()).data.clone()
        self._memcpy = memcpy(numel(policy))
        self._collector = prepare(policy)()
        self._batches = iter(self._collector)
        next(self._batches)
        update = self._collector.update_policy_weights_
        self._calls: dict[str, Call] = {"own": update, "given": lambda: update(elsewhere)}
        self._asleep = asleep
        self.facts: dict[str, float] = {}
        self.layout: dict[str, str] = {}
        for call in [*self._calls.values()] * WARM_UP:
            call()
            self._wait()

    def turn(self, seconds: float) -> dict[str, float]:
        """Milliseconds of the call, and in copies: for the policy's own weights, and given ones."""
        tidy()
        return alternating(self._memcpy, self._calls, seconds, self._wait)

    def _wait(self) -> None:
        if not self._asleep:
            next(self._batches)

    def close(self) -> None:
        self._collector.shutdown()


class Reading:
    """What new weights cost a worker, beside its collecting: taking them, and looking for them."""

    def __init__(self, make_policy: Callable[[], nn.Module]) -> None:
        from trawl.weights.layout import ModuleWeights
        from trawl.weights.store import WeightStore

        policy = make_policy()
        source, live = ModuleWeights(policy), ModuleWeights(copy.deepcopy(policy))
        store = WeightStore(2)
        self._reader = store.reader(0)
        self._memcpy = memcpy(numel(policy))

        def publish() -> None:
            store.publish(source.layout, source.writer(), b"", 1, [0, 1])

        def take() -> None:
            self._reader.receive(lambda update: update.load(live))

        self._publish, self._calls = publish, {"take": take}
        self.facts: dict[str, float] = {}
        self.layout: dict[str, str] = {}
        for _ in range(WARM_UP):
            publish()
            take()

    def turn(self, seconds: float) -> dict[str, float]:
        """Milliseconds to take new weights, and in copies; microseconds to see there are none."""
        tidy()
        self._publish()
        measured = alternating(self._memcpy, self._calls, seconds, self._publish)
        self._calls["take"]()
        looks = 10_000
        took = timeit.repeat(lambda: self._reader.newer, number=looks, repeat=5)
        nothing = timeit.repeat(lambda: None, number=looks, repeat=5)
        return {**measured, "look": 1e6 * (min(took) - min(nothing)) / looks}

    def close(self) -> None:
        pass


class Updating(Collecting):
    """Collects, and gives workers new weights after each batch."""

    def __init__(self, prepare: Prepare, ahead: int = 1) -> None:
        super().__init__(prepare, ahead)
        for _ in range(WARM_UP):
            self._collector.update_policy_weights_()
            next(self._batches)

    def turn(self, seconds: float) -> dict[str, float]:
        """Frames per second, from one delivery to another."""
        self._begin()
        frames = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            frames += frames_of(next(self._batches))
            self._collector.update_policy_weights_()
        return {"speed": frames / elapsed}


def memcpy(count: int) -> Call:
    """One copy of so many floats."""
    source, target = torch.randn(count), torch.zeros(count)
    return lambda: target.copy_(source)


def alternating(
    limit: Call, calls: dict[str, Call], seconds: float, between: Callable[[], None]
) -> dict[str, float]:
    """Medians of the milliseconds of each call, and of these in those of `limit` just before."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names: Iterator[str] = cycle(calls)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or min(map(len, times.values())) < 2:
        name = next(names)
        copied, took = _timed(limit), _timed(calls[name])
        times[name].append((copied, took))
        between()
    measured = {}
    for name, pairs in times.items():
        measured[name] = 1e3 * statistics.median(took for _, took in pairs)
        measured[f"{name}_copies"] = statistics.median(took / copied for copied, took in pairs)
    return measured


def _timed(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
