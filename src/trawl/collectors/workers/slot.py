"""Slots of a worker pool, each with its current worker and the pending requests."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from trawl.backends.base import Worker
from trawl.collectors.driver.budget import FrameCounts
from trawl.collectors.watch.times import WorkerTimes
from trawl.collectors.workers import requests
from trawl.collectors.workers.assembler import NO_SLICE, BufferSlice, WorkerBatch
from trawl.collectors.workers.snapshots import BatchRecord, Recovery, SentWeights, Snapshot
from trawl.collectors.workers.tracer import WorkerLane
from trawl.errors import WorkerDied
from trawl.observe.episodes import RecentEpisodes
from trawl.weights.store import Version

# Statistics that name the code that workers use, each with a reason if it is slower code.
_PATHS = ("env_path", "policy_path", "distribution_path")


class BufferNames:
    """Numbers that identify memory and partitions to the workers."""

    def __init__(self) -> None:
        self._fresh = count(1)
        self._names: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._freed: deque[int] = deque()

    def name(self, thing: Any) -> int:
        """Returns the number of a piece of memory, or of a partition."""
        if thing not in self._names:
            self._names[thing] = name = next(self._fresh)
            freed = weakref.finalize(thing, self._freed.append, name)
            freed.atexit = False
        return self._names[thing]

    def freed(self) -> Iterator[int]:
        """Yields the numbers of memory and partitions that were freed since the last call."""
        while self._freed:
            yield self._freed.popleft()


@dataclass
class WorkerSlot:
    """A slot of the pool, filled by one worker at a time.

    Attributes:
        index: number of the slot, and of its worker.
        worker: the worker; None if it is dead.
        pending: unanswered requests, by number, each with the memory for its batch.
        known: names of the memory and the partitions that the worker has received.
        ready: first message of the worker; None before it arrives.
        trajectory: last known id of the next trajectory to begin.
        begun: last known numbers of the next episodes, if ``reset_kwargs`` is a function.
        version: version of the policy that the worker reported last.
        writing: True while the worker writes into a replay buffer that it shares with others.
        written: answer to the pending request whose batch is already in that replay buffer, or
            None.
        restarts: number of times that the worker has been replaced.
        heard: time of the worker's last message, or of a later request, if the worker was
            idle before that request.
        frames: number of frames delivered, including those of workers that were replaced.
        batches: number of batches delivered, including those of workers that were replaced.
        facts: latest statistics of the worker.
        times: times of the batches that workers in this slot have collected.
        episodes: recent episodes of these workers.
        progress: counts of the frames and trajectories of these workers.
        lane: the worker's lane of a timeline; None while there is no timeline.
        silent: seconds of silence after which the worker was killed; None if it was not killed.
        snapshot: the worker's last snapshot, or None.
        since: batches that the worker has delivered since its last snapshot.
        sent: weights that were sent to the worker since its last snapshot.
    """

    index: int
    worker: Worker | None = None
    pending: dict[
        int, tuple[requests.CollectRequest | requests.CallRequest, BufferSlice | None]
    ] = field(default_factory=dict)
    known: set[int] = field(default_factory=set)
    ready: requests.WorkerReady | None = None
    trajectory: int = 0
    begun: Sequence[int] = ()
    version: Version = None
    writing: bool = False
    written: requests.BatchReady | None = None
    restarts: int = 0
    heard: float = 0.0
    frames: int = 0
    batches: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    times: WorkerTimes = field(default_factory=WorkerTimes)
    episodes: RecentEpisodes = field(default_factory=RecentEpisodes)
    progress: FrameCounts = field(default_factory=FrameCounts)
    lane: WorkerLane | None = None
    silent: float | None = None
    snapshot: Snapshot | None = None
    since: list[BatchRecord] = field(default_factory=list)
    sent: list[SentWeights] = field(default_factory=list)
    _env_restarts: int = 0

    @property
    def collects(self) -> bool:
        """True if the worker has been asked for a batch that has not arrived."""
        return any(isinstance(one, requests.CollectRequest) for one, _ in self.pending.values())

    @property
    def waits(self) -> bool:
        """True if a message from the worker is due."""
        return bool(self.pending) or self.ready is None

    def fill(self, worker: Worker) -> None:
        """Puts a new worker into the slot, and sends it the pending requests."""
        self.worker = worker
        for request, place in self.pending.values():
            self._transmit(request, place)

    def send(
        self,
        request: requests.CollectRequest | requests.CallRequest,
        place: BufferSlice | None = None,
    ) -> None:
        """Sends the worker a request, which is sent again if the worker is replaced.

        Args:
            request: the request.
            place: memory for the batch, which the request names.
        """
        if not self.pending:
            # Silence is measured from now on, because the worker had nothing to answer before.
            self.heard = time.monotonic()
        self.pending[request.number] = request, place
        self._transmit(request, place)

    def _transmit(
        self, request: requests.CollectRequest | requests.CallRequest, place: BufferSlice | None
    ) -> None:
        worker = self.worker
        if worker is None:
            return
        if self.lane is not None and isinstance(request, requests.CollectRequest):
            self.lane.requested(request)
        if isinstance(request, requests.CollectRequest) and request.memory is not None:
            assert place is not None
            if request.memory not in self.known:
                worker.share(request.memory, place.memory)
                self.known.add(request.memory)
            if request.partition not in self.known:
                assert place.partition is not None
                worker.send(requests.MapBuffer(request.partition, place.partition))
                self.known.add(request.partition)
        worker.send(request)

    def unmap(self, name: int) -> None:
        """Tells the worker to free memory or a partition that this process has freed."""
        if name in self.known and self.worker is not None:
            self.worker.send(requests.UnmapBuffer(name))
            self.worker.forget(name)
        self.known.discard(name)

    def finish(self, ready: requests.BatchReady) -> WorkerBatch:
        """Records that a batch was collected, and returns the batch."""
        request, place = self.pending.pop(ready.number)
        self.written = None
        self.trajectory = max(self.trajectory, ready.trajectory)
        self.begun = ready.begun or self.begun
        self.version = ready.version
        self.facts = dict(ready.facts)
        if ready.times is not None:
            self.times.add(ready.times, ready.frames)
        if self.lane is not None:
            self.lane.finished(ready)
        self.episodes.add(*ready.ended)
        self.progress.add(ready.progress)
        if self.snapshot is not None and ready.snapshot is None:
            assert isinstance(request, requests.CollectRequest)
            facts = ready.random, ready.filled, ready.frames, ready.weights, ready.version
            self.since.append(BatchRecord(*facts, request.normalization))
        self.note_snapshot(ready.snapshot)
        return WorkerBatch(self.index, place or NO_SLICE, ready)

    def finish_call(
        self, answer: requests.WorkerAnswer
    ) -> requests.CollectRequest | requests.CallRequest | None:
        """Records the answer to a call, or a failure, and returns its request."""
        request, _ = self.pending.pop(answer.number, (None, None))
        if answer.snapshot is None:
            # The call may have changed what the last snapshot says.
            self.forget_snapshot()
        self.progress.add(answer.progress)
        self.version = answer.version
        self.note_snapshot(answer.snapshot)
        return request

    def start(self, ready: requests.WorkerReady) -> None:
        """Records that the worker's collector has been made."""
        self.ready = ready
        if self.lane is not None:
            self.lane.ready(ready)
        self.trajectory = max(self.trajectory, ready.trajectory)
        self.version = ready.version
        self.note_snapshot(ready.snapshot)

    def note_snapshot(self, snapshot: Snapshot | None) -> None:
        """Replaces the worker's last snapshot; does nothing if there is no new one."""
        if snapshot is not None:
            self.snapshot = snapshot
            self.since.clear()
            self.sent = [one for one in self.sent if one.count > snapshot.updates]

    def forget_snapshot(self) -> None:
        """Forgets the last snapshot, because the worker's state has changed since."""
        self.snapshot = None
        self.since.clear()
        self.sent.clear()

    def keep_sent(self, sent: SentWeights) -> None:
        """Keeps weights that are sent to the worker, until the next snapshot has them."""
        if self.snapshot is None:
            return
        if not self.pending:
            # No batch has used the weights that the worker did not load before these came.
            used = self.since[-1].updates if self.since else self.snapshot.updates
            self.sent = [one for one in self.sent if one.count <= used or not sent.replaces(one)]
        self.sent.append(sent)

    @property
    def recovery(self) -> Recovery | None:
        """Everything with which a replacement continues; None to begin new episodes."""
        if self.snapshot is None:
            return None
        return Recovery(self.snapshot, tuple(self.since), tuple(self.sent))

    def stats(self) -> dict[str, Any]:
        """Returns the latest known statistics. The worker is not asked, because it may be busy."""
        facts = {
            "frames": self.frames,
            "batches": self.batches,
            "alive": self.worker is not None,
            "restarts": self.restarts,
            **self.times.stats(),
            **self.episodes.stats(),
            **asdict(self.progress),
            **self.facts,
        }
        if "env_restarts" in facts:
            facts["env_restarts"] += self._env_restarts
        return facts

    def forget_worker(self) -> None:
        """Marks the worker as dead, and keeps its count of environment restarts."""
        self.worker = None
        if self.lane is not None:
            self.lane.died()
        if self.snapshot is None:
            self.progress.trajectory_pending_frames = 0
        # The replacement counts from zero.
        # With a snapshot, its count is that of the dead worker.
        if "env_restarts" in self.facts and self.snapshot is None:
            self._env_restarts += self.facts["env_restarts"]
            self.facts["env_restarts"] = 0


