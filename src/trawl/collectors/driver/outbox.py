"""Batches on their way from the collection to the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from tensordict import TensorDictBase

from trawl.collectors.config import CollectorConfig
from trawl.collectors.driver.budget import FrameBudget
from trawl.collectors.driver.delivery import BatchDelivery
from trawl.collectors.driver.lifetime import Lifetime
from trawl.collectors.driver.trajectory_batcher import STATE, TrajectoryBatcher
from trawl.envs.capture.kinds import from_plain, to_plain

# Entry of a state: the batch that was complete, but not delivered, when Ctrl-C was pressed.
_KEPT = "kept"


class Collected(NamedTuple):
    """A batch that was collected, and is on its way to the user.

    Attributes:
        batch: the batch.
        filled: number of its steps that were taken; the rows after them are empty.
        frames: number of its frames.
        worker: number of the worker that made it; None without workers.
        order: number of the request for it.
        cut: ids of trajectories that failures ended before it. See
            :meth:`~trawl.rollout.episodes.EpisodeTracker.pop_cut`.
        alone: True for a step of a batch whose steps are written into the replay buffer alone.
        ends: True if it ends a batch, so that ``set_truncated`` concerns it.
    """

    batch: TensorDictBase
    filled: int
    frames: int
    worker: int | None = None
    order: float = math.inf
    cut: Collection[int] = ()
    alone: bool = False
    ends: bool = True


class BatchOutbox:
    """Prepares batches for the user, and holds what is complete but not delivered yet.

    Args:
        config: options of the collector.
        lifetime: the time in which the collector is open.
        budget: the collector's frames.
        whole: assembles frames into whole trajectories; None if batches are delivered.

    Attributes:
        delivery: applies the options that change batches, and writes them into the replay buffer.
        whole: see above.
        kept: the batch, if any, that was complete when Ctrl-C was pressed.
        hook: function that is called with each batch that is delivered or written; None for no
            function.
        writing: function that returns the context for writing a batch into the replay buffer. Its
            argument is the number of frames in the batch.
    """

    delivery: BatchDelivery

    def __init__(
        self,
        config: CollectorConfig,
        lifetime: Lifetime,
        budget: FrameBudget,
        whole: TrajectoryBatcher | None,
    ) -> None:
        self._config, self._lifetime, self._budget, self.whole = config, lifetime, budget, whole
        self.kept: list[Any] = []
        self.hook: Callable[[Any], Any] | None = None
        self.writing: Callable[[int], AbstractContextManager[Any]] = nullcontext

    @property
    def waiting(self) -> bool:
        """True if a batch is ready to be delivered."""
        whole = self.whole is not None and self.whole.ready and not self._lifetime.closed
        return bool(self.kept) or whole

    def pop_kept(self) -> list[Any]:
        """Returns :attr:`kept`, and empties it."""
        found, self.kept = self.kept, []
        return found

    # --- delivery

    def take(self, collected: Iterable[Collected], counted: bool) -> Any:
        """Passes on what was collected: all batches come this way.

        Batches are assembled into whole trajectories, or written into the replay buffer, or
        delivered; then they go to the sink and to the hook.

        Args:
            collected: one batch to deliver, or the batches or steps to write or to assemble.
            counted: True if the budget counts them already; otherwise they are counted before they
                go to the sink.

        Returns:
            What iteration yields; None if nothing is delivered by this call.
        """
        if self.whole is not None:
            parts = list(collected)
            self._assemble(self.whole, parts)
            if not counted:
                self._budget.count(sum(one.frames for one in parts), 0)
            return None
        batch = None
        for one in collected:
            batch = self.delivery.deliver(one.batch, one.filled, one.alone, one.ends)
            self._write(batch, one.frames, one.alone)
            if not counted:
                self._budget.count(one.frames, 0 if one.alone else 1)
            self._release(batch)
        return None if self._buffered else batch

    def take_whole(self, whole: TrajectoryBatcher) -> Any:
        """Passes on whole trajectories, whose frames are counted: one batch, or all of a turn.

        Returns:
            The batch; None if all whole trajectories are written into the replay buffer.
        """
        batch = None
        for group in whole.groups() if self._buffered else [whole.pop_batch()]:
            batch = self.delivery.deliver_whole(group)
            self._write(batch, group.shape.numel())
            if not self._buffered:
                self._budget.count(0)
            self._release(batch)
        if self._buffered:
            self._budget.count(0)
        return None if self._buffered else batch

    def _assemble(self, whole: TrajectoryBatcher, collected: Sequence[Collected]) -> None:
        for one in collected:
            whole.end(one.cut, one.order)
        whole.add(
            (env if one.worker is None else (one.worker, env), one.order, frames)
            for one in collected
            for env, frames in self.delivery.by_source(self.delivery.frames(one.batch, one.filled))
        )

    @property
    def _buffered(self) -> bool:
        return self._config.replay_buffer is not None

    def _write(self, batch: Any, frames: int, alone: bool = False) -> None:
        """Writes a batch into the replay buffer, if there is one."""
        if self._buffered:
            with self.writing(frames):
                written = self.delivery.write(batch, frames, alone)
                self._budget.own.replay_written_frames += written

    def _release(self, batch: Any) -> None:
        """Hands a batch, when it is delivered or written, to the sink and to the hook."""
        if self._config.sink is not None:
            self._config.sink.write(batch)
        if self.hook is not None:
            self.hook(batch)

    def fake(self, batch: TensorDictBase) -> Any:
        """Returns a batch of zeros in the form in which batches are delivered."""
        if self.whole is None:
            return self.delivery.process(batch, batch.shape[-1])
        frames = self.delivery.frames(batch, batch.shape[-1])
        return self.delivery.processed(self.whole.template(frames, self._buffered))

    def close(self) -> None:
        """Closes the sink."""
        if self._config.sink is not None:
            enough = self._config.endless or self._budget.is_complete
            self._config.sink.close(complete=enough and not self._lifetime.failed)

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of ``postproc``, and what has been collected but not delivered yet.

        Raises:
            TypeError: if Ctrl-C has kept a batch from its delivery that can't be part of a state.
        """
        found: dict[str, Any] = {} if self.whole is None else {STATE: self.whole.state_dict()}
        for batch in self.kept:
            if batch is not None and not isinstance(batch, TensorDictBase):
                raise TypeError(
                    "the state can't hold the batch that was under way when Ctrl-C was pressed, "
                    f"because postproc made a {type(batch).__name__} of it: call next() first"
                )
            found[_KEPT] = [None if batch is None else to_plain(batch.clone())]
        return {**found, **self.delivery.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], order: int, resumed: bool) -> None:
        """Restores what :meth:`state_dict` returned.

        Args:
            state: the state of the collector.
            order: number of the newest request; batches of later ones belong to new trajectories.
            resumed: True if the episodes of the state go on.
        """
        kept = state.get(_KEPT, ())
        self.kept = [None if batch is None else from_plain(batch) for batch in kept]
        self.delivery.load_state_dict(state)
        if self.whole is not None:
            self.whole.load_state_dict(state.get(STATE, {}), order, resumed)
