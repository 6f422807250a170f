"""Batches of workers: when they are requested, and how the collector's batches are made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase

from trawl.backends.base import Backend
from trawl.collectors.driver.budget import FrameBudget
from trawl.collectors.driver.delivery import count_frames
from trawl.collectors.driver.exact import first_frames
from trawl.collectors.driver.outbox import BatchOutbox, Collected
from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.workers.assembler import BatchAssembler, WorkerBatch, limited
from trawl.collectors.workers.pool import WorkerPool
from trawl.collectors.workers.requests import WorkerReady
from trawl.collectors.workers.scheduler import (
    AsyncScheduler,
    Demand,
    Scheduler,
    SyncScheduler,
)
from trawl.collectors.workers.tracer import WorkerTracer
from trawl.collectors.workers.weights import WorkersWeights
from trawl.rollout.normalization import Normalization


class Gathering:
    """Requests batches from workers, and makes the collector's batches of them.

    Args:
        collector: the collector, to whose parts the object refers.
        backend: where the workers run.
        pool: the workers.
        at_once: number of batches that a worker makes at the same time.
        workers_write: True if workers write into the replay buffer themselves.

    Attributes:
        scheduler: decides when workers collect.
        assembler: makes one batch of those of the workers.
        workers_write: see above.
        demand: the frames that are wanted from workers.
        normalization: the statistics to which those of workers' frames are added; None if nothing
            is normalised.
    """

    assembler: BatchAssembler

    def __init__(
        self, collector: Any, backend: Backend, pool: WorkerPool, at_once: int, workers_write: bool
    ) -> None:
        self._config: MultiConfig = collector.config
        self._sync: bool = collector.sync
        self._budget: FrameBudget = collector.parts.budget
        self._backend, self._pool, self.workers_write = backend, pool, workers_write
        self._outbox: BatchOutbox = collector.parts.outbox
        self._watch, self._timeline = collector.parts.watch, collector.parts.timeline
        self._lifetime = collector.parts.lifetime
        self._weights: WorkersWeights = collector.parts.weights
        self.normalization: Normalization | None = None
        self._cut_ids: list[int] = []
        self.demand = Demand(self._config, self._budget, collector.parts.background)
        self.scheduler: Scheduler
        # The scheduler, if it is told to request the next batch, or why it can't be requested yet.
        self._looks_ahead: SyncScheduler | None = None
        if self._sync:
            threshold = self._config.preemptive_threshold
            self.scheduler = together = SyncScheduler(pool, threshold, self.demand)
            if self._config.prefetch or self._config.samples_per_insert is not None:
                self._looks_ahead = together
        else:
            self.scheduler = AsyncScheduler(pool, self._weights.bound, self.demand, at_once)

    def start(self, ready: Sequence[WorkerReady]) -> None:
        """Begins, or goes on with more workers.

        Args:
            ready: the first message of each worker.
        """
        config, budget, scheduler = self._config, self._budget, self.scheduler
        self._outbox.delivery.first_ready = any(one.first_ready for one in ready)
        self.assembler = BatchAssembler.of(config, self._sync, ready, self._backend)
        frames = [one.num_envs * one.steps for one in ready]
        budget.requested = sum(frames) if self._sync else max(frames)
        budget.at_once = 1 if self._sync else len(ready)
        # A batch that is cut in the middle of a row must be the last one, or the next batch would
        # not go on from there. So if batches may have fewer frames than requested, only whole rows
        # are requested as long as possible.
        scheduler.whole_steps = config.adds_steps and not config.exact_frames
        short = config.preempts or scheduler.whole_steps
        units = [one.num_envs if short or one.masked else 1 for one in ready]
        scheduler.set_workers(None if self.workers_write else self.assembler, frames, units)
        scheduler.normalization = self.normalization

    def pop_cut(self) -> Sequence[int]:
        """Returns the ids of trajectories that a failure has ended before the last batch.

        See :meth:`~trawl.rollout.episodes.EpisodeTracker.pop_cut`.
        """
        cut, self._cut_ids = self._cut_ids, []
        return cut

    # --- batches

    def collect(self) -> Any:
        """Collects a batch, counts it, and returns the value that iteration yields."""
        self._cut_ids = []
        scheduler = self.scheduler
        if not scheduler.requested:
            self._weights.before_request()
        collected = scheduler.collect()
        units = scheduler.units if scheduler.whole_steps else None
        parts = limited(collected, self._budget.left(), units)
        self._count(parts, 0 if self._outbox.whole is not None else 1)
        if self._looks_ahead is not None:
            self._look_ahead(self._looks_ahead, parts)
        self._weights.count_lags(parts)
        if self.workers_write:
            return None
        apart = self._outbox.whole is not None or self._config.replay_buffer is not None
        if apart or not self._sync:
            return self._outbox.take(map(self._taken, parts), counted=True)
        frames = sum(part.answer.frames for part in parts)
        batch = self._cut(self.assembler.assemble(parts), frames)
        return self._outbox.take([Collected(batch, batch.shape[-1], frames)], counted=True)

    def _look_ahead(self, scheduler: SyncScheduler, parts: Sequence[WorkerBatch]) -> None:
        """Requests the next batch, which workers collect while the learner uses these parts.

        Without ``prefetch=1``, or if no more is wanted yet, only the reason is noted.
        """
        sender, prefetch = self._weights.sender, self._config.prefetch
        if prefetch:
            sender.release()
            self._weights.before_request()
        if not scheduler.is_held(sum(part.answer.frames for part in parts)) and prefetch:
            # Later updates wait for the batch, so the weights don't depend on the workers' speed.
            sender.hold()
            scheduler.request_ahead()

    def _count(self, parts: Sequence[WorkerBatch], batches: int) -> None:
        """Counts workers' batches that are being delivered or have been written.

        Args:
            parts: the batches.
            batches: number of the collector's batches that they make.
        """
        self._budget.count(sum(part.answer.frames for part in parts), batches)
        for part in parts:
            self._watch.episodes.add(*part.answer.ended)
            self._cut_ids.extend(part.answer.cut)
            if self.normalization is not None:
                self.normalization.merge(part.answer.statistics)
        tracer = self._timeline.tracer
        if isinstance(tracer, WorkerTracer):
            tracer.delivered(parts)
        self._weights.note_batches(parts)

    def count_written(self) -> None:
        """Counts batches that workers wrote into the replay buffer and that are not counted yet."""
        rest = self.scheduler.pop_finished()
        if self.workers_write:
            self._count(rest, len(rest))
            self._weights.count_lags(rest)

    def settle(self, timeout: float | None) -> None:
        """Waits for the batches that workers are still collecting."""
        self._pool.settle(timeout)
        if self.workers_write:
            self.count_written()

    def _batch_of(self, part: WorkerBatch) -> TensorDictBase:
        """Returns a worker's batch."""
        batch = self.assembler.batch_of(part)
        if self._budget.exact or self._budget.most < math.inf:
            batch = self._cut(batch[..., : part.answer.filled], part.answer.frames)
        return batch

    def _cut(self, batch: TensorDictBase, frames: int) -> TensorDictBase:
        """Returns the first frames of a batch, if exactly ``total_frames`` are wanted."""
        last = self._budget.exact and not (self._lifetime.closed or self._budget.has_more())
        if last or count_frames(batch, batch.shape[-1]) > frames:
            return first_frames(batch, frames, self._config.set_truncated)
        return batch

    def _taken(self, part: WorkerBatch) -> Collected:
        """Returns a worker's batch, to pass on."""
        batch, answer = self._batch_of(part), part.answer
        filled = min(answer.filled, batch.shape[-1])
        return Collected(batch, filled, answer.frames, part.index, answer.number, answer.cut)
