"""Contestants that collect: with a collector's workers, or with hand-written loops side by side."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import psutil
from tensordict import TensorDictBase

import work
from harness import Source, layout_of, speed, tidy
from multi.host import Contestant

MIB = 2**20
# Imports what it needs, and returns the call that constructs a collector.
Prepare = Callable[[], Callable[[], Any]]


class Collecting:
    """A collector of many processes.

    Args:
        prepare: Makes the call that constructs the collector.
        ahead: So many batches may be there when a turn begins; they are thrown away.
    """

    def __init__(self, prepare: Prepare, ahead: int = 1) -> None:
        construct = prepare()
        start = time.perf_counter()
        self._collector = construct()
        self._batches = iter(self._collector)
        batch = next(self._batches)
        first_batch = time.perf_counter() - start
        self._ahead = ahead
        self.layout = layout_of(batch)
        size = sum(leaf.numel() * leaf.element_size() for leaf in batch.values(True, True))
        for _ in range(3):  # whatever memory the batches rotate through is touched
            batch = next(self._batches)
            for leaf in batch.values(True, True):
                leaf.sum()
        memory = psutil.Process().memory_full_info()
        self.facts = {
            "first_batch": first_batch,
            "batch": size / MIB,
            "rss": memory.rss / MIB,
            "pss": memory.pss / MIB,
        }

    def turn(self, seconds: float) -> dict[str, float]:
        """Frames per second, from one delivery to another."""
        self._begin()
        frames = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            frames += frames_of(next(self._batches))
        return {"speed": frames / elapsed}

    def _begin(self) -> None:
        tidy()
        for _ in range(self._ahead):
            next(self._batches)

    def close(self) -> None:
        self._collector.shutdown()


class Delivering(Collecting):
    """What a batch of `work.StampedImageEnv` costs the driver, however long it takes to make."""

    def turn(self, seconds: float) -> dict[str, float]:
        """Milliseconds per batch: of the driver's processor time, and since the last step."""
        self._begin()
        late = 0.0
        count = 0
        cpu, start = time.process_time(), time.perf_counter()
        while time.perf_counter() - start < seconds:
            batch = next(self._batches)
            here = time.monotonic()
            late += here - work.stamped(batch["next", "observation"][:, -1])
            count += 1
        cpu = time.process_time() - cpu
        return {"cpu": 1e3 * cpu / count, "late": 1e3 * late / count}


class Several:
    """Contestants that share a turn; what they measure has their names in its own."""

    def __init__(self, builds: Mapping[str, Callable[[], Contestant]]) -> None:
        self._parts = {name: build() for name, build in builds.items()}
        self.facts: dict[str, float] = {}
        self.layout = {
            f"{name}: {key}": leaf
            for name, part in self._parts.items()
            for key, leaf in part.layout.items()
        }

    def turn(self, seconds: float) -> dict[str, float]:
        """Each gets its part of the time."""
        return {
            f"{measure}_{name}": value
            for name, part in self._parts.items()
            for measure, value in part.turn(seconds / len(self._parts)).items()
        }

    def close(self) -> None:
        for part in self._parts.values():
            part.close()


class Looping:
    """A hand-written loop over environments in processes of their own."""

    def __init__(self, loop: Callable[[], Source]) -> None:
        self._source = loop()
        _, batch = next(self._source)
        self.layout = {} if batch is None else layout_of(batch)
        self.facts: dict[str, float] = {}

    def turn(self, seconds: float) -> dict[str, float]:
        """Frames per second."""
        return {"speed": speed(self._source, seconds, "wall")}

    def close(self) -> None:
        self._source.close()


def frames_of(batch: TensorDictBase) -> int:
    """The frames of a batch without those that only fill it up."""
    mask = batch.get(("collector", "mask"), None)
    return batch.numel() if mask is None else int(mask.sum())


class Loops:
    """Hand-written loops, each in a process of its own, all at the same time.

    Nothing is exchanged: each has its own batch, which never leaves it. That is the limit.

    Args:
        serve: Runs one loop, and answers what is sent to its connection.
        loop: Makes one loop.
        count: How many run.
        stacked: The batches of all of them together are what a collector delivers.
    """

    def __init__(
        self,
        serve: Callable[[Source, Connection], None],
        loop: Callable[[], Source],
        count: int,
        stacked: bool = True,
    ) -> None:
        # Forked, which is quickest: there is one thread, and nobody else to get in the way.
        context = multiprocessing.get_context("fork")
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_begin, args=(serve, loop, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        layouts = [connection.recv() for connection in self._connections]
        lead = f"[{count}, " if stacked else "["
        self.layout = {key: lead + leaf[1:] for key, leaf in layouts[0].items()}
        self.facts: dict[str, float] = {}

    def send(self, order: Any) -> None:
        """Sends an order to all loops."""
        for connection in self._connections:
            connection.send(order)

    def receive(self) -> list[Any]:
        """Waits for the answers of all loops."""
        return [connection.recv() for connection in self._connections]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.terminate()  # its siblings hold copies of the connection, so it may not see
            process.join()


def _begin(
    serve: Callable[[Source, Connection], None], loop: Callable[[], Source], connection: Connection
) -> None:
    source = loop()
    _, batch = next(source)
    connection.send({} if batch is None else layout_of(batch))
    serve(source, connection)


class SideBySide(Loops):
    """Hand-written loops whose speeds are added up.

    Args:
        loop: Makes one loop.
        count: How many run.
        stacked: The batches of all of them together are what a collector delivers.
    """

    def __init__(self, loop: Callable[[], Source], count: int, stacked: bool = True) -> None:
        super().__init__(_measure, loop, count, stacked)

    def turn(self, seconds: float) -> dict[str, float]:
        """The sum of their speeds."""
        self.send(seconds)
        return {"speed": sum(self.receive())}


def _measure(source: Source, connection: Connection) -> None:
    while True:
        connection.send(speed(source, connection.recv(), "wall"))
