"""Ways in which an owner and its processes can wake each other for a step.

    python benchmarks/wakeups.py            # two minutes
    python benchmarks/wakeups.py --quick    # a glance; writes no file

In a step, the owner wakes all processes. Each of them computes for a set time and wakes the owner.
The step ends when all have answered. What a step takes longer than its computing is the price of a
protocol; the owner's processor time is what it can't spend on a policy meanwhile. All protocols
take turns, each time with new processes.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import multiprocessing
import os
import platform
import select
import statistics
import sys
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

BENCHMARKS = Path(__file__).resolve().parent
SPIN_SECONDS = 20e-6
FUTEX_WAIT, FUTEX_WAKE = 0, 1
FUTEX_CALLS = {"x86_64": 202, "aarch64": 98}


@dataclass(frozen=True)
class Load:
    """What is computed in each step."""

    processes: int
    microseconds: int

    @property
    def name(self) -> str:
        return f"{self.processes} processes that compute {self.microseconds} µs"


LOADS = (Load(2, 20), Load(4, 200))


@dataclass(frozen=True)
class Options:
    """Compare ways in which an owner and its processes wake each other."""

    rounds: int = 41
    """How many times each protocol gets its turn."""
    seconds: float = 0.1
    """How long a turn is."""
    json: Path = BENCHMARKS / "results" / "wakeups.json"
    """Where the numbers go."""
    quick: bool = False
    """3 rounds, and no file."""


class Protocol(ABC):
    """Processes that compute in steps, and a way to wake them and to be woken.

    Args:
        load: What they compute.

    Attributes:
        taken: How many steps each process has taken.
    """

    name: str

    def __init__(self, load: Load) -> None:
        self.load = load
        self._stack = ExitStack()
        self._number = 0
        # One row each: numbers of the steps to take, numbers of the steps taken, and for tests how
        # many there were.
        memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
        self._numbers, self._answers, self.taken = memory[: 3 * load.processes].reshape(3, -1)
        self._open()
        context = multiprocessing.get_context("fork")
        for index in range(load.processes):
            process = context.Process(target=self._serve, args=(index,), daemon=True)
            process.start()
            self._stack.callback(process.join)
            self._stack.callback(process.terminate)

    @abstractmethod
    def _open(self) -> None:
        """Makes what the processes inherit."""

    @abstractmethod
    def step(self) -> None:
        """Lets all processes take a step."""

    @abstractmethod
    def _sleep(self, index: int) -> None:
        """In a process: waits for the next step."""

    @abstractmethod
    def _answer(self, index: int) -> None:
        """In a process: reports a step."""

    def _serve(self, index: int) -> None:
        seconds = self.load.microseconds * 1e-6
        while True:
            self._sleep(index)
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                pass
            self.taken[index] += 1
            self._answer(index)

    def _pipes(self) -> list[tuple[int, int]]:
        """A pipe for each process."""
        pipes = [os.pipe() for _ in range(self.load.processes)]
        self._close_later(end for pipe in pipes for end in pipe)
        return pipes

    def _eventfds(self, count: int, flags: int = 0) -> list[int]:
        events = [os.eventfd(0, flags) for _ in range(count)]
        self._close_later(events)
        return events

    def _close_later(self, descriptors: Any) -> None:
        for descriptor in descriptors:
            self._stack.callback(os.close, descriptor)

    def close(self) -> None:
        """Ends the processes."""
        self._stack.close()


class Pipes(Protocol):
    name = "a pipe each way, read in turn"

    def _open(self) -> None:
        self._asks, self._replies = self._pipes(), self._pipes()

    def step(self) -> None:
        for _, end in self._asks:
            os.write(end, b"s")
        for end, _ in self._replies:
            os.read(end, 1)

    def _sleep(self, index: int) -> None:
        os.read(self._asks[index][0], 1)

    def _answer(self, index: int) -> None:
        os.write(self._replies[index][1], b"s")


class Connections(Protocol):
    name = "`multiprocessing.Pipe`, received in turn"

    def _open(self) -> None:
        self._ends = [multiprocessing.Pipe() for _ in range(self.load.processes)]
        for ours, theirs in self._ends:
            self._stack.callback(ours.close)
            self._stack.callback(theirs.close)

    def step(self) -> None:
        self._number += 1
        for ours, _ in self._ends:
            ours.send(self._number)
        for ours, _ in self._ends:
            ours.recv()

    def _sleep(self, index: int) -> None:
        self._number = self._ends[index][1].recv()

    def _answer(self, index: int) -> None:
        self._ends[index][1].send(self._number)


class Eventfds(Protocol):
    name = "an eventfd each way, read in turn"

    def _open(self) -> None:
        self._asks = self._eventfds(self.load.processes)
        self._replies = self._eventfds(self.load.processes)

    def step(self) -> None:
        for event in self._asks:
            os.eventfd_write(event, 1)
        for event in self._replies:
            os.eventfd_read(event)

    def _sleep(self, index: int) -> None:
        os.eventfd_read(self._asks[index])

    def _answer(self, index: int) -> None:
        os.eventfd_write(self._replies[index], 1)


class PipesAndEvent(Protocol):
    """The protocol of `trawl.envs`: the answers are numbers in shared memory."""

    name = "a pipe to each process, one eventfd with epoll for the owner"

    def _open(self) -> None:
        self._asks = self._pipes()
        self._event = self._eventfds(1, os.EFD_NONBLOCK)[0]
        self._poll = select.epoll()
        self._poll.register(self._event, select.EPOLLIN | select.EPOLLET)
        self._stack.callback(self._poll.close)

    def step(self) -> None:
        self._number += 1
        self._numbers[:] = self._number
        expected = self._numbers.tobytes()
        for _, end in self._asks:
            os.write(end, b"s")
        self._wait(expected)

    def _wait(self, expected: bytes) -> None:
        while self._answers.tobytes() != expected:
            self._poll.poll()

    def _sleep(self, index: int) -> None:
        os.read(self._asks[index][0], 1)

    def _answer(self, index: int) -> None:
        self._answers[index] = self._numbers[index]
        os.eventfd_write(self._event, 1)


class LastWakes(PipesAndEvent):
    name = "the same, but only the last process wakes the owner"

    def _wait(self, expected: bytes) -> None:
        while self._answers.tobytes() != expected:
            # Two processes that answer at once could each miss the other's answer.
            self._poll.poll(0.01)

    def _answer(self, index: int) -> None:
        self._answers[index] = self._numbers[index]
        if self._answers.tobytes() == self._numbers.tobytes():
            os.eventfd_write(self._event, 1)


class Spinning(PipesAndEvent):
    name = f"the same, after {SPIN_SECONDS * 1e6:.0f} µs of looking at the memory"

    def _wait(self, expected: bytes) -> None:
        end = time.perf_counter() + SPIN_SECONDS
        while self._answers.tobytes() != expected:
            if time.perf_counter() >= end:
                super()._wait(expected)


class Futexes(Protocol):
    name = "a futex each way, waited for in turn"

    def _open(self) -> None:
        self._system = ctypes.CDLL(None, use_errno=True).syscall
        self._code = FUTEX_CALLS[platform.machine()]

    def _futex(self, words: Any, index: int, operation: int, value: int) -> None:
        # The lower half of a number: the same machine reads and writes it.
        address = words.ctypes.data + 8 * index
        pointer, none = ctypes.c_void_p(address), ctypes.c_void_p(None)
        failed = self._system(self._code, pointer, operation, ctypes.c_uint32(value), none, none, 0)
        if failed == -1 and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            raise OSError(ctypes.get_errno(), "futex")

    def step(self) -> None:
        self._number += 1
        processes = range(self.load.processes)
        for index in processes:
            self._numbers[index] = self._number
            self._futex(self._numbers, index, FUTEX_WAKE, 1)
        for index in processes:
            while self._answers[index] != self._number:
                self._futex(self._answers, index, FUTEX_WAIT, self._number - 1)

    def _sleep(self, index: int) -> None:
        done = int(self._answers[index])
        while self._numbers[index] == done:
            self._futex(self._numbers, index, FUTEX_WAIT, done)

    def _answer(self, index: int) -> None:
        self._answers[index] = self._numbers[index]
        self._futex(self._answers, index, FUTEX_WAKE, 1)


PROTOCOLS: tuple[type[Protocol], ...] = (
    Pipes,
    Connections,
    Eventfds,
    PipesAndEvent,
    LastWakes,
    Spinning,
    Futexes,
)


@dataclass
class Measured:
    """Microseconds per step, one number per round: the whole step, and the owner's processor."""

    protocol: str
    step: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)


