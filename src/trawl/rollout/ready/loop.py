"""The inner loop for environments that step each at its own pace.

Until the batch is full, the loop waits for ready environments, records their frames, and begins
their next steps with the policy's actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

from tensordict.nn import InteractionType
from typing_extensions import override

from trawl.interrupts import check_interrupt
from trawl.rollout.batches import BatchOptions
from trawl.rollout.loop import Rollout, note_failure
from trawl.rollout.policy.policy import Policy
from trawl.rollout.ready.serving import ServingOptions, running_on
from trawl.rollout.ready.writer import ReadyBatchWriter


class ReadyRollout(Rollout):
    """Fills batches with the frames of environments that are ready.

    Args:
        env: a :class:`~trawl.envs.ParallelEnv`, or a :class:`~trawl.envs.GymEnv` around a pool.
        policy: the resolved policy.
        options: options of the batches.
        exploration: exploration type of probabilistic policies.
        serving: options for acting in environments that are ready.
        version: function that returns the policy's current version.
    """

    writer: ReadyBatchWriter
    stamps_frames = True

    def __init__(
        self,
        env: Any,
        policy: Policy,
        options: BatchOptions,
        exploration: InteractionType,
        serving: ServingOptions,
        version: Callable[[], int],
    ) -> None:
        self._serving, self._version = serving, version
        self._most = options.steps
        # True if an exception has ended the last batch.
        self._interrupted = False
        # Number of frames of a batch that Ctrl-C ended; None if there is no such batch.
        self._paused_at: int | None = None
        super().__init__(env, policy, options, exploration)

    @override
    def _new_writer(self, env: Any, policy: Policy) -> ReadyBatchWriter:
        return ReadyBatchWriter(env, policy, self.options, self._serving, self._version)

    @override
    def limit(self, frames: float) -> None:
        # After the budget is used up, the user may still ask for a batch.
        self._most = int(min(self.options.steps, frames if frames > 0 else math.inf))

    @override
    def settle(self) -> None:
        self.writer.settle()

    @property
    @override
    def paused(self) -> bool:
        return self._paused_at is not None

    @override
    def drop_paused(self) -> None:
        self._paused_at = None

    @override
    def _fill(self, random: bool, stopped: Callable[[], bool] | None) -> int:
        with running_on(self._serving.cores):
            return self._fill_here(random, stopped)

    def _fill_here(self, random: bool, stopped: Callable[[], bool] | None) -> int:
        writer, most = self.writer, self._most
        filled, self._paused_at = self._paused_at or 0, None
        began, waited = perf_counter(), writer.record.waited
        try:
            if self._interrupted:
                writer.recover()
            self._interrupted = True
            writer.bind_policy(random)
            while filled < most and not (stopped is not None and filled and stopped()):
                if self._pausing:
                    self._paused_at, self._interrupted = filled, False
                    check_interrupt()
                filled = writer.advance(filled, most)
        except Exception as error:
            note_failure(error, f"while collecting from {self.env!r}")
            raise
        self._interrupted = False
        waited = writer.record.waited - waited
        seconds = perf_counter() - began
        self.times.add(seconds, acting=seconds - waited)
        return filled
