"""Helpers for the chaos tests: faulty environments, checks of their frames, and processes."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from trawl.collectors import MultiCollector
from trawl.testing import Ledger, NumberedEnv

# Seconds after which a wait fails. Even on a slow machine, a wait that succeeds takes less time.
PATIENCE = 300
LENGTHS = (4, 1, 7)
_MOST_LIVES = 12


# --- what goes wrong


def kill(signum: int = signal.SIGKILL) -> None:
    """Kills this process with a signal."""
    os.kill(os.getpid(), signum)
    while True:  # another thread may receive the signal
        signal.pause()


def leave(status: int = 3) -> None:
    """Exits from this process at once, without a message."""
    os._exit(status)


def block() -> None:
    """Blocks forever."""
    inside, _outside = os.pipe()
    os.read(inside, 1)


def stay_busy() -> None:
    """Computes in C for much longer than any test lasts, without checking for signals."""
    pow(3, 10**10)


def fail() -> None:
    """Raises an ordinary exception."""
    raise ZeroDivisionError("the sea is rough")


@dataclass(frozen=True)
class Trouble:
    """Fault of an environment in its first lives.

    A life begins when the environment is made, in a worker or in its replacement.

    Attributes:
        at: kind of call that has the fault: ``"make"``, ``"reset"`` or ``"step"``.
        count: number of calls of this kind before the fault, in each life.
        what: function that causes the fault.
        lives: number of lives that have the fault.
    """

    at: str
    count: int
    what: Callable[[], Any] = kill
    lives: int = 1


class TroubledEnv(NumberedEnv):
    """Numbered environment that has a fault."""

    def __init__(self, trouble: Trouble | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._trouble = trouble
        self._reached: Counter[str] = Counter()
        self._reach("make")

    def reset(self, **kwargs: Any) -> Any:
        self._reach("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._reach("step")
        return super().step(action)

    def _reach(self, place: str) -> None:
        trouble = self._trouble
        if trouble and (trouble.at, trouble.count) == (place, self._reached[place]):
            trouble.what()
        self._reached[place] += 1


class Lives:
    """Records in a file how often something was begun, and by which processes.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def begin(self) -> int:
        """Begins another life, and returns its number, from 0; each number is given once."""
        with open(self.path, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            number = len(file.readlines())
            file.write(f"{os.getpid()}\n")
        return number

    @property
    def pids(self) -> list[int]:
        """Process id of each life, in order."""
        try:
            return [int(line) for line in Path(self.path).read_text().splitlines()]
        except FileNotFoundError:
            return []


class Maker:
    """Makes an environment that has a different number in each of its lives.

    Args:
        folder: folder of the file that records the lives.
        worker: index of the worker, below 10.
        lane: index of the environment in the worker, below 10.
        trouble: fault of the environment, or None.
    """

    def __init__(
        self, folder: Path, worker: int = 0, lane: int = 0, trouble: Trouble | None = None
    ) -> None:
        self.lives = Lives(folder / f"worker{worker}lane{lane}")
        self._place = 10 * worker + lane
        self._trouble = trouble

    def __call__(self) -> TroubledEnv:
        life = self.lives.begin()
        trouble = self._trouble if self._trouble and life < self._trouble.lives else None
        return TroubledEnv(trouble, number=100 * life + self._place, lengths=LENGTHS)


class Crew:
    """Environments of a collector's workers, their faults, and a check of their frames.

    Each life of an environment has its own number, so a frame shows in which life it was
    collected. The check therefore detects a frame that is left over from an ended life, is
    delivered twice, or is mixed into a batch of the next life.

    Args:
        folder: folder of the files that record the lives.
        workers: number of workers.
        lanes: number of environments in each worker.
        troubles: fault of a worker's first environment, by the worker's index.
        lives: maximum number of lives of an environment.

    Attributes:
        frames: number of frames checked.
    """

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        lanes: int = 1,
        troubles: dict[int, Trouble] | None = None,
        lives: int = _MOST_LIVES,
    ) -> None:
        given = troubles or {}
        self.workers, self.lanes = workers, lanes
        self.makers = [
            [Maker(folder, i, j, given.get(i) if j == 0 else None) for j in range(lanes)]
            for i in range(workers)
        ]
        numbers = [
            100 * life + 10 * worker + lane
            for life in range(lives)
            for worker in range(workers)
            for lane in range(lanes)
        ]
        self._ledger = Ledger([NumberedEnv(number, lengths=LENGTHS) for number in numbers])
        self._latest: Counter[int] = Counter()

    @property
    def sources(self) -> list[Any]:
        """Environments to pass to a collector as ``create_env_fn``."""
        return [makers[0] if self.lanes == 1 else list(makers) for makers in self.makers]

    @property
    def frames(self) -> int:
        return self._ledger.frames

    def pid(self, worker: int) -> int:
        """Returns the process id of a worker."""
        return self.makers[worker][0].lives.pids[-1]

    def pids(self) -> list[int]:
        """Returns the process ids of all workers, including dead ones."""
        return [pid for makers in self.makers for pid in makers[0].lives.pids]

    def add(self, batch: TensorDictBase) -> None:
        """Checks a batch of one worker, or the stacked batch of all workers.

        Raises:
            AssertionError: if a frame is not the expected one.
        """
        own_dims = 1 if self.lanes == 1 else 2
        stacked = batch.ndim > own_dims
        for index, part in enumerate(batch.unbind(0) if stacked else [batch]):
            numbers = NumberedEnv.numbers(part)[..., 0].reshape(self.lanes, -1)
            for lane, of_lane in enumerate(numbers):
                found = set(of_lane.tolist())
                assert len(found) == 1, f"one batch has frames of several environments: {found}"
                life, place = divmod(found.pop(), 100)
                assert place % 10 == lane
                assert not stacked or place // 10 == index
                assert life >= self._latest[place], "frames of a life that had ended"
                self._latest[place] = life
            self._ledger.add(part)

    def run(self, collector: MultiCollector) -> int:
        """Checks all batches of a collector; returns the number of batches."""
        count = 0
        for batch in collector:
            self.add(batch)
            del batch
            count += 1
        return count


