"""Random kills of workers while a collector collects: how it comes through.

``make chaos`` runs this for a minute each, synchronous and asynchronous. Every half a second a
worker dies; a ledger checks each frame. A collector that comes through has delivered every frame
once, and has no more memory, descriptors or processes after than before.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "chaos"))

from chaos_parts import Crew, collector_of, family
from open_files import open_files


class Killer(threading.Thread):
    """Kills one worker after the other, and notes when the collector knew.

    Args:
        crew: whose workers are killed.
        every: seconds between two of them.

    Attributes:
        kills: how many it killed.
        noticed: seconds from each kill until the collector knew of it.
        replaced: seconds from each kill until another worker was started.
    """

    def __init__(self, crew: Crew, every: float) -> None:
        super().__init__(name="killer")
        self.kills = 0
        self.noticed: list[float] = []
        self.replaced: list[float] = []
        self._crew = crew
        self._every = every
        self._random = random.Random(0)
        self._done = threading.Event()
        self._killed: dict[int, float] = {}

    def run(self) -> None:
        while not self._done.wait(self._every):
            worker = self._random.randrange(self._crew.workers)
            # One that is not yet replaced can't be killed again.
            if worker in self._killed:
                continue
            try:
                handle = os.pidfd_open(self._crew.pid(worker))
            except ProcessLookupError:
                continue
            self._killed[worker] = time.perf_counter()
            self.kills += 1
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)

    def notice(self, worker: int) -> None:
        """Notes that the collector knows of a worker's death."""
        self.noticed.append(time.perf_counter() - self._killed[worker])

    def replace(self, worker: int) -> None:
        """Notes that there is another in its place."""
        self.replaced.append(time.perf_counter() - self._killed.pop(worker))

    def end(self) -> None:
        """Ends the killing."""
        self._done.set()
        self.join()


def storm(
    sync: bool, seconds: float, every: float = 0.5, workers: int = 4, lanes: int = 2
) -> dict[str, float]:
    """Collects for some time while workers are killed; checks every frame.

    Returns:
        Figures, by name; times are in seconds, memory in MiB.

    Raises:
        AssertionError: if a frame is not the one that has to come, or there are too many or few.
    """
    with tempfile.TemporaryDirectory() as folder:
        crew = Crew(Path(folder), workers, lanes, lives=int(seconds / every) + 10)
        options = {"max_restarts": 10**6, "max_total_restarts": 10**6, "total_frames": -1}
        with collector_of(crew, sync, **options) as collector:
            killer = Killer(crew, every)
            run = _Run(crew, collector, killer)
            # What is allocated once is allocated by now.
            run.collect(lambda: run.batches >= 200)
            before = _state(collector)
            killer.start()
            ends = time.perf_counter() + seconds
            try:
                run.collect(lambda: time.perf_counter() >= ends)
            finally:
                killer.end()
            # Who was killed last is replaced, too.
            run.collect(lambda: len(killer.replaced) == killer.kills)
            after = _state(collector)
            stats = collector.stats()
        each = 10 * lanes * (workers if sync else 1)
        assert crew.frames == stats["frames"] == run.batches * each
        assert stats["restarts"] == killer.kills
        assert stats["workers_alive"] == workers
    facts = {
        "kills": killer.kills,
        "restarts": stats["restarts"],
        "batches": run.batches,
        "frames": crew.frames,
        "median notice": statistics.median(killer.noticed),
        "slowest notice": max(killer.noticed),
        "slowest replacement": max(killer.replaced),
        "slowest batch": run.slowest,
    }
    for name in before:
        facts |= {f"{name} before": before[name], f"{name} after": after[name]}
    return facts


class _Run:
    """Collects, and checks."""

    def __init__(self, crew: Crew, collector: Any, killer: Killer) -> None:
        self.batches = 0
        self.slowest = 0.0
        self._crew, self._collector, self._killer = crew, collector, killer
        replace = collector._pool._replace

        def notice_and_replace(member: Any, reason: str) -> None:
            killer.notice(member.index)
            replace(member, reason)

        collector._pool._replace = notice_and_replace

    def collect(self, enough: Callable[[], bool]) -> None:
        """Collects until there is enough."""
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = self._show
            while not enough():
                began = time.perf_counter()
                batch = self._collector.next()
                self.slowest = max(self.slowest, time.perf_counter() - began)
                self._crew.add(batch)
                self.batches += 1

    def _show(self, message: Warning | str, category: type[Warning], *rest: Any) -> None:
        told = str(message).split()
        assert category is RuntimeWarning, message
        assert told[2:6] == ["was", "killed", "by", "SIGKILL;"], message
        self._killer.replace(int(told[1]))


def _state(collector: Any) -> dict[str, float]:
    """What must not grow."""
    gc.collect()
    stats = collector.stats()
    return {
        "descriptors": len(open_files()),
        "processes": len(family()),
        "resident": round(psutil.Process().memory_info().rss / 2**20, 1),
        "shared memory": round(stats["memory_bytes"] / 2**20, 3),
    }


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long for each of the two")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two kills")
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    for sync in (True, False):
        print("sync" if sync else "async")
        for name, value in storm(sync, given.seconds, given.every, given.workers).items():
            print(f"  {name:20} {value:.3f}" if isinstance(value, float) else
                  f"  {name:20} {value}")  # fmt: skip


if __name__ == "__main__":
    main()
