"""In which order the workers of a fleet make batches: all together, or each for itself."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from typing_extensions import override

from trawl.collectors.assembly import Assembly, Part, Place
from trawl.collectors.fleet import Fleet

# How long a batch waits for workers that were broken off, as a share of the time it took: who is
# in the middle of a step that takes longer delivers with the next batch.
_GRACE = 0.05
# Orders that a worker has at a time: one is carried out, the next is there when that is done.
_AHEAD = 2


class Schedule(ABC):
    """Gives orders to workers, and makes batches of what they deliver.

    Args:
        fleet: the workers.
        assembly: where their batches are put; None if they go to a replay buffer.
        frames: frames of a batch of each worker.

    Attributes:
        frames_under_way: frames that were ordered and not delivered.
    """

    def __init__(self, fleet: Fleet, assembly: Assembly | None, frames: list[int]) -> None:
        self.fleet = fleet
        self.assembly = assembly
        self.frames = frames
        self.frames_under_way = 0
        self._places: dict[int, tuple[int, Place]] = {}

    @abstractmethod
    def collect(self, wanted: Callable[[], bool], random: Callable[[], bool]) -> list[Part]:
        """Collects what makes a batch, in the workers' order.

        Args:
            wanted: whether there are to be more frames than are under way.
            random: whether what is ordered now is to be of random actions.
        """

    def _order(self, index: int, place: Place, random: bool, breakable: bool = False) -> None:
        order = place.order(random, breakable)
        number = self.fleet.order(index, order, place.memory, place.joint)
        self._places[number] = index, place
        self.frames_under_way += self.frames[index]

    def _next(self, timeout: float | None = None) -> Part | None:
        found = self.fleet.next_done(timeout)
        if found is None:
            return None
        index, done = found
        _, place = self._places.pop(done.number)
        self.frames_under_way -= self.frames[index]
        return Part(index, place, done)

    def _place(self, index: int) -> Place:
        return Place() if self.assembly is None else self.assembly.place(index)


class SyncSchedule(Schedule):
    """Each batch is made by all workers, which then wait for the next one to be asked for.

    Args:
        fleet: the workers.
        assembly: where their batches are put.
        frames: frames of a batch of each worker.
        share: the share of the workers after whose batches the others are broken off.
    """

    def __init__(
        self,
        fleet: Fleet,
        assembly: Assembly | None,
        frames: list[int],
        share: float | None = None,
    ) -> None:
        super().__init__(fleet, assembly, frames)
        self._enough: int | None = None
        if share is not None and share < 1:
            self._enough = max(1, int(len(frames) * share))

    @override
    def collect(self, wanted: Callable[[], bool], random: Callable[[], bool]) -> list[Part]:
        fresh = self._order_all(random())
        return sorted(self._parts(fresh), key=lambda part: part.index)

    def _order_all(self, random: bool) -> set[int]:
        """Gives an order to each worker that has none; tells which these are."""
        # Who was broken off, and is not done with that yet, has an order.
        late = {index for index, _ in self._places.values()}
        count = len(self.frames)
        places = (
            [Place()] * count
            if self.assembly is None
            else self.assembly.places()
            if not late
            else [self._place(index) for index in range(count)]
        )
        for index, place in enumerate(places):
            if index not in late:
                self._order(index, place, random, breakable=self._enough is not None)
        return set(range(count)) - late

    def _parts(self, fresh: set[int]) -> list[Part]:
        began = time.monotonic()
        count = len(self.frames)
        parts: list[Part] = []
        # What late ones had left from the batch before says nothing about this one.
        enough = count if self._enough is None else min(self._enough, len(fresh))
        while len(fresh & {part.index for part in parts}) < enough or len(parts) < enough:
            part = self._next()
            if part is not None:
                parts.append(part)
        if len(parts) == count:
            return parts
        for index in set(range(count)) - {part.index for part in parts}:
            self.fleet.interrupt(index)
        now = time.monotonic()
        deadline = now + _GRACE * (now - began)
        while len(parts) < count:
            part = self._next(max(0.0, deadline - time.monotonic()))
            if part is not None:
                parts.append(part)
            elif time.monotonic() >= deadline:
                break
        return parts


class AsyncSchedule(Schedule):
    """Each batch is made by one worker, which goes on with the next one at once."""

    @override
    def collect(self, wanted: Callable[[], bool], random: Callable[[], bool]) -> list[Part]:
        for _ in range(_AHEAD):
            for member in self.fleet.members:
                self._keep_busy(member.index, wanted, random)
        part = None
        while part is None:
            part = self._next()
        # Nothing may be ordered for frames that are there: the user counts them as delivered.
        self.frames_under_way += part.done.frames
        self._keep_busy(part.index, wanted, random)
        self.frames_under_way -= part.done.frames
        return [part]

    def _keep_busy(
        self, index: int, wanted: Callable[[], bool], random: Callable[[], bool]
    ) -> None:
        """Gives a worker another order, if it has not enough."""
        if self._count(index) < _AHEAD and wanted():
            self._order(index, self._place(index), random())

    def _count(self, index: int) -> int:
        return sum(index == one for one, _ in self._places.values())