def compare(load: Load, rounds: int, seconds: float) -> list[Measured]:
    """Lets the protocols take turns."""
    results = {make: Measured(make.name) for make in PROTOCOLS}
    for number in range(rounds):
        for make in PROTOCOLS if number % 2 == 0 else reversed(PROTOCOLS):
            # New processes each time: on which cores they come to lie decides much.
            protocol = make(load)
            try:
                turn(protocol, seconds / 10)  # warm-up
                step, processor = turn(protocol, seconds)
            finally:
                protocol.close()
            results[make].step.append(step)
            results[make].processor.append(processor)
    return list(results.values())


def turn(protocol: Protocol, seconds: float) -> tuple[float, float]:
    """Microseconds of a step, and of the owner's processor time in it."""
    steps, elapsed = 0, 0.0
    processor, start = time.process_time(), time.perf_counter()
    # On a busy machine, the time may be over before the first step.
    while not steps or elapsed < seconds:
        for _ in range(10):
            protocol.step()
        steps, elapsed = steps + 10, time.perf_counter() - start
    return 1e6 * elapsed / steps, 1e6 * (time.process_time() - processor) / steps


def main(options: Options) -> None:
    """Measure, and report."""
    sys.path.insert(0, str(BENCHMARKS))
    from rich.console import Console
    from rich.table import Table

    from report import circumstances, write_json

    console = Console()
    rounds, seconds = 3 if options.quick else options.rounds, options.seconds
    results = {}
    for load in LOADS:
        with console.status(load.name):
            results[load.name] = compare(load, rounds, seconds)
        table = Table(title=f"{load.name}: medians, µs")
        table.add_column("protocol")
        for heading in ("step", "owner's processor time"):
            table.add_column(heading, justify="right")
        for measured in results[load.name]:
            medians = statistics.median(measured.step), statistics.median(measured.processor)
            table.add_row(measured.protocol, *(f"{median:.1f}" for median in medians))
        console.print(table)
    if not options.quick:
        content = {
            **circumstances({"rounds": rounds, "seconds": seconds}),
            "loads": {
                name: [
                    {"protocol": each.protocol, "step_us": each.step, "owner_us": each.processor}
                    for each in measured
                ]
                for name, measured in results.items()
            },
        }
        write_json(options.json, content)
        console.print(f"Written: {options.json}")


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Options))
