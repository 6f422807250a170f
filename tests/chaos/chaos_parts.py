"""What the tests of deaths need: environments that kill, a ledger of their lives, and witnesses."""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from trawl.collectors import MultiCollector
from trawl.testing import Ledger, NumberedEnv

# Nothing that is waited for here takes longer on a slow machine, unless it never comes.
PATIENCE = 300
LENGTHS = (4, 1, 7)
_MOST_LIVES = 12


# --- what goes wrong


def kill(signum: int = signal.SIGKILL) -> None:
    """Ends this process by a signal."""
    os.kill(os.getpid(), signum)
    while True:  # it may be another thread that is given the signal
        signal.pause()


def leave(status: int = 3) -> None:
    """Ends this process without a word."""
    os._exit(status)


def crash() -> None:
    """Reads what is not there."""
    ctypes.string_at(0)


def block() -> None:
    """Waits for what never comes."""
    inside, _outside = os.pipe()
    os.read(inside, 1)


def stay_busy() -> None:
    """Computes in C, for much longer than any test lasts, without a look at signals."""
    pow(3, 10**10)


def fail() -> None:
    """Raises an exception of an ordinary kind."""
    raise ZeroDivisionError("the sea is rough")


@dataclass(frozen=True)
class Trouble:
    """What an environment does in the first of its lives.

    Attributes:
        at: where: ``"make"``, ``"reset"`` or ``"step"``.
        count: at the how manyth of these, from 0.
        what: what is done there.
        lives: in how many of its lives.
    """

    at: str
    count: int
    what: Callable[[], Any] = kill
    lives: int = 1


class TroubledEnv(NumberedEnv):
    """A numbered environment that gets into trouble."""

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
    """Counts, in a file, how often something was begun, and by which process.

    Args:
        path: the file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def begin(self) -> int:
        """Begins another life; returns its number, from 0."""
        with open(self.path, "a+") as file:
            file.seek(0)
            number = len(file.readlines())
            file.write(f"{os.getpid()}\n")
        return number

    @property
    def pids(self) -> list[int]:
        """The process of each life, in order."""
        try:
            return [int(line) for line in Path(self.path).read_text().splitlines()]
        except FileNotFoundError:
            return []


class Maker:
    """Makes an environment, with a number of its own in each of its lives.

    Args:
        folder: where its lives are counted.
        worker: the worker it is for, below 10.
        lane: which of the worker's environments it is, below 10.
        trouble: what happens to it.
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
    """The environments of a collector, what happens to them, and the check of what they give.

    Each life of an environment has a number of its own, so that a frame shows in which life it
    was made: one that is left over from a life that ended, repeated from it, or mixed into the
    batch of the next, is out of order there.

    Args:
        folder: where lives are counted.
        workers: number of workers.
        lanes: environments of each.
        troubles: what happens to (the first environment of) a worker, by its index.
        lives: how many lives an environment may have.

    Attributes:
        frames: frames checked.
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
        """What a collector is given as ``create_env_fn``."""
        return [makers[0] if self.lanes == 1 else list(makers) for makers in self.makers]

    @property
    def frames(self) -> int:
        return self._ledger.frames

    def pid(self, worker: int) -> int:
        """The process of a worker."""
        return self.makers[worker][0].lives.pids[-1]

    def pids(self) -> list[int]:
        """The processes of all workers that ever were."""
        return [pid for makers in self.makers for pid in makers[0].lives.pids]

    def add(self, batch: TensorDictBase) -> None:
        """Checks a batch: of one worker, or of all, stacked.

        Raises:
            AssertionError: if a frame is not the one that has to come.
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
        """Checks all that a collector gives; returns the number of batches."""
        count = 0
        for batch in collector:
            self.add(batch)
            del batch
            count += 1
        return count


def collector_of(crew: Crew, sync: bool, policy: Any = None, **options: Any) -> MultiCollector:
    """A collector of 10 frames of each worker (of each environment) in a batch."""
    each = 10 * crew.lanes
    options.setdefault("frames_per_batch", each * crew.workers if sync else each)
    return MultiCollector(crew.sources, policy, sync=sync, **options)


def frames_of(sync: bool, crew: Crew, rounds: int) -> int:
    """Frames of so many batches of each worker."""
    return rounds * 10 * crew.lanes * crew.workers


# --- policies


class Scored(nn.Module):
    """A policy with weights: the action is always the one with the highest score."""

    def __init__(self, choice: int = 0, load: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(4))
        self.choose(choice)
        self._load = load

    def choose(self, choice: int) -> Scored:
        """Changes which action that is."""
        with torch.no_grad():
            self.scores.copy_(nn.functional.one_hot(torch.tensor(choice), 4))
        return self

    def forward(self, observation: Tensor) -> Tensor:
        action = nn.functional.one_hot(self.scores.argmax(-1), 4)
        return action.expand(*observation.shape[:-1], 4)


class Once:
    """Does something at its ``count``-th call (from 0), in the first process that comes to it.

    Args:
        path: a file that says which process that was.
        count: the call.
        what: what is done.
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
        """The process that did it."""
        return int(Path(self.path).read_text())


def act(observation: Tensor) -> Tensor:
    """A policy without weights."""
    return nn.functional.one_hot(observation[..., 2].long() % 4, 4)


class Acting:
    """The same, and before that it does something else."""

    def __init__(self, first: Callable[[], Any]) -> None:
        self._first = first

    def __call__(self, observation: Tensor) -> Tensor:
        self._first()
        return act(observation)


# --- witnesses


@contextmanager
def replaced(told: str, times: int | None = None) -> Iterator[None]:
    """Within it there are warnings of workers that died, which begin like this, and no others.

    Args:
        told: a regular expression.
        times: how many; None: any number, but one at least.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [f"{one.category.__name__}: {one.message}" for one in caught]
    pattern = f"RuntimeWarning: {told}.*; a new worker takes its place .restart"
    assert all(re.match(pattern, message) for message in messages), messages
    assert len(messages) == times if times is not None else messages, messages


def strike(*pids: int, signum: int = signal.SIGKILL) -> None:
    """Kills processes, and waits until they are gone; they may be gone already."""
    with watched(*pids) as watch:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        watch()


@contextmanager
def watched(*pids: int) -> Iterator[Callable[[], None]]:
    """Gives a function that waits until these processes have ended.

    They may have ended before it is called, and their numbers be those of others.
    """
    handles = []
    for pid in pids:
        try:
            handles.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    try:
        yield partial(_wait_for, handles)
    finally:
        for handle in handles:
            os.close(handle)


def _wait_for(handles: Sequence[int], seconds: float = PATIENCE) -> None:
    for handle in handles:
        assert select.select([handle], [], [], seconds)[0], "a process is still there"


def family(pid: int | None = None) -> list[int]:
    """The processes that a process (this one, with None) has started, and those that they have."""
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def runs(pid: int) -> bool:
    """Tells whether a process exists and has not ended."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


class Buffer:
    """A replay buffer of the fewest methods, on which others can wait."""

    def __init__(self, crew: Crew) -> None:
        self.frames = 0
        self.writer: threading.Thread | None = None
        self._crew = crew
        self._changed = threading.Condition()

    def extend(self, batch: TensorDictBase) -> None:
        """Takes a batch, and checks it."""
        self._crew.add(batch)
        with self._changed:
            self.frames += batch.numel()
            self._changed.notify_all()

    def wait_for(self, frames: int) -> None:
        """Waits until so many frames were written."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.frames >= frames, PATIENCE)
