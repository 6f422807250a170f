"""Snapshots of workers, from which a replacement continues where a dead worker stopped.

With ``worker_snapshots=N``, a worker sends the state of its collector when it starts, after every N
batches, and after each call that may have changed its state. The driver keeps a short record of
each batch since the last snapshot, and the weights that it has sent to the worker since then. A
replacement loads the snapshot, and collects these batches again with the same weights. It drops
the batches, because the driver has them already.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from trawl.collectors.driver.state_checks import RESUME, UNCAPTURED
from trawl.collectors.driver.weights import POLICY
from trawl.rollout.normalization import SharedStatistics
from trawl.rollout.times import LoopTimes
from trawl.weights.groups import PreparedUpdate
from trawl.weights.store import Version
from trawl.weights.tensors import Weights, unpacked_extra


@dataclass(frozen=True)
class Snapshot:
    """State of a worker between two batches.

    Attributes:
        state: the pickled state of the worker's collector.
        updates: number of weight updates that the worker had received.
    """

    state: bytes
    updates: int


@dataclass(frozen=True)
class BatchRecord:
    """Record of a batch that a worker has delivered since its last snapshot.

    Attributes:
        random: True if the actions were random.
        steps: number of steps in the batch.
        frames: number of frames of experience in the batch.
        updates: number of weight updates that the worker had received.
        version: version of the policy.
        normalization: statistics with which the batch began; None if nothing is normalised.
    """

    random: bool
    steps: int
    frames: int
    updates: int
    version: Version
    normalization: SharedStatistics | None = None


@dataclass(frozen=True)
class SentWeights:
    """Weights of the policy that were sent to a worker.

    Attributes:
        count: number of updates that were sent to the worker, up to and including this one.
        weights: a copy of the weights.
    """

    count: int
    weights: Weights

    def replaces(self, other: SentWeights) -> bool:
        """Returns True if nothing is left of earlier weights once these weights are loaded."""
        mine, theirs = self.weights, other.weights
        return (
            theirs.tensors.keys() <= mine.tensors.keys()
            and theirs.extra.keys() <= mine.extra.keys()
        )


@dataclass(frozen=True)
class Recovery:
    """Data from which a replacement continues where a dead worker stopped.

    Attributes:
        snapshot: the last snapshot of the dead worker.
        batches: records of the batches that the dead worker delivered after the snapshot.
        sent: weights that were sent to the dead worker after the snapshot.
    """

    snapshot: Snapshot
    batches: Sequence[BatchRecord] = ()
    sent: Sequence[SentWeights] = ()

    @property
    def updates(self) -> int:
        """Number of weight updates that the dead worker had received at its last batch."""
        return self.batches[-1].updates if self.batches else self.snapshot.updates

    def weights_before(self, index: int) -> list[Weights]:
        """Returns the weights that the worker loaded just before a batch, oldest first."""
        last = self.batches[index - 1].updates if index else self.snapshot.updates
        return [one.weights for one in self.sent if last < one.count <= self.batches[index].updates]


class SnapshotTaker:
    """Takes the snapshots of a worker.

    Args:
        collector: the worker's collector.
        every: number of batches between two snapshots; 0 to take none.
        warn: function that warns the user.
    """

    def __init__(self, collector: Any, every: int, warn: Callable[[str], None]) -> None:
        self._collector = collector
        self._every = every
        self._warn = warn
        self._warned = False
        self._batches = 0

    def after_batch(self, updates: int) -> Snapshot | None:
        """Returns a snapshot if it is time for one."""
        self._batches += 1
        return self.take(updates) if self._every and self._batches >= self._every else None

    def take(self, updates: int) -> Snapshot | None:
        """Returns a snapshot; None if snapshots are off, or an environment can't be captured.

        Args:
            updates: number of weight updates that the worker has received.
        """
        if not self._every:
            return None
        state = self._collector.state_dict()
        if RESUME not in state:
            self._warn_once(state.get(UNCAPTURED, "its environments can't be captured"))
            return None
        self._batches = 0
        return Snapshot(pickle.dumps(state), updates)

    def _warn_once(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"worker_snapshots={self._every} has no effect: new episodes begin after the death "
                f"of this worker, because {why}"
            )

    def expire(self) -> None:
        """Makes a snapshot due after the next batch, because the worker's state has changed."""
        self._batches = self._every


def kept_copies(
    updates: Sequence[PreparedUpdate], counts: Mapping[int, int]
) -> Iterator[tuple[int, SentWeights]]:
    """Yields copies of weights that are being sent, each with the number of its worker.

    Args:
        updates: the weights.
        counts: for each receiving worker, its number of updates including this one.
    """
    for update in updates:
        _, slot = update.copy()
        weights = Weights(slot.named(), unpacked_extra(update.extra))
        for worker in update.workers:
            yield worker, SentWeights(counts[worker], weights)


def recover(collector: Any, recovery: Recovery) -> None:
    """Continues where the dead worker stopped that a collector's worker replaces.

    Batches that the dead worker delivered after its last snapshot are collected again with the
    same weights, and dropped.
    """
    collector.load_state_dict(pickle.loads(recovery.snapshot.state), trust=True)
    tracker = collector.parts.weights.tracker
    receivers, collector.parts.weights.receivers = collector.parts.weights.receivers, {}
    try:
        for index, batch in enumerate(recovery.batches):
            for weights in recovery.weights_before(index):
                collector.parts.weights.models.prepare(POLICY, weights)()
            if collector.normalization is not None:
                collector.normalization.load(batch.normalization)
            if tracker is not None and batch.version is not None:
                tracker.version = batch.version
            collector.parts.turns.run_into(None, batch.random, _stop_after(batch.steps))
            collector.parts.figures.count(batch.frames)
            collector.parts.budget.count(batch.frames)
    finally:
        collector.parts.weights.receivers = receivers
    # The driver has the times and the episodes of these batches already.
    collector.parts.loop.rollout.times = LoopTimes()
    if collector.normalization is not None:
        collector.normalization.pop_delta()
    policy = receivers.get(POLICY)
    if policy is not None and policy.newer:
        # The policy may have changed its own buffers since it loaded the newest weights.
        collector.parts.weights.receive(POLICY, policy, known=recovery.updates)


def _stop_after(steps: int) -> Callable[[], bool]:
    """Returns a function that counts its calls, one per step, and returns True at ``steps``."""
    taken = count(1)
    return lambda: next(taken) >= steps
