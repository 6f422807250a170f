"""Collection of batches in the caller's process."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase
from typing_extensions import override

from trawl.collectors.config import CollectorConfig
from trawl.collectors.delivery import count_frames
from trawl.collectors.direct_weights import DirectWeights
from trawl.collectors.exact import first_frames
from trawl.collectors.first_ready import (
    VERSION,
    check_pool_options,
    new_ready_rollout,
    pool_batching,
    pool_of,
)
from trawl.collectors.policy_version import stamp
from trawl.collectors.times import WorkerTimes, shares_of
from trawl.collectors.tracer import LocalTracer, Tracer
from trawl.collectors.weak import weak
from trawl.observe.trace_options import TraceOptions
from trawl.rollout.batch_writer import BatchOptions
from trawl.rollout.block import Block
from trawl.rollout.episode_sums import EndedEpisodes
from trawl.rollout.loop import Rollout
from trawl.rollout.policy import Policy
from trawl.rollout.ready_loop import ReadyRollout
from trawl.rollout.serving import ServingOptions
from trawl.tensordicts import drop_private


class RolloutCollector(DirectWeights):
    """The part of a collector without workers that collects batches.

    Attributes:
        frames_per_batch: number of frames of each environment in a batch.
        acted_randomly: True if the actions of the last batch were random.
    """

    frames_per_batch: int
    acted_randomly = False
    _rollout: Rollout
    _resolved: Policy

    def __init__(self, config: CollectorConfig) -> None:
        super().__init__(config)
        self._at_start = True
        self._times = WorkerTimes()
        # Numbers of episodes, and of their frames, that are counted as progress already.
        self._counted = 0, 0
        self._in_turn = False
        # Random actions, when to stop, and the version of the policy, of the batch under way.
        self._begun: tuple[bool, Callable[[], bool] | None, int | str | None] = (False, None, None)
        # In a worker, the driver's decisions for a batch: random actions, and when to stop.
        self._ordered: tuple[bool, Callable[[], bool] | None] | None = None
        # Function that returns the context for writing a batch into the replay buffer. Its argument
        # is the number of frames in the batch.
        self._writing: Callable[[int], AbstractContextManager[None]] = _written_by_itself

    def _new_rollout(self, options: BatchOptions) -> Rollout:
        """Returns the inner loop of this collector."""
        pool = pool_of(self.env)
        if pool is not None:
            check_pool_options(self.config, self.env, pool)
            return self._new_ready_rollout(options, ServingOptions(pool_batching(pool), VERSION))
        return Rollout(self.env, self._resolved, options, self.config.exploration_type)

    def _new_ready_rollout(self, options: BatchOptions, serving: ServingOptions) -> ReadyRollout:
        serving = replace(serving, ends_idle=self.config.reset_at_each_iter)
        if self._version is None:
            serving = replace(serving, version_key=None)
        return new_ready_rollout(
            self.env,
            self._resolved,
            options,
            self.config.exploration_type,
            serving,
            weak(self._current_version),
        )

    @override
    def _set_frames_per_batch(self, environments: int) -> int:
        if not self._takes_first_ready:
            return super()._set_frames_per_batch(environments)
        self.requested_frames_per_batch = self.config.frames_per_batch
        return self.requested_frames_per_batch

    @property
    def _takes_first_ready(self) -> bool:
        """True if batches hold the frames of whichever environments are ready."""
        return pool_of(self.env) is not None

    @property
    @override
    def _is_exact(self) -> bool:
        return self.config.exact_frames or self._takes_first_ready

    @override
    def _note_turn(self, frames: int) -> None:
        times = self._clock.batch_times(self._rollout.times)
        self._times.add(times, frames)
        self._episodes.add(*self.count_steps(frames))
        super()._note_turn(frames)
        tracer = self._tracer
        if isinstance(tracer, LocalTracer):
            tracer.batch(times, frames, self._rollout.pop_steps())

    def count_steps(self, frames: int) -> EndedEpisodes:
        """Counts collected frames, and returns the episodes that have ended since the last call."""
        sums, progress = self._rollout.writer.sums, self._progress
        count, ended = self._counted
        self._counted = sums.count, sums.frames
        progress.stepped_frames += frames
        progress.completed_trajectories += sums.count - count
        progress.trajectory_completed_frames += sums.frames - ended
        progress.trajectory_pending_frames = sums.unfinished
        return sums.pop()

    @override
    def _pop_waited(self) -> float:
        # The driver thread collects the batch itself.
        return math.inf

    @override
    def _worker_shares(self) -> dict[str, Any]:
        return shares_of([self._times])

    @override
    def _new_tracer(self, options: TraceOptions) -> Tracer:
        return LocalTracer("trace", options)

    @override
    def _connect_tracer(self) -> None:
        # The constructor begins a timeline before it makes the inner loop.
        if "_rollout" in vars(self):
            self._rollout.record_steps(self._tracer is not None and self._tracer.samples_steps)

    @override
    def _counters(self) -> dict[str, float]:
        facts = self._rollout.writer.describe() if "_rollout" in vars(self) else {}
        names = {"batches_held": "batches held", "memory_bytes": "memory"}
        own = {names[name]: facts[name] for name in names if name in facts}
        return super()._counters() | own

    def rollout(self) -> TensorDictBase:
        """Collects a batch, without processing or counting it.

        Iteration, background collection and workers get their batches from this method, so a
        subclass can override it to change how a batch is collected. An override must return a
        batch whose last dimension is time; this dimension may have any length. During iteration
        with ``extend_buffer=False``, this method adds each step to the replay buffer and returns
        None.
        """
        self._check_open("rollout()")
        with self._held():
            if not self._in_turn:
                self._finish_interrupted()
            if not self._rollout.paused:
                self._prepare()
            if self._in_turn and self.config.adds_steps:
                return self._collect_steps()
            batch = self._run()
            if self._whole is not None and not self._in_turn:
                self._whole.end(self._rollout.writer.episodes.pop_cut())
                for source, frames in self._delivery.by_source(batch):
                    self._whole.miss(frames, source)
            if not self._in_turn:
                # These frames are not delivered, so their times and episodes are not counted.
                self._clock.batch_times(self._rollout.times)
                self.count_steps(count_frames(batch, self._rollout.filled))
            return batch

    def _turn(self) -> TensorDictBase | None:
        """Collects the next batch to deliver, by calling :meth:`rollout`.

        Returns:
            The batch; None if its steps were added to the replay buffer one by one.

        Raises:
            TypeError: if an override of :meth:`rollout` does not return a batch.
        """
        self._in_turn = True
        rollout = self._rollout
        overridden = overrides_rollout(self)
        if overridden:
            self._delivery.expect(None)
        # An override of rollout() may lose what it has, and single steps are batches of their own.
        rollout.may_pause = not (overridden or self.config.adds_steps)
        # Rows stay empty only if a batch of the usual length is interrupted.
        rollout.filled = self.frames_per_batch
        try:
            batch: Any = self.rollout()
        finally:
            self._in_turn = rollout.may_pause = False
        if batch is None and self.config.adds_steps:
            return None
        if not isinstance(batch, TensorDictBase) or not batch.ndim:
            raise TypeError(
                f"{type(self).__name__}.rollout() must return the batch that it collected, a "
                f"TensorDict whose last dimension is time, but it returned {batch!r}"
            )
        if batch.shape[-1] != self.frames_per_batch:
            self._rollout.filled = batch.shape[-1]
        return batch

    @override
    def _drop_interrupted(self) -> None:
        super()._drop_interrupted()
        self._rollout.drop_paused()

    @override
    def _is_under_way(self) -> bool:
        return self._rollout.paused

    def _prepare(self) -> None:
        """Loads new weights; calls the hook and resets the environment if the options say so."""
        if self._receivers:
            before = perf_counter()
            self._load_new_weights()
            self._rollout.times.weights += perf_counter() - before
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        if self.config.reset_at_each_iter and not self._at_start:
            self._restart()

    def _restart(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        self._rollout.reset(mask, **kwargs)
        self._at_start = mask is None
        self._progress.trajectory_pending_frames = self._rollout.writer.sums.unfinished

    def _run(self) -> TensorDictBase:
        if not self._rollout.paused:
            # A batch has the version at its start, even if another thread advances it later.
            version = None if self._version is None else self._version.version
            self._at_start = False
            in_turn = self._in_turn or self._takes_first_ready
            self._rollout.limit(self._left() if in_turn else math.inf)
            random, stopped = self._ordered or (self._is_random(), self._stopped())
            self.acted_randomly = random
            self._begun = random, stopped, version
        random, stopped, version = self._begun
        batch = self._rollout.run(random, stopped, not self.is_running())
        self._stamp(batch, version)
        return batch

    def _run_into(
        self, block: Block | None, random: bool, stopped: Callable[[], bool] | None
    ) -> TensorDictBase | None:
        """Collects a batch for a worker, which counts it and passes it on.

        Returns:
            None if the batch was written into ``block``, else the batch.
        """
        if overrides_rollout(self):
            self._ordered = random, stopped
            try:
                return self._turn()
            finally:
                self._ordered = None
        self._prepare()
        self._at_start = False
        self._rollout.limit(self._left())
        self.acted_randomly = random
        if block is None:
            return self._rollout.run(random, stopped)
        return self._rollout.run_into(block, random, stopped)

    def _stamp(self, batch: TensorDictBase, version: int | str | None) -> None:
        if version is not None and not self._rollout.stamps_frames:
            stamp(batch, version, after=not self.config.compact_obs)

    def _current_version(self) -> int:
        return 0 if self._version is None else int(self._version.version)

    def _is_random(self) -> bool:
        first = self.config.init_random_frames
        if not first:
            return False
        buffer = self.config.replay_buffer
        # The buffer may hold frames of other writers, and may count rows of several environments.
        seen = max(self._frames, getattr(buffer, "write_count", 0))
        return bool(seen < first)

    def _stopped(self) -> Callable[[], bool] | None:
        stop = self.config.interruptor
        if stop is None:
            return None
        return stop if callable(stop) else stop.collection_stopped

    def _collect(self) -> Any:
        batch, cut = self._turn(), self._rollout.writer.episodes.pop_cut()
        if batch is None:
            return None
        batch, filled, delivered = self._cut(batch, self._rollout.filled)
        if self._whole is not None:
            frames = self._delivery.by_source(self._delivery.frames(batch, filled))
            self._whole.end(cut)
            self._whole.add((source, math.inf, part) for source, part in frames)
            self._frames += delivered
            return None
        batch = self._delivery.deliver(batch, filled)
        if self.config.replay_buffer is not None:
            with self._writing(delivered):
                self._progress.replay_written_frames += self._delivery.write(batch, delivered)
        self._frames += delivered
        self._batches += 1
        self._record(batch)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return None if self.config.replay_buffer is not None else batch

    def _cut(self, batch: TensorDictBase, filled: int) -> tuple[TensorDictBase, int, int]:
        """Cuts a batch where the budget of frames ends.

        Returns:
            The batch, the number of its steps, and the number of its frames.
        """
        left = self._left()
        if left >= batch.numel():
            return batch, filled, self._delivery.count(batch, filled)
        batch = batch[..., :filled]
        if count_frames(batch, filled) > left:
            batch = first_frames(batch, int(left), self.config.set_truncated)
        filled = batch.shape[-1]
        return batch, filled, count_frames(batch, filled)

    @override
    def _note_whole(self, batch: Any) -> None:
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)

    def _collect_steps(self) -> Any:
        """Adds single steps to the replay buffer.

        The method returns when the batch is complete, the budget of frames is used up, or the
        interruptor stops collection.
        """
        stopped = self._stopped() or (lambda: False)
        last = False
        for t in range(self.frames_per_batch):
            step, _, frames = self._cut(self._run(), self._rollout.filled)
            last = t + 1 == self.frames_per_batch or not self._has_budget(frames) or stopped()
            if last and self.config.set_truncated:
                self._delivery.truncate_last(step, 1)
            frame = drop_private(self._delivery.written(self._delivery.stored(step)))
            # There is no frame if all environments spent the step on a reset, or failed.
            if self.env.batch_size:
                if frames:
                    self.config.replay_buffer.extend(frame)
            elif frames:
                frame = frame[0]
                self.config.replay_buffer.add(frame)
            self._frames += frames
            self._progress.replay_written_frames += frames
            if frames:
                self._record(frame)
            if self.post_collect_hook is not None:
                self.post_collect_hook(frame)
            if last:
                break
        self._batches += 1


def _written_by_itself(frames: int) -> AbstractContextManager[None]:
    return nullcontext()


def overrides_rollout(collector: RolloutCollector) -> bool:
    """Returns True if the collector has a ``rollout()`` of its own."""
    own: Any = collector.rollout
    return getattr(own, "__func__", None) is not RolloutCollector.rollout
