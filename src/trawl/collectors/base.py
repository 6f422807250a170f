"""Base class of all collectors: iteration, interrupts, the end, statistics."""

from __future__ import annotations

import atexit
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias
from weakref import WeakKeyDictionary, WeakMethod

from tensordict import TensorDictBase
from typing_extensions import Self

from trawl.checks import check_bool
from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.driver.access import Access
from trawl.collectors.driver.background import BackgroundCollection, CollectorClosed
from trawl.collectors.driver.budget import FrameBudget
from trawl.collectors.driver.checkpoints import Checkpoints, Mismatch
from trawl.collectors.driver.lifetime import Lifetime
from trawl.collectors.driver.outbox import BatchOutbox
from trawl.collectors.driver.parts import weak
from trawl.collectors.driver.policy_version import version_tracker
from trawl.collectors.driver.trajectory_batcher import TrajectoryBatcher
from trawl.collectors.face import CollectorParts, Parts
from trawl.collectors.options import one_of, recorded
from trawl.collectors.torchrl import register_collectors
from trawl.collectors.watch.figures import Figures
from trawl.collectors.watch.profile import Profiling
from trawl.collectors.watch.timeline import Tracing
from trawl.collectors.watch.watching import Watch
from trawl.data.sinks.base import Sink
from trawl.interrupts import DeferredInterrupt, check_interrupt, is_deferred
from trawl.observe.trace_options import TraceOptions
from trawl.polling import is_polling

#: Which statistics ``stats()`` returns.
View = Literal["aggregate", "per_worker", "both"]
_check_view = one_of("aggregate", "per_worker", "both")
# None at the end of a run: loops that know how many batches come need no check for it.
MaybeNone: TypeAlias = Any

# Open collectors, each with the process that made it. An exit handler closes them: closing a sink
# makes tensors, which aborts the process once the interpreter has begun to shut down.
_living: WeakKeyDictionary[BaseCollector, int] = WeakKeyDictionary()


@atexit.register
def _close_all() -> None:
    for collector, owner in list(_living.items()):
        if owner == os.getpid():
            collector.shutdown(timeout=0, raise_on_error=False)


if TYPE_CHECKING:
    # The options are attributes as well: __getattr__ looks them up.
    OptionAttributes = CollectorConfig
else:
    OptionAttributes = object


