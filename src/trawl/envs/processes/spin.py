"""Short spins before waits.

To wake a process on an idle CPU core takes 20 to 40 microseconds, which is longer than a step of a
cheap environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import Any

# Seconds that a spin may take. A process that has slept needs tens of microseconds to wake up.
_SPIN = 100e-6
# Largest number of waits without a spin after one in vain.
_MOST_SKIPPED = 64
# A spin that takes so many times as long has lost its CPU core to another process.
_INTERRUPTED = 5
# Seconds without spins after such a spin: at first, and at most. The pause doubles if the next
# interruption comes soon, in seconds, after its end.
_PAUSE, _LONGEST_PAUSE, _SOON = 0.01, 1.0, 0.5


class Spin:
    """Polls for a moment, so that a short wait needs no sleep.

    Between polls, it lets other processes run. It is for machines with idle CPU cores: after a spin
    in vain, it skips the next waits (one, then two, then four, and so on). If another process has
    taken its CPU core meanwhile, it makes a pause.

    Args:
        poll: function that returns events. With the argument 0, it doesn't wait.
        seconds: maximum duration of a spin.
        clock: function that returns the time in seconds.
    """

    def __init__(
        self,
        poll: Callable[[float], list[Any]],
        seconds: float = _SPIN,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._poll, self._clock = poll, clock
        self._seconds = seconds
        self._skipped = self._left = 0
        self._pause, self._paused_until = _PAUSE, clock()

    def __call__(self) -> list[Any]:
        """Returns the events, or an empty list if none came."""
        clock, poll = self._clock, self._poll
        begin = now = clock()
        if self._left or now < self._paused_until:
            self._left = max(0, self._left - 1)
            return []
        end = begin + self._seconds
        while not (found := poll(0)):
            now = clock()
            if now >= end:
                break
            os.sched_yield()
        if clock() - begin > _INTERRUPTED * self._seconds:
            self._make_pause(clock())
        elif found:
            self._skipped = 0
        else:
            self._left = self._skipped = min(2 * self._skipped, _MOST_SKIPPED) or 1
        return found

    def _make_pause(self, now: float) -> None:
        soon = now < self._paused_until + _SOON
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if soon else _PAUSE
        self._paused_until = now + self._pause


def may_spin(processes: int, affinity: Callable[[int], Any]) -> bool:
    """Returns True if there is a CPU core for each process, and one for their owner.

    Args:
        processes: number of processes.
        affinity: function that returns the CPU cores of a process, or None for all cores.
    """
    usable = os.sched_getaffinity(0)
    cores = {core for index in range(processes) for core in affinity(index) or usable}
    return processes < len(cores)
