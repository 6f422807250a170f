"""Schedulers, which decide when workers collect: all together, or each on its own.

They are the only difference between collectors that wait for all workers and those that don't. With
``prefetch=1``, the next batch is requested before a batch is delivered. From then on, the weight
sender holds updates back until the workers have answered, so workers get no weights that are newer
than the request, and a replacement repeats a dead worker's batch with the same weights.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter

from typing_extensions import override

from trawl.collectors.config import CollectorConfig
from trawl.collectors.driver.background import BackgroundCollection
from trawl.collectors.driver.budget import FrameBudget
from trawl.collectors.driver.exact import shares
from trawl.collectors.workers.assembler import NO_SLICE, BatchAssembler, BufferSlice, WorkerBatch
from trawl.collectors.workers.lag import LagBound
from trawl.collectors.workers.pool import WorkerPool
from trawl.collectors.workers.requests import CollectRequest
from trawl.observe.waits import Hold
from trawl.rollout.normalization import Normalization

# Time that a batch waits for interrupted workers, as a share of the time that the batch has taken
# so far. A worker in the middle of a longer step delivers with the next batch.
_GRACE = 0.05
# Number of requests that a worker has at a time: the current request and the next one.
_AHEAD = 2


class Demand:
    """The frames that are wanted from workers, and the reasons why no more are requested now.

    Args:
        config: options of the collector.
        budget: the collector's frames.
        background: the thread that fills the replay buffer, if there is one.

    Attributes:
        under_way: number of frames that have been requested but not yet delivered.
        most_batches: number of batches that may be under way at the same time.
        random_for: True or False if a collector of which this one is a worker says whether actions
            are random; None if this one decides.
    """

    def __init__(
        self, config: CollectorConfig, budget: FrameBudget, background: BackgroundCollection
    ) -> None:
        self._config, self._budget, self._background = config, budget, background
        self.under_way = 0
        self.most_batches = math.inf
        self.random_for: bool | None = None

    def hold(self, batches: int, counted: int = 0) -> Hold | None:
        """Returns why no further batch is requested; None if there is no reason.

        Args:
            batches: number of batches that are under way.
            counted: number of frames that are no longer under way, but count as if they were.
        """
        if not self._background.has_room(self.under_way + counted):
            return Hold.SAMPLES
        if not self._budget.has_more(self.under_way):
            return Hold.FRAMES
        return Hold.OUTER if batches >= self.most_batches else None

    @property
    def room(self) -> float:
        """Number of frames that may be requested, besides those under way."""
        room = self._budget.left() - self.under_way
        random = self._config.init_random_frames
        if self._config.adds_steps and random and self._acted < random:
            # The policy acts from the step on that follows the last random one.
            room = min(room, random - self._acted)
        return max(0.0, room)

    @property
    def random(self) -> bool:
        """True if the actions of a batch that is requested now are to be random."""
        if self.random_for is not None:
            return self.random_for
        first = self._config.init_random_frames
        return bool(first and self._acted < first)

    @property
    def _acted(self) -> int:
        """Number of frames that were written or requested, to compare with the random ones."""
        written: int = getattr(self._config.replay_buffer, "write_count", 0)
        return max(self._budget.frames + self.under_way, written)


class Scheduler(ABC):
    """Requests batches from workers, and gathers them.

    Args:
        pool: the pool of workers.
        demand: the frames that are wanted.

    Attributes:
        frames: for each worker, the number of frames in one of its batches.
        units: for each worker, the number of frames that smaller requests are multiples of.
        requested: True if all requests for the next batch have been sent.
        waited: seconds in which the scheduler waited for workers.
        on_wait: function that is called with the beginning and the end of each wait, or None.
        samples_steps: True to have workers record the times of single steps.
        whole_steps: True if units are steps that are not divided, although there may be more frames
            then than are left.
        normalization: the statistics that requests carry; None if nothing is normalised.
    """

    #: Why a worker that nothing has held back was not asked for a batch earlier.
    usual: Hold

    def __init__(self, pool: WorkerPool, demand: Demand) -> None:
        self.pool = pool
        self.demand = demand
        self.assembler: BatchAssembler | None = None
        self.frames: list[int] = []
        self.units: list[int] = []
        self.requested = False
        self.waited = 0.0
        self.on_wait: Callable[[float, float], None] | None = None
        self.samples_steps = False
        self.whole_steps = False
        self.normalization: Normalization | None = None
        # Why each worker that is held back was not asked for another batch.
        self._held: dict[int, Hold] = {}
        # For each worker, the sizes of the batches that it was asked for and that have not arrived.
        self._requested: list[deque[int]] = []
        # Batches that have arrived and are not delivered yet, in the order of their arrival.
        self._made: list[WorkerBatch] = []

    @abstractmethod
    def collect(self) -> list[WorkerBatch]:
        """Collects the workers' parts of a batch, sorted by worker."""

    def set_workers(
        self, assembler: BatchAssembler | None, frames: list[int], units: list[int]
    ) -> None:
        """Sets the workers, or adds new ones.

        Args:
            assembler: object that provides the memory of the workers' batches; None if the batches
                go to a replay buffer.
            frames: for each worker, old or new, the number of frames in one of its batches.
            units: see :class:`Scheduler`.
        """
        self.assembler, self.frames, self.units = assembler, frames, units
        self._requested += [deque() for _ in range(len(frames) - len(self._requested))]

    def pop_finished(self) -> list[WorkerBatch]:
        """Removes and returns the batches that are finished but not yet delivered."""
        parts = []
        while (part := self._counted(self.pool.pop_batch())) is not None:
            parts.append(part)
        return parts

    def finished(self) -> list[WorkerBatch]:
        """Returns the batches that are finished but not yet delivered, and keeps them."""
        while (part := self._counted(self.pool.pop_batch())) is not None:
            self._add_made(part)
        return list(self._made)

    @property
    def batches_ready(self) -> int:
        """Number of batches that are finished but not yet delivered."""
        return len(self._made) + len(self.pool.batches)

    def put_back(self, parts: Sequence[WorkerBatch], requested: bool) -> None:
        """Adds batches of a loaded state, which are delivered before all others.

        Args:
            parts: the batches.
            requested: True if all requests for the next batch had been sent.
        """
        for part in parts:
            self._add_made(part)

    def _add_made(self, part: WorkerBatch) -> None:
        self._made.append(part)

    @property
    def _ahead(self) -> bool:
        """True if workers with workers of their own may have batches that are not requested yet."""
        return self.demand.most_batches == math.inf

    def _sizes(self, workers: Sequence[int]) -> list[int]:
        """Returns the number of frames to request from each of some workers.

        A batch can't be cut in the middle, so a request for less than a unit is the last one. If
        steps are not divided, it becomes a whole unit.
        """
        left = self.demand.room
        sizes = [self.frames[index] for index in workers]
        found = shares(left, sizes, [self.units[index] for index in workers])
        if found and not any(found) and not self.demand.under_way:
            found[0] = self.units[workers[0]] if self.whole_steps and left >= 1 else int(left)
        return found

    def _request(
        self, index: int, place: BufferSlice, random: bool, size: int, breakable: bool = False
    ) -> int:
        hold = self._held.pop(index, self.usual)
        # Counted before the request is sent, because Ctrl-C may be pressed right after that.
        self._requested[index].append(size)
        self.demand.under_way += size
        most = size if size < self.frames[index] else math.inf
        request = CollectRequest(
            random=random,
            breakable=breakable,
            most=most,
            samples_steps=self.samples_steps,
            normalization=None if self.normalization is None else self.normalization.share(),
            ahead=self._ahead,
        )
        number = self.pool.request_batch(index, place, request)
        lane = self.pool.slots[index].lane
        if lane is not None:
            lane.held(number, hold)
        return number

    def _next(self, timeout: float | None = None) -> WorkerBatch | None:
        before = perf_counter()
        try:
            return self._counted(self.pool.next_batch(timeout))
        finally:
            now = perf_counter()
            self.waited += now - before
            if self.on_wait is not None:
                self.on_wait(before, now)

    def _counted(self, part: WorkerBatch | None) -> WorkerBatch | None:
        if part is not None:
            self.demand.under_way -= self._requested[part.index].popleft()
        return part

    def _slice(self, index: int) -> BufferSlice:
        return NO_SLICE if self.assembler is None else self.assembler.slice(index)


