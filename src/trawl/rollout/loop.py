"""The inner loop, which steps an environment with a policy.

    for each row of the batch:
        act(row)     # the policy reads the row's observation and writes its actions
        step(row)    # the environment takes the actions, and writes the results

Everything that can be decided beforehand is decided when the two functions are bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from trawl.envs.generators import RandomStream, global_state, set_global_state
from trawl.envs.outcomes import MUST_RETURN
from trawl.envs.tensor_env import TensorEnv
from trawl.errors import add_note
from trawl.interrupts import check_interrupt, current_interrupt
from trawl.rollout.batches import ActFn, BatchOptions, StepFn
from trawl.rollout.block import Block
from trawl.rollout.policy.exploration import exploring
from trawl.rollout.policy.policy import Policy
from trawl.rollout.times import LoopTimes, StepRecorder, StepSamples, estimated_sum
from trawl.rollout.writers.batch_writer import BatchWriter
from trawl.rollout.writers.choosing import new_batch_writer

# Number of rows bound at a time, which limits the memory of the loop's lists of rows.
_CHUNK = 512
# Number of steps timed in each chunk: reading the clock is cheap, but not free.
_TIMED = 8


@dataclass
class _Chunk:
    """Steps of a batch that are bound to functions.

    Attributes:
        start: number of the first step in the batch.
        count: number of steps.
        act: function that calls the policy for a step; None if actions are random.
        step: function that steps the environment.
        done: number of steps taken.
    """

    start: int
    count: int
    act: ActFn | None
    step: StepFn
    done: int = 0


class Rollout:
    """Fills batches with the frames of a policy in an environment.

    The loop is independent of budgets, hooks and buffers, and runs in the same way in every kind
    of worker.

    Args:
        env: the environment, with the TensorDict interface.
        policy: the resolved policy.
        options: options of the batches.
        exploration: exploration type of probabilistic policies.

    Attributes:
        writer: the object that fills the batches.
        steps_done: number of steps that each environment has taken.
        filled: number of rows that were filled in the last batch.
        times: times of all batches, partly estimated from samples.
        stream: the collector's stream of random numbers; None to use the global generators.
        stamps_frames: True if each frame has the version of the policy that chose its action.
        may_pause: True if Ctrl-C may end :meth:`run` between two steps. The next call then goes on
            with the same batch.
    """

    stamps_frames = False
    # True if Ctrl-C may end a call of run() between two steps.
    may_pause = False

    def __init__(
        self, env: Any, policy: Policy, options: BatchOptions, exploration: InteractionType
    ) -> None:
        self.options = options
        self.exploration = exploration
        # The first call of the policy, which finds out what the policy writes, must use the same
        # exploration type as later calls.
        # The observations of the first reset need no gradients, as those of a batch.
        with torch.no_grad(), exploring(exploration):
            self.writer = self._new_writer(env, policy)
        self.steps_done = 0
        self._most_steps = options.steps
        self.filled = 0
        self.stream: RandomStream | None = None
        # Seconds of the policy in the timed steps of the current chunk.
        self._acts: list[float] = []
        self.times = LoopTimes()
        self._steps: StepRecorder | None = None
        # The steps that follow in the current chunk. Without them, the loop ends.
        self._ahead: tuple[list[int], ...] = ()
        self._paused: _Chunk | None = None

    @property
    def paused(self) -> bool:
        """True if Ctrl-C ended :meth:`run` before the batch was complete."""
        return self._paused is not None

    def drop_paused(self) -> None:
        """Drops the steps of a batch that Ctrl-C ended."""
        self._paused = None

    def _new_writer(self, env: Any, policy: Policy) -> BatchWriter:
        """Returns the fastest batch writer that the environment and the policy allow."""
        return new_batch_writer(env, policy, self.options)

    @property
    def env(self) -> Any:
        """The environment, which may be replaced after a failure."""
        return self.writer.env

    @property
    def generator_device(self) -> torch.device | None:
        """Device, besides the CPU, from whose generator the policy or the environment draws."""
        policy = self.writer.policy.device
        if isinstance(self.env, TensorEnv) and (policy is None or policy.type != "cuda"):
            return self.env.device
        return policy

    def limit(self, frames: float) -> None:
        """Sets the number of frames that are still wanted, before a batch is filled.

        The batch has as many steps as these frames need, but at least one.
        """
        self.writer.most_frames = frames
        self._most_steps = max(1, math.ceil(min(frames / self.writer.num_envs, self.options.steps)))

    def run(
        self,
        random: bool = False,
        stopped: Callable[[], bool] | None = None,
        alone: bool = True,
    ) -> TensorDictBase:
        """Fills a batch.

        Args:
            random: True to draw random actions instead of calling the policy.
            stopped: function that is called before each step of the batch except the first. If
                it returns True, the batch ends before this step.
            alone: True if no other thread draws random numbers while the batch is filled. The
                collector's own random stream is swapped into the global generators only if this
                is True.
        """
        batch = self._run(None, random, stopped, alone)
        assert batch is not None
        return batch

    def run_into(
        self, block: Block, random: bool, stopped: Callable[[], bool] | None
    ) -> TensorDictBase | None:
        """Fills a batch in the given memory.

        Returns:
            None if the batch is in ``block``; the batch itself if its layout differs from the
            layout of ``block``.
        """
        return self._run(block, random, stopped, alone=True)

    def _run(
        self,
        block: Block | None,
        random: bool,
        stopped: Callable[[], bool] | None,
        alone: bool,
    ) -> TensorDictBase | None:
        if self.options.restarts is not None:
            self.options.restarts.steps_done = self.steps_done
        self.writer.policy.alone = alone
        turn = self.stream.turn() if alone and self.stream is not None else nullcontext()
        try:
            with turn, torch.no_grad(), exploring(self.exploration):
                if not self.paused:
                    self.writer.begin(block)
                self.times.began = perf_counter()
                self.filled = self._fill(random, stopped)
                self.times.ended = perf_counter()
                batch = self._finish()
        except Exception:
            if not self.paused:  # else the next call goes on with the batch
                self.writer.abandon()
            raise
        self.steps_done += self.filled
        return batch

    def _finish(self) -> TensorDictBase | None:
        try:
            return self.writer.finish(self.filled)
        except ValueError as error:
            first = self.steps_done
            add_note(error, f"in a batch from {self.env!r} that began with its step {first}")
            raise

    def _fill(self, random: bool, stopped: Callable[[], bool] | None) -> int:
        steps = self._most_steps
        chunk, self._paused = self._paused or self._bound(0, random), None
        while True:
            before, first = perf_counter(), chunk.done
            self._acts.clear()
            self._run_chunk(chunk, stopped)
            # Calls of the policy take about the same time, unlike steps: a few of these reset
            # environments. So the policy's time is estimated, and the environment has the rest.
            done = chunk.done - first
            acting = 0.0 if chunk.act is None else estimated_sum(self._acts, done)
            self.times.add(perf_counter() - before, acting)
            if chunk.done < chunk.count:
                if self._pausing:
                    self._paused = chunk
                    check_interrupt()
                return chunk.start + chunk.done
            start = chunk.start + chunk.count
            if start >= steps:
                return steps
            chunk = self._bound(start, random)

    def _bound(self, start: int, random: bool) -> _Chunk:
        """Binds the functions of the next steps of the batch."""
        stop = min(start + _CHUNK, self._most_steps)
        before = perf_counter()
        act, step = self.writer.bind(start, stop, random)
        if act is None:
            # Binding has drawn random actions for the whole chunk.
            self.times.policy += perf_counter() - before
        return _Chunk(start, stop - start, act, step)

    @property
    def _pausing(self) -> bool:
        """True if Ctrl-C was pressed, and the batch is to be paused."""
        current = current_interrupt() if self.may_pause else None
        return current is not None and current.pending is not None

    def _pause(self) -> None:
        """Makes the loop end after the current step; called in a signal handler."""
        for steps in self._ahead:
            steps.clear()

    def _run_chunk(self, chunk: _Chunk, stopped: Callable[[], bool] | None) -> None:
        """Takes the steps of a chunk that are left, until something ends the loop."""
        act, step, start, t = chunk.act, chunk.step, chunk.start, chunk.done - 1
        timed = list(range(chunk.done, min(_TIMED, chunk.count)))
        rest = list(range(max(_TIMED, chunk.done), chunk.count))
        self._ahead = timed, rest
        interrupt = current_interrupt() if self.may_pause else None
        if interrupt is not None:
            interrupt.pauses(self._pause)
            if interrupt.pending is not None:
                self._pause()
        try:
            for t in timed:
                if stopped is not None and start + t and stopped():
                    t -= 1
                    rest.clear()
                    break
                self._timed(act, step, t)
            if stopped is not None:
                for t in rest:
                    if stopped():
                        t -= 1
                        break
                    if act is not None:
                        act(t)
                    step(t)
            elif act is None:
                for t in rest:
                    step(t)
            else:
                for t in rest:
                    act(t)
                    step(t)
            chunk.done = t + 1
        except Exception as error:
            number = self.steps_done + start + t
            note_failure(
                error, f"while collecting from {self.env!r}, at its step {number} (from 0)"
            )
            if isinstance(error, ValueError) and "unpack" in str(error):
                add_note(error, f"step {MUST_RETURN}")
            raise
        finally:
            if interrupt is not None:
                interrupt.pauses(None)

    def _timed(self, act: ActFn | None, step: StepFn, t: int) -> None:
        waited, before = self.writer.waited, perf_counter()
        if act is not None:
            act(t)
        between = perf_counter()
        step(t)
        # The policy has waited for environments that step in turn.
        waited = self.writer.waited - waited
        self._acts.append(between - before - waited)
        if self._steps is not None:
            self._steps.add(before, between - waited, perf_counter())

    def record_steps(self, on: bool) -> None:
        """Begins or ends to record the times of the steps that the loop times."""
        if on != (self._steps is not None):
            self._steps = StepRecorder() if on else None

    def pop_steps(self) -> StepSamples | None:
        """Returns the steps that were recorded since the last call; None if none are recorded."""
        return None if self._steps is None else self._steps.pop()

    def settle(self) -> None:
        """Waits until no environment is stepping, so that environments can be called."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next batch depends on, except environments and weights."""
        own = self.stream
        random = global_state(self.generator_device) if own is None else own.state_dict()
        return {
            "writer": self.writer.state_dict(),
            "random": random,
            "own_stream": own is not None,
            "steps_done": self.steps_done,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned, except random numbers.

        Raises:
            ValueError: if the state is one of other environments, or of another policy.
        """
        self.writer.load_state_dict(state["writer"])
        self.steps_done = state["steps_done"]

    def load_random_state(self, state: Mapping[str, Any]) -> None:
        """Restores the random numbers of a state that :meth:`state_dict` returned.

        If the collector was not seeded, it draws from the global generators, which are restored.
        """
        device = self.generator_device
        if not state["own_stream"]:
            self.stream = None
            set_global_state(state["random"], device)
            return
        self.stream = self.stream or RandomStream(0, device)
        self.stream.load_state_dict(state["random"])

    def reset(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        """Begins new trajectories in all environments, or where ``mask`` is True."""
        turn = nullcontext() if self.stream is None else self.stream.turn()
        with turn, torch.no_grad():
            self.writer.reset(mask, **kwargs)


def note_failure(error: Exception, note: str) -> None:
    """Adds a note to an error that was raised during collection.

    Raises:
        RuntimeError: instead of ``StopIteration``, which would end the user's loop as if all frames
            had been collected.
    """
    if isinstance(error, StopIteration):
        raise RuntimeError(f"the environment or the policy raised StopIteration {note}") from error
    add_note(error, note)