class BaseCollector(CollectorParts, OptionAttributes):  # type: ignore[misc]  # see `trace`
    """Base class of all collectors, which produce batches of experience.

    A collector is an iterable of TensorDicts::

        with Collector(env, policy, frames_per_batch=1000, total_frames=100_000) as collector:
            for batch in collector:
                ...  # learn from it
                collector.update_policy_weights_()

    With a replay buffer, batches are written into the buffer, and iteration yields None for each
    batch. Type checkers see a TensorDict in either case. If ``Collector(backend=...)`` returns an
    instance of another class, type checkers still see a ``Collector``. To use attributes that only
    the other class has, call the constructor of that class.

    Each option is also an attribute: ``collector.total_frames``. A subclass collects a batch in
    ``_collect`` and releases its resources in ``_close``.
    """

    def __init__(self, config: CollectorConfig) -> None:
        register_collectors(BaseCollector)
        self.config = config
        self.parts = parts = self._new_parts()
        parts.lifetime = Lifetime()
        _living[self] = os.getpid()
        parts.budget = FrameBudget(config, parts.lifetime)
        parts.watch = Watch()
        parts.background = BackgroundCollection(
            f"{type(self).__name__}.start",
            config,
            parts.budget,
            parts.lifetime,
            WeakMethod(self._background_turn),
            weak(self._settle),
        )
        parts.access = self._new_access()
        parts.checkpoints = Checkpoints(
            parts.lifetime,
            parts.background.held,
            weak(self.state_dict),
            weak(self.load_state_dict),
        )
        whole = self._new_whole(config) if config.whole_trajectories else None
        parts.outbox = BatchOutbox(config, parts.lifetime, parts.budget, whole)
        parts.profiling = self._new_profiling()
        parts.figures = self._new_figures()
        parts.timeline = Tracing(parts.lifetime, parts.figures, parts.watch.resident)
        self.policy_version_tracker = version_tracker(config.track_policy_version)
        parts.timeline.versions = self.policy_version_tracker
        if isinstance(config.sink, Sink):
            config.sink.info |= recorded(config)
        if isinstance(config.trace, TraceOptions):
            self.parts.timeline.begin(config.trace)

    def _new_parts(self) -> Parts:
        return Parts()

    def _new_whole(self, config: CollectorConfig) -> TrajectoryBatcher:
        """Makes the object that assembles this collector's frames into whole trajectories."""
        return TrajectoryBatcher(config)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # If the constructor failed before it set config, self.config would recurse.
            config = self.__dict__.get("config")
            if config is not None and hasattr(config, name):
                return getattr(config, name)
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- methods that subclasses implement

    @abstractmethod
    def _collect(self) -> Any:
        """Collects a batch, counts it, and returns the value that iteration yields.

        With ``trajs_per_batch``, the method adds the batch's frames to the trajectories, counts the
        frames, and returns None.
        """

    @abstractmethod
    def _close(self, close_env: bool) -> None:
        """Releases environments, workers and memory."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which this or another collector can continue."""

    @abstractmethod
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        *,
        trust: bool = False,
        on_state_mismatch: Mismatch = "raise",
    ) -> None:
        """Restores a state that :meth:`state_dict` returned."""

    @abstractmethod
    def _new_figures(self) -> Figures:
        """Makes the part that has the figures of those who collect."""

    def _new_access(self) -> Access:
        return Access(self, self.parts.background)

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds environments, policy sampling and random actions, and resets the environments.

        Args:
            seed: a non-negative integer.
            static_seed: True to give all environments the same seed.

        Returns:
            A seed for a further environment (equal to ``seed`` if ``static_seed`` is True).
        """

    def _apply_seed(self) -> None:
        """Applies the option ``seed``; the last thing that a constructor does."""
        if self.config.seed is not None:
            self.set_seed(self.config.seed)

    # --- iteration and budget

    def __iter__(self) -> Iterator[TensorDictBase]:
        return self.iterator()

    def iterator(self) -> Iterator[TensorDictBase]:
        """Returns an iterator over batches, which ends when ``total_frames`` are reached.

        All iterators of a collector share one count of frames. With a replay buffer, batches are
        written into the buffer, and the iterator yields None for each batch.

        Raises:
            RuntimeError: if the collector was closed before ``total_frames`` were reached.
        """
        self._check_complete("iteration")
        if not self._has_batch():
            warn(
                f"the iteration ends at once: all {self.parts.budget.frames} frames of "
                "total_frames have been delivered already, and another collector would be needed "
                "for more"
            )
        return self._iterate()

    def _iterate(self) -> Iterator[TensorDictBase]:
        while found := self._take():
            batch = found[0]
            if batch is None and self.config.replay_buffer is None:
                # The budget ended before there were enough whole trajectories for a batch.
                return
            yield batch

    def next(self) -> TensorDictBase | MaybeNone:
        """Returns the next batch, or None if ``total_frames`` are reached.

        With a replay buffer, the batch is written into the buffer, and None is returned.

        If Ctrl-C is pressed meanwhile, ``KeyboardInterrupt`` is raised as soon as nothing is lost
        by it: between two steps, or while the call waits for workers. The next call then delivers
        the batch that was under way. If Ctrl-C is pressed again before that, it takes effect at
        once, and the collector is closed.

        Raises:
            RuntimeError: if the collector was closed before ``total_frames`` were reached.
        """
        self._check_complete("next()")
        found = self._take()
        return found[0] if found else None

    def _take(self) -> list[Any]:
        """Returns a list with the next batch; an empty list if there is none."""
        found: list[Any] = []
        interrupt = DeferredInterrupt()
        with interrupt, self.parts.background.held(), suppress(CollectorClosed):
            if self.parts.outbox.kept:
                found = self.parts.outbox.pop_kept()
            elif self._has_batch():
                found = [self._collect_or_close()]
        if interrupt.pending is not None:
            self.parts.outbox.kept = found
            raise interrupt.pending
        return found

    def _finish_interrupted(self) -> None:
        """Completes a batch that Ctrl-C has ended, and keeps it for the next call of ``next``."""
        if self._is_under_way():
            self.parts.outbox.kept = self._take()

    def _is_under_way(self) -> bool:
        """Returns True if Ctrl-C has ended a batch that the next call of ``next`` goes on with."""
        return False

    def _has_batch(self) -> bool:
        """Returns True if a batch is ready to be delivered, or frames are left to collect."""
        return self.parts.outbox.waiting or self.parts.budget.has_more()

    def _collect_or_close(self) -> Any:
        """Collects the next batch; if that fails, shuts the collector down.

        Returns:
            The batch; None if it was written into a replay buffer, or if no batch is left.
        """
        try:
            whole = self.parts.outbox.whole
            return self._collect_timed() if whole is None else self._collect_whole(whole)
        except BaseException as error:
            if is_deferred(error):
                raise
            self.parts.lifetime.failed = True
            if not isinstance(error, CollectorClosed):
                self.parts.lifetime.name_cause(error)
            # The user sees this error, even if closing fails as well.
            self.shutdown(raise_on_error=False)
            raise

    def _collect_timed(self) -> Any:
        """Collects a batch, and records the time that it took."""
        parts = self.parts
        clock, before = parts.watch.clock, parts.budget.frames
        parts.timeline.begin_turn()
        clock.begin()
        try:
            with parts.profiling.turn():
                return self._collect()
        finally:
            clock.end()
            frames = parts.budget.frames - before
            parts.watch.turns.add(clock, frames, parts.figures.pop_waited())
            parts.timeline.end_turn(clock, frames)
            parts.figures.end_turn(frames, parts.timeline.tracer)

    def _collect_whole(self, whole: TrajectoryBatcher) -> Any:
        """Collects batches until there are enough whole trajectories, and delivers them.

        With a replay buffer, the method collects one batch, and writes all whole trajectories to
        the buffer.
        """
        if self.config.replay_buffer is not None:
            self._collect_timed()
            return self.parts.outbox.take_whole(whole)
        while not whole.ready:
            if not self.parts.budget.has_more():
                if not self.closed:
                    whole.warn_if_undelivered(self.config.total_frames)
                return None
            check_interrupt()
            self._collect_timed()
        return self.parts.outbox.take_whole(whole)

    # --- the end

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Closes the collector; may be called any number of times.

        Args:
            timeout: seconds to wait for background collection to end; None to wait as long as it
                takes.
            close_env: True to close the environments.
            raise_on_error: True to raise errors that occur while closing.

        Raises:
            TimeoutError: if background collection does not end in time. In this case, nothing is
                closed.
            TypeError: if ``close_env`` or ``raise_on_error`` is a string.
        """
        check_bool("close_env", close_env)
        check_bool("raise_on_error", raise_on_error)
        if self.closed:
            return
        try:
            if self.parts.background.thread is not None:
                self.parts.background.thread.stop(timeout)
            # After an error in the background, the collector is closed already.
            if not self.closed:
                self.parts.lifetime.closed = True
                try:
                    self._close(close_env)
                finally:
                    self.parts.checkpoints.close()
                    try:
                        self.parts.outbox.close()
                    finally:
                        self._end_timeline()
        except Exception:
            if raise_on_error:
                raise
        finally:
            if self.closed:
                self._tell_closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.config.endless and exc_info[0] is not None:
            self.parts.lifetime.failed = True
        self.shutdown(raise_on_error=exc_info[0] is None)

    def __del__(self) -> None:
        # A constructor that failed leaves an object without `closed`.
        if not getattr(self, "closed", True):
            self.parts.access.belong_to(self)
            self.shutdown(timeout=0, raise_on_error=False)

    def _end_timeline(self) -> None:
        self.parts.timeline.close()

    def _tell_closed(self) -> None:
        """Calls the functions that were passed to :meth:`add_close_callback`."""
        self.parts.lifetime.tell(self)

    def _check_complete(self, what: str) -> None:
        """Raises an error if the collector was closed before ``total_frames`` were reached."""
        self.parts.background.check()
        if not self.parts.budget.is_complete:
            self.parts.lifetime.check_open(what)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} can't be pickled or copied, because it owns environments "
            "and workers: make one where it is needed, from create_env_fn, policy and options, "
            "and transfer the state with state_dict() and load_state_dict()"
        )

    # --- the background

    def _background_turn(self) -> bool:
        """Collects a batch in the background; returns True if more are left."""
        with suppress(CollectorClosed):
            if self.parts.budget.has_more():
                self._collect_or_close()
        return self.parts.background.count_turn()

    def _settle(self, timeout: float | None) -> None:
        """Waits for batches that workers are still collecting after the thread has paused."""

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Ends background collection after the current batch, and shuts the collector down.

        Args:
            timeout: seconds to wait for the current batch; None to wait as long as it takes.
            close_env: True to close the environments.

        Raises:
            TimeoutError: if the batch takes longer than ``timeout`` seconds. In this case, nothing
                is closed, and the method can be called again.
        """
        check_bool("close_env", close_env)
        thread = self.parts.background.thread
        if thread is not None:
            thread.stop(timeout)
        self.shutdown(timeout=timeout, close_env=close_env)
        self.parts.background.check()

    def _new_profiling(self) -> Profiling:
        return Profiling(self.config.worker_idx or 0, weak(self._check_unbegun))

    def _check_unbegun(self) -> None:
        self.parts.lifetime.check_open("enable_profile()")
        if self.parts.budget.batches or self.parts.background.is_running():
            raise RuntimeError("enable_profile() must be called before the first batch")

    # --- statistics

    def stats(self, workers: View = "aggregate") -> dict[str, Any]:
        """Returns statistics of the collector, as a flat dictionary.

        Args:
            workers: ``"aggregate"`` for the collector as a whole, ``"per_worker"`` for each
                worker, or ``"both"``. A collector without workers has no statistics of workers.

        Returns:
            A dictionary with the numbers of ``frames`` and ``batches`` delivered so far, and with
            ``requested_frames_per_batch``. If the number of frames is limited, the dictionary also
            has ``total_frames`` and ``completed``. If the policy version is tracked and is a
            number, the dictionary has ``policy_version``. With ``trajs_per_batch``, it has
            ``trajectories``, the number of trajectories delivered so far, and
            ``trajectories_waiting``, the number of whole trajectories that are not delivered yet.

            ``episodes`` is the number of episodes that have ended, and ``episode_return_mean`` and
            ``episode_length_mean`` are means over the last 100. ``batches_ready`` is the number of
            batches that are finished but not delivered, ``queue_depth`` the number of requests that
            workers have not answered, ``restarts`` the number of times that workers were replaced,
            and ``process_bytes`` the resident memory of this process.

            The entries of :class:`~trawl.collectors.driver.budget.FrameCounts` are included:
            ``stepped_frames``, ``trajectory_completed_frames``, ``completed_trajectories``,
            ``replay_written_frames`` and ``trajectory_pending_frames``. All but the last are
            part of the collector's state.

            From the first batch on, the dictionary has the rate ``frames_per_second`` over recent
            batches, and ``frames_per_second_overall`` since the first one. ``env_share``,
            ``policy_share``, ``overhead_share``, ``weights_share`` and ``idle_share`` divide the
            recent time of all workers, or of a collector without workers. ``learner_share``,
            ``wait_share`` and ``driver_share`` divide the recent time of the thread that takes
            batches: outside of the collector, waiting for a batch, and in other work of the
            collector. The same names with ``_seconds`` give the seconds since the first batch.

        Raises:
            ValueError: if ``workers`` has another value.
        """
        _check_view("workers", workers)
        facts = {} if workers == "per_worker" else self._aggregate()
        return facts if workers == "aggregate" else facts | self.parts.figures.per_worker()

    def _aggregate(self) -> dict[str, Any]:
        """Returns the statistics of the collector as a whole."""
        # A monitor must not take the error away from the learner.
        parts = self.parts
        if not is_polling():
            parts.background.check()
        facts: dict[str, Any] = {
            **parts.budget.stats(),
            "restarts": 0,
            "batches_ready": parts.figures.batches_ready,
            "queue_depth": parts.figures.queue_depth,
            **parts.watch.stats(parts.figures.shares),
            **parts.budget.limits(),
        }
        if isinstance(self.policy_version, int):
            facts["policy_version"] = self.policy_version
        if parts.outbox.whole is not None:
            facts |= parts.outbox.whole.stats()
        return facts | parts.figures.aggregate()