@dataclass(frozen=True)
class SlotLimits:
    """Limits on restarts and on the time that a worker may be silent.

    Attributes:
        each: maximum number of restarts of any one worker.
        total: maximum number of restarts of all workers together.
        timeout: seconds without an answer after which a worker counts as dead; None for no limit.
    """

    each: int
    total: int
    timeout: float | None

    def check(self, slot: WorkerSlot, restarts: int, what: str) -> None:
        """Raises a ``WorkerDied`` if a dead worker may not be replaced.

        Args:
            slot: the slot of the worker.
            restarts: number of restarts of all workers so far.
            what: the beginning of the error message.
        """
        if slot.restarts >= self.each or restarts >= self.total:
            raise WorkerDied(
                f"{what}, and is not replaced again. Replacements so far: {slot.restarts} of "
                f"this worker (max_restarts={self.each}), {restarts} of all workers "
                f"(max_total_restarts={self.total})"
            )

    def patience(self, slots: Iterable[WorkerSlot]) -> float | None:
        """Returns the seconds after which to look for silent workers; None if there is no limit."""
        if self.timeout is None:
            return None
        since = [slot.heard for slot in slots if slot.waits]
        if not since:
            return None
        return min(max(0.0, min(since) + self.timeout - time.monotonic()), self.timeout / 2)

    def excuse(self, slots: Iterable[WorkerSlot], looked: float, now: float) -> None:
        """Counts the time since the last look for messages as half of the time-out at most.

        This process may have been suspended, perhaps together with its workers, or kept from
        reading their messages.

        Args:
            slots: the slots of the workers.
            looked: time of the last look.
            now: time of this look.
        """
        if self.timeout is None:
            return
        for slot in slots:
            slot.heard += max(0.0, now - max(looked, slot.heard) - self.timeout / 2)

    def kill_silent(self, slots: Iterable[WorkerSlot], now: float) -> None:
        """Kills the workers that have been silent for too long."""
        if self.timeout is None:
            return
        for slot in slots:
            if slot.waits and now - slot.heard >= self.timeout and slot.worker is not None:
                slot.worker.kill()
                slot.silent = self.timeout


def summary(slots: Iterable[WorkerSlot]) -> dict[str, Any]:
    """Combines the latest statistics of each worker into statistics of all workers together."""
    each = [slot.stats() for slot in slots]
    facts: dict[str, Any] = {
        "workers": len(each),
        "workers_alive": sum(one["alive"] for one in each),
        "restarts": sum(one["restarts"] for one in each),
        "worker_frames": sum(one["frames"] for one in each),
    }
    shares = [one["env_time_share"] for one in each if one.get("env_time_share")]
    if shares:
        facts["env_time_share"] = sum(shares) / len(shares)
    restarts = [one["env_restarts"] for one in each if "env_restarts" in one]
    if restarts:
        facts["env_restarts"] = sum(restarts)
    for name in (path + end for path in _PATHS for end in ("", "_reason")):
        found = [one[name] for one in each if name in one]
        if found:
            facts[name] = found[0]
    return facts
