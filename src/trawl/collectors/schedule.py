"""In which order the workers of a fleet make batches: all together, or each for itself."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from typing_extensions import override

from trawl.collectors.assembly import Assembly, Part, Place
from trawl.collectors.fleet import Fleet
from trawl.collectors.lag import LagBound
from trawl.collectors.orders import Done

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

    def grow(self, assembly: Assembly | None, frames: list[int]) -> None:
        """There are more workers from now on.

        Args:
            assembly: where the batches of all are put.
            frames: frames of a batch of each.
        """
        self.assembly, self.frames = assembly, frames

    def rest(self) -> list[Part]:
        """Takes what was made and not asked for."""
        parts = []
        while (part := self._taken(self.fleet.take_done())) is not None:
            parts.append(part)
        return parts

    def _order(self, index: int, place: Place, random: bool, breakable: bool = False) -> int:
        order = replace(place.order(random, breakable), number=self.fleet.new_number())
        # First: an interrupt may come between an order and whatever follows it.
        self._places[order.number] = index, place
        self.frames_under_way += self.frames[index]
        self.fleet.order(index, order, place.memory, place.joint)
        return order.number

    def _next(self, timeout: float | None = None) -> Part | None:
        return self._taken(self.fleet.next_done(timeout))

    def _taken(self, found: tuple[int, Done] | None) -> Part | None:
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
        # Batches of workers that the others are waited for with.
        self._made: list[Part] = []
        self._enough: int | None = None
        # Who had not delivered in time when the last batch was made.
        self._slow: set[int] = set()
        if share is not None and share < 1:
            self._enough = max(1, int(len(frames) * share))

    @override
    def collect(self, wanted: Callable[[], bool], random: Callable[[], bool]) -> list[Part]:
        fresh = self._order_all(random())
        self._gather(fresh)
        parts, self._made = self._made, []
        return sorted(parts, key=lambda part: part.index)

    @override
    def rest(self) -> list[Part]:
        parts, self._made = [*self._made, *super().rest()], []
        return parts

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

    def _gather(self, fresh: set[int]) -> None:
        """Waits for the batches of all workers, or of enough."""
        began = time.monotonic()
        count = len(self.frames)
        parts = self._made
        # What late ones had left from the batch before says nothing about this one.
        enough = count if self._enough is None else min(self._enough, len(fresh))
        while len(fresh & {part.index for part in parts}) < enough or len(parts) < enough:
            part = self._next()
            if part is not None:
                parts.append(part)
        if len(parts) == count:
            return
        missing = set(range(count)) - {part.index for part in parts}
        for index in missing:
            self.fleet.interrupt(index)
        now = time.monotonic()
        # Who was too slow for that the last time is not waited for.
        deadline = now + (_GRACE * (now - began) if missing - self._slow else 0.0)
        while missing:
            part = self._next(max(0.0, deadline - time.monotonic()))
            if part is not None:
                parts.append(part)
                missing.discard(part.index)
            if not missing - self._slow:
                deadline = 0.0
            if part is None and time.monotonic() >= deadline:
                break
        self._slow = missing


class AsyncSchedule(Schedule):
    """Each batch is made by one worker, which goes on with the next one at once.

    Args:
        fleet: the workers.
        assembly: where their batches are put; None if they go to a replay buffer.
        frames: frames of a batch of each worker.
        bound: holds workers back, so that no batch is too old; None if there is no limit.
    """

    def __init__(
        self,
        fleet: Fleet,
        assembly: Assembly | None,
        frames: list[int],
        bound: LagBound | None = None,
    ) -> None:
        super().__init__(fleet, assembly, frames)
        self.bound = bound
        # Batches that were made, in the order in which they were, and not delivered yet.
        self._made: list[Part] = []
        # The last order of each worker.
        self._last = [0] * len(frames)

    @override
    def collect(self, wanted: Callable[[], bool], random: Callable[[], bool]) -> list[Part]:
        if self.bound is not None:
            self.bound.begin()
        for _ in range(_AHEAD):
            for index in self._by_turn():
                self._keep_busy(index, wanted, random)
        part = self._choose()
        if self.bound is not None:
            self.bound.delivered(part.done.number)
        # Frames that are there count as under way until now: the user counts them as delivered.
        self._keep_busy(part.index, wanted, random, later=True)
        self._made = [one for one in self._made if one is not part]
        self.frames_under_way -= part.done.frames
        return [part]

    @override
    def rest(self) -> list[Part]:
        self.frames_under_way -= sum(part.done.frames for part in self._made)
        parts, self._made = [*self._made, *super().rest()], []
        if self.bound is not None:
            for part in parts:
                self.bound.delivered(part.done.number)
        return parts

    @override
    def grow(self, assembly: Assembly | None, frames: list[int]) -> None:
        super().grow(assembly, frames)
        added = range(len(self._last), len(frames))
        self._last += [0] * len(added)
        if self.bound is not None:
            self.bound.grow(added)

    def _by_turn(self) -> list[int]:
        """The workers; where not all may have orders, those first who waited longest."""
        return sorted(range(len(self.frames)), key=self._last.__getitem__)

    def _choose(self) -> Part:
        """The next batch to deliver; it is still among those that were made."""
        while True:
            if self._made:
                if self.bound is None:
                    return self._made[0]
                number = self.bound.choose(part.done.number for part in self._made)
                for part in self._made:
                    if part.done.number == number:
                        return part
            made = self._next()
            if made is not None:
                self._made.append(made)
                self.frames_under_way += made.done.frames
                if self.bound is not None:
                    self.bound.made(made.done.number, made.done.weights)

    def _keep_busy(
        self,
        index: int,
        wanted: Callable[[], bool],
        random: Callable[[], bool],
        later: bool = False,
    ) -> None:
        """Gives a worker another order, if it has not enough."""
        if self._count(index) >= _AHEAD or not wanted():
            return
        at_random = random()
        # What random actions do, no update makes old.
        bound = None if at_random else self.bound
        if bound is not None and not bound.room(later):
            return
        self._last[index] = self._order(index, self._place(index), at_random)
        if bound is not None:
            bound.ordered(self._last[index], index)

    def _count(self, index: int) -> int:
        return sum(index == one for one, _ in self._places.values())