class SyncScheduler(Scheduler):
    """Gathers each batch from all workers, which then wait for their next requests.

    Args:
        pool: the pool of workers.
        threshold: share of the workers that a batch waits for before the other workers are
            interrupted; None or 1 to wait for all workers.
        demand: the frames that are wanted.
    """

    usual = Hold.TOGETHER

    def __init__(self, pool: WorkerPool, threshold: float | None, demand: Demand) -> None:
        super().__init__(pool, demand)
        # The workers that were asked for a part of the next batch.
        self._fresh: set[int] = set()
        self._random, self._began = False, 0.0
        self._threshold = 1.0 if threshold is None else threshold
        # Workers that did not deliver in time for the last batch.
        self._slow: set[int] = set()

    @override
    def collect(self) -> list[WorkerBatch]:
        if not self.requested:
            self.request_ahead()
        self._gather()
        self.requested = False
        parts, self._made = self._made, []
        return sorted(parts, key=lambda part: part.index)

    def is_held(self, counted: int) -> bool:
        """Returns True if no worker is to be asked for the next batch yet, and notes why.

        Args:
            counted: number of frames that are being delivered. A replay buffer doesn't have them
                yet.
        """
        hold = self.demand.hold(1, counted)
        if hold is not None:
            self._held = dict.fromkeys(range(len(self.frames)), hold)
        return hold is not None

    def request_ahead(self) -> None:
        """Requests the next batch."""
        self._random, self._began = self.demand.random, time.monotonic()
        self._fresh = self._request_all(self._random)
        self.requested = True

    @override
    def put_back(self, parts: Sequence[WorkerBatch], requested: bool) -> None:
        super().put_back(parts, requested)
        self._fresh = {part.index for part in parts} if requested else set()
        self.requested = requested

    @override
    def set_workers(
        self, assembler: BatchAssembler | None, frames: list[int], units: list[int]
    ) -> None:
        super().set_workers(assembler, frames, units)
        if self.requested:
            # A batch that was requested ahead gets a part of each new worker, too.
            self._fresh |= self._request_all(self._random)

    @override
    def pop_finished(self) -> list[WorkerBatch]:
        parts, self._made = [*self._made, *super().pop_finished()], []
        if not any(self._requested):
            self.requested = False
        return parts

    def _request_all(self, random: bool) -> set[int]:
        """Sends a request to each worker that has none, and returns these workers."""
        # A worker that was interrupted and has not answered yet still has a request. If a state was
        # taken since, it has answered already.
        answered = {part.index for part in self._made}
        late = any(self._requested) or bool(answered)
        fresh = [
            index
            for index, count in enumerate(self._requested)
            if not count and index not in answered
        ]
        together = None if late or self.assembler is None else self.assembler.slices()
        sizes = self._sizes(fresh)
        asked = [(index, size) for index, size in zip(fresh, sizes, strict=True) if size]
        for index, size in asked:
            place = self._slice(index) if together is None else together[index]
            self._request(index, place, random, size, breakable=self._threshold < 1)
        return {index for index, _ in asked}

    def _gather(self) -> None:
        """Waits for the batches of all workers, or of as many workers as the threshold requires."""
        parts, fresh = self._made, self._fresh
        asked = {index for index, sizes in enumerate(self._requested) if sizes}
        asked |= {part.index for part in parts}
        count = len(asked)
        # Parts of the last batch that arrive late don't count towards the threshold.
        least = max(1, int(count * self._threshold))
        enough = count if self._threshold >= 1 else min(least, len(fresh))
        # If no worker was asked, a late part is the rest of the budget.
        while len(fresh & {part.index for part in parts}) < enough or len(parts) < max(1, enough):
            part = self._next()
            if part is not None:
                parts.append(part)
        if len(parts) == count:
            return
        missing = asked - {part.index for part in parts}
        for index in missing:
            self.pool.interrupt(index)
        now = time.monotonic()
        # Workers that were too slow the last time are not waited for.
        deadline = now + (_GRACE * (now - self._began) if missing - self._slow else 0.0)
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