def collector_of(crew: Crew, sync: bool, policy: Any = None, **options: Any) -> MultiCollector:
    """Returns a collector with 10 frames of each environment in a batch."""
    each = 10 * crew.lanes
    options.setdefault("frames_per_batch", each * crew.workers if sync else each)
    return MultiCollector(crew.sources, policy, sync=sync, **options)


def parts(
    collector: MultiCollector, crew: Crew, sync: bool
) -> Iterator[tuple[int, int, TensorDictBase]]:
    """Yields each worker's life, its number and its part of each next batch; checks all batches."""
    while True:
        batch = collector.next()
        crew.add(batch)
        for part in batch.unbind(0) if sync else [batch]:
            life, place = divmod(int(part["observation"][0, 0]), 100)
            yield life, place // 10, part


def frames_of(sync: bool, crew: Crew, rounds: int) -> int:
    """Returns the number of frames in ``rounds`` batches of each worker."""
    return rounds * 10 * crew.lanes * crew.workers


# --- policies


class Scored(nn.Module):
    """Policy with a weight for each action; it takes the action with the largest weight."""

    def __init__(self, choice: int = 0, load: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(4))
        self.choose(choice)
        self._load = load

    def choose(self, choice: int) -> Scored:
        """Makes ``choice`` the action that the policy takes."""
        with torch.no_grad():
            self.scores.copy_(nn.functional.one_hot(torch.tensor(choice), 4))
        return self

    def forward(self, observation: Tensor) -> Tensor:
        action = nn.functional.one_hot(self.scores.argmax(-1), 4)
        return action.expand(*observation.shape[:-1], 4)


class Once:
    """Calls a function at a certain call, only in the first process that reaches this call.

    Args:
        path: path of the file in which this process records its id.
        count: number of calls before the one that calls the function.
        what: the function.
    """

    def __init__(self, path: Path, count: int, what: Callable[[], Any]) -> None:
        self.path = str(path)
        self._left = count
        self._what = what

    def __call__(self, *args: Any) -> None:
        self._left -= 1
        if self._left != -1:
            return
        with suppress(FileExistsError), open(self.path, "x") as file:
            file.write(str(os.getpid()))
            file.flush()
            self._what()

    @property
    def pid(self) -> int:
        """Id of the process that called the function."""
        return int(Path(self.path).read_text())


def act(observation: Tensor) -> Tensor:
    """Acts as a policy without weights."""
    return nn.functional.one_hot(observation[..., 2].long() % 4, 4)


class Acting:
    """Policy that calls a function, and then acts like :func:`act`."""

    def __init__(self, first: Callable[[], Any]) -> None:
        self._first = first

    def __call__(self, observation: Tensor) -> Tensor:
        self._first()
        return act(observation)


# --- checks of warnings and processes


@contextmanager
def replaced(told: str, times: int | None = None) -> Iterator[None]:
    """Checks that the only warnings in the context report that workers died and are replaced.

    Args:
        told: regular expression for the beginning of each warning.
        times: number of warnings; None for any number except 0.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [f"{one.category.__name__}: {one.message}" for one in caught]
    pattern = f"RuntimeWarning: {told}.*; a new worker takes its place .restart"
    assert all(re.match(pattern, message) for message in messages), messages
    assert len(messages) == times if times is not None else messages, messages


def survives(
    crew: Crew, sync: bool, told: str, rounds: int = 3, policy: Any = None, **options: Any
) -> dict[str, Any]:
    """Checks that one worker is replaced, and that all frames come; returns the statistics."""
    frames = frames_of(sync, crew, rounds)
    with (
        replaced(told, times=1),
        collector_of(crew, sync, policy, total_frames=frames, **options) as collector,
    ):
        crew.run(collector)
        stats = collector.stats()
    assert crew.frames == stats["frames"] == frames
    return stats


def family(pid: int | None = None) -> list[int]:
    """Returns the ids of all descendants of a process; None stands for this process."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def runs(pid: int) -> bool:
    """Returns True if a process exists and has not ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


class Buffer:
    """Replay buffer that checks its batches, and lets other threads wait for frames."""

    def __init__(self, crew: Crew) -> None:
        self.frames = 0
        self.writer: threading.Thread | None = None
        self._crew = crew
        self._changed = threading.Condition()

    def extend(self, batch: TensorDictBase) -> None:
        """Checks a batch, and counts its frames."""
        self._crew.add(batch)
        with self._changed:
            self.frames += batch.numel()
            self._changed.notify_all()

    def wait_for(self, frames: int) -> None:
        """Waits until at least ``frames`` frames were written."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.frames >= frames, PATIENCE)
