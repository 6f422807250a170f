"""The turns in which a collector without workers collects its batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any
from weakref import ref

from tensordict import TensorDictBase

from trawl.collectors.config import CollectorConfig
from trawl.collectors.driver.budget import FrameBudget
from trawl.collectors.driver.delivery import count_frames
from trawl.collectors.driver.exact import first_frames
from trawl.collectors.driver.outbox import BatchOutbox, Collected
from trawl.collectors.driver.weights import CollectorWeights
from trawl.collectors.local.env_loop import EnvLoop
from trawl.collectors.watch.figures import RolloutFigures
from trawl.rollout.block import Block

# Random actions, and when to stop.
_Orders = tuple[bool, Callable[[], bool] | None]


class Turns:
    """Collects batches by the loop, counts them, and passes them on.

    Args:
        collector: the collector, to whose parts the object refers. Its ``rollout()`` collects the
            batches, and calls :meth:`rollout` unless a subclass overrides it.
        loop: the environment and its loop.
        steps: number of steps in a batch.
        any_ready: True if batches hold the frames of whichever environments are ready.
        overridden: function that returns True if the collector has a ``rollout()`` of its own.

    Attributes:
        acted_randomly: True if the actions of the last batch were random.
        active: True while a batch is collected that will be delivered.
    """

    def __init__(
        self,
        collector: Any,
        loop: EnvLoop,
        steps: int,
        any_ready: bool,
        overridden: Callable[[Any], bool],
    ) -> None:
        self._config: CollectorConfig = collector.config
        self._budget: FrameBudget = collector.parts.budget
        self._outbox: BatchOutbox = collector.parts.outbox
        self._figures: RolloutFigures = collector.parts.figures
        self._weights: CollectorWeights = collector.parts.weights
        self._background = collector.parts.background
        self._collector: Callable[[], Any] = ref(collector)
        self._loop, self._steps, self._any_ready = loop, steps, any_ready
        self._overridden = overridden
        self.acted_randomly = self.active = False
        # Random actions, when to stop, and the version of the policy, of the batch under way.
        self._begun: tuple[bool, Callable[[], bool] | None, int | str | None] = (False, None, None)
        # In a worker, the driver's decisions for a batch.
        self._ordered: _Orders | None = None

    # --- the usual rollout()

    def rollout(self) -> TensorDictBase | None:
        """Collects a batch, without processing or counting it.

        Returns:
            The batch; None if its steps were added to the replay buffer one by one.
        """
        if not self._loop.rollout.paused:
            self._prepare()
        if self.active:
            if self._config.adds_steps:
                self._collect_steps()
                return None
            return self._run()
        batch, whole = self._run(), self._outbox.whole
        if whole is not None:
            whole.end(self._loop.rollout.writer.episodes.pop_cut())
            for source, frames in self._outbox.delivery.by_source(batch):
                whole.miss(frames, source)
        self._figures.skip(count_frames(batch, self._loop.rollout.filled))
        return batch

    def _prepare(self) -> None:
        """Loads new weights; calls the hook and resets the environment if the options say so."""
        if self._weights.receivers:
            before = perf_counter()
            self._weights.load_new()
            self._loop.rollout.times.weights += perf_counter() - before
        if self._loop.hook is not None:
            self._loop.hook()
        if self._config.reset_at_each_iter and not self._loop.at_start:
            self._loop.restart()

    def _run(self) -> TensorDictBase:
        loop = self._loop
        if not loop.rollout.paused:
            # A batch has the version at its start, even if another thread advances it later.
            version = self._weights.version
            loop.at_start = False
            counted = self.active or self._any_ready
            loop.rollout.limit(self._budget.left() if counted else math.inf)
            random, stopped = self._ordered or (self._is_random(), self._stopped())
            self.acted_randomly = random
            self._begun = random, stopped, version
        random, stopped, version = self._begun
        batch = loop.rollout.run(random, stopped, not self._background.is_running())
        loop.stamp(batch, version)
        return batch

    def _is_random(self) -> bool:
        first = self._config.init_random_frames
        if not first:
            return False
        buffer = self._config.replay_buffer
        # The buffer may hold frames of other writers, and may count rows of several environments.
        seen = max(self._budget.frames, getattr(buffer, "write_count", 0))
        return bool(seen < first)

    def _stopped(self) -> Callable[[], bool] | None:
        stop = self._config.interruptor
        if stop is None:
            return None
        return stop if callable(stop) else stop.collection_stopped

    # --- turns

    def collect(self) -> Any:
        """Collects a batch, counts it, and returns the value that iteration yields."""
        batch, cut = self._turn(), self._loop.rollout.writer.episodes.pop_cut()
        if batch is None:
            return None
        batch, filled, frames = self._cut(batch, self._loop.rollout.filled)
        return self._outbox.take([Collected(batch, filled, frames, cut=cut)], counted=False)

    def run_into(
        self, block: Block | None, random: bool, stopped: Callable[[], bool] | None
    ) -> TensorDictBase | None:
        """Collects a batch for a worker, which counts it and passes it on.

        Args:
            block: memory for the batch; None to return it.
            random: True for random actions.
            stopped: function that returns True if the batch is to end early; None if it isn't.

        Returns:
            None if the batch was written into ``block``, else the batch.
        """
        if self._overridden(self._collector()):
            self._ordered = random, stopped
            try:
                return self._turn()
            finally:
                self._ordered = None
        rollout = self._loop.rollout
        self._prepare()
        self._loop.at_start = False
        rollout.limit(self._budget.left())
        self.acted_randomly = random
        if block is None:
            return rollout.run(random, stopped)
        return rollout.run_into(block, random, stopped)

    def _turn(self) -> TensorDictBase | None:
        """Collects the next batch to deliver, by calling the collector's ``rollout()``.

        Returns:
            The batch; None if its steps were added to the replay buffer one by one.

        Raises:
            TypeError: if an override of ``rollout()`` does not return a batch.
        """
        collector, rollout = self._collector(), self._loop.rollout
        self.active = True
        overridden = self._overridden(collector)
        if overridden:
            self._outbox.delivery.expect(None)
        # An override of rollout() may lose what it has, and single steps are batches of their own.
        rollout.may_pause = not (overridden or self._config.adds_steps)
        # Rows stay empty only if a batch of the usual length is interrupted.
        rollout.filled = self._steps
        try:
            batch: Any = collector.rollout()
        finally:
            self.active = rollout.may_pause = False
        if batch is None and self._config.adds_steps:
            return None
        if not isinstance(batch, TensorDictBase) or not batch.ndim:
            raise TypeError(
                f"{type(collector).__name__}.rollout() must return the batch that it collected, a "
                f"TensorDict whose last dimension is time, but it returned {batch!r}"
            )
        if batch.shape[-1] != self._steps:
            rollout.filled = batch.shape[-1]
        return batch

    def _cut(self, batch: TensorDictBase, filled: int) -> tuple[TensorDictBase, int, int]:
        """Cuts a batch where the budget of frames ends.

        Returns:
            The batch, the number of its steps, and the number of its frames.
        """
        left = self._budget.left()
        if left >= batch.numel():
            return batch, filled, self._outbox.delivery.count(batch, filled)
        batch = batch[..., :filled]
        if count_frames(batch, filled) > left:
            batch = first_frames(batch, int(left), self._config.set_truncated)
        filled = batch.shape[-1]
        return batch, filled, count_frames(batch, filled)

    def _collect_steps(self) -> None:
        """Adds single steps to the replay buffer.

        The method returns when the batch is complete, the budget of frames is used up, or the
        interruptor stops collection.
        """
        stopped = self._stopped() or (lambda: False)
        for t in range(self._steps):
            step, filled, frames = self._cut(self._run(), self._loop.rollout.filled)
            last = t + 1 == self._steps or not self._budget.has_more(frames) or stopped()
            # There is no frame if all environments spent the step on a reset, or failed.
            if frames:
                one = Collected(step, filled, frames, alone=True, ends=last)
                self._outbox.take([one], counted=False)
            if last:
                break
        self._budget.count(0)