class AsyncScheduler(Scheduler):
    """Gets each batch from one worker, which begins its next batch at once.

    Args:
        pool: the pool of workers.
        bound: object that delays requests so that no batch becomes too old; None for no limit.
        demand: the frames that are wanted.
        at_once: number of batches that a worker makes at the same time.
    """

    usual = Hold.TAKEN

    def __init__(
        self, pool: WorkerPool, bound: LagBound | None, demand: Demand, at_once: int = 1
    ) -> None:
        super().__init__(pool, demand)
        self.bound = bound
        # The bound counts batches that are requested, so workers must have no others.
        self._most_requests = _AHEAD if bound is None else _AHEAD * at_once
        # Number of each worker's last request.
        self._last: list[int] = []

    @override
    def collect(self) -> list[WorkerBatch]:
        if self.bound is not None:
            self.bound.begin()
        for _ in range(self._most_requests):
            for index in self._by_turn():
                self._keep_busy(index)
        part = self._choose()
        if self.bound is not None:
            self.bound.delivered(part.answer.number)
        # The frames of this part still count as under way, because the caller counts them later.
        self._keep_busy(part.index, later=True)
        self._made = [one for one in self._made if one is not part]
        self.demand.under_way -= part.answer.frames
        return [part]

    @override
    def pop_finished(self) -> list[WorkerBatch]:
        self.demand.under_way -= sum(part.answer.frames for part in self._made)
        parts, self._made = [*self._made, *super().pop_finished()], []
        if self.bound is not None:
            for part in parts:
                self.bound.delivered(part.answer.number)
        return parts

    @override
    def set_workers(
        self, assembler: BatchAssembler | None, frames: list[int], units: list[int]
    ) -> None:
        super().set_workers(assembler, frames, units)
        added = range(len(self._last), len(frames))
        self._last += [0] * len(added)
        if self.bound is not None:
            self.bound.grow(added)

    @override
    def put_back(self, parts: Sequence[WorkerBatch], requested: bool) -> None:
        for part in parts:
            if self.bound is not None and not part.answer.random:
                self.bound.ordered(part.answer.number, part.index)
        super().put_back(parts, requested)

    @property
    @override
    def _ahead(self) -> bool:
        return self.bound is None and super()._ahead

    @override
    def _add_made(self, part: WorkerBatch) -> None:
        super()._add_made(part)
        # Until its delivery, a batch counts as under way.
        self.demand.under_way += part.answer.frames
        if self.bound is not None:
            weights = math.inf if part.answer.random else part.answer.weights
            self.bound.made(part.answer.number, weights)

    def _by_turn(self) -> list[int]:
        """Returns the workers, sorted by the age of their last requests, oldest first.

        If only some workers may get a request, those that have waited longest get one.
        """
        return sorted(range(len(self.frames)), key=self._last.__getitem__)

    def _choose(self) -> WorkerBatch:
        """Waits until a batch can be delivered, and returns it. The batch stays in ``_made``."""
        while True:
            if self._made:
                if self.bound is None:
                    return self._made[0]
                number = self.bound.choose(part.answer.number for part in self._made)
                for part in self._made:
                    if part.answer.number == number:
                        return part
            made = self._next()
            if made is not None:
                self._add_made(made)

    def _keep_busy(self, index: int, later: bool = False) -> None:
        """Sends a worker another request if it has too few, unless there is a reason not to.

        Args:
            index: number of the worker.
            later: True if another batch is being delivered now.
        """
        if len(self._requested[index]) >= self._most_requests:
            return
        random = self.demand.random
        # A batch of random actions can't become too old.
        bound = None if random else self.bound
        (size,) = self._sizes([index])
        # A batch that is being delivered is under way until then.
        hold = self.demand.hold(len(self._made) + sum(map(len, self._requested)))
        if hold is None and bound is not None and not bound.room(later):
            hold = Hold.LAG
        if hold is None and size < 1:
            hold = Hold.FRAMES
        if hold is not None:
            self._held[index] = hold
            return
        self._last[index] = self._request(index, self._slice(index), random, size)
        if bound is not None:
            bound.ordered(self._last[index], index)
