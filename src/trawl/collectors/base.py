"""Base class of all collectors: iteration, budget, hooks, background thread, access by path."""

from __future__ import annotations

import atexit
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias
from weakref import WeakKeyDictionary

from tensordict import TensorDictBase
from torch.utils.data import IterableDataset
from typing_extensions import Self

from trawl.checks import check_bool
from trawl.collectors.access import CollectorAccess
from trawl.collectors.background import (
    Background,
    BackgroundCollector,
    CollectorClosed,
    RateLimiter,
)
from trawl.collectors.budget import FrameBudget, FrameCounts
from trawl.collectors.checkpointing import CheckpointedCollector
from trawl.collectors.closing import ClosingCollector
from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.delivery import BatchDelivery
from trawl.collectors.normalizing import NormalizingCollector, transform_facts
from trawl.collectors.options import one_of
from trawl.collectors.policy_version import version_tracker
from trawl.collectors.profile import ProfileConfig, ProfiledCollector, RolloutProfiler
from trawl.collectors.torchrl import register_collectors
from trawl.collectors.tracing import TracedCollector
from trawl.collectors.trajectory_batcher import STATE, TrajectoryBatcher
from trawl.collectors.weight_control import WeightControl
from trawl.data.sinks.base import Sink
from trawl.envs.capture.kinds import from_plain, to_plain
from trawl.envs.transforms import PolicyVersion
from trawl.interrupts import DeferredInterrupt, check_interrupt, is_deferred
from trawl.observe.trace_options import TraceOptions
from trawl.polling import is_polling

#: Which statistics ``stats()`` returns.
View = Literal["aggregate", "per_worker", "both"]
_check_view = one_of("aggregate", "per_worker", "both")
# Entry of a state: the batch that was complete, but not delivered, when Ctrl-C was pressed.
_KEPT = "kept"
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


class BaseCollector(  # type: ignore[misc]  # the option `trace` has a method of the same name
    FrameBudget,
    CollectorAccess,
    ProfiledCollector,
    TracedCollector,
    BackgroundCollector,
    WeightControl,
    CheckpointedCollector,
    NormalizingCollector,
    ClosingCollector,
    IterableDataset[Any],
    OptionAttributes,
):
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

    Attributes:
        config: the options.
        closed: True once the collector has been shut down.
    """

    config: CollectorConfig
    _delivery: BatchDelivery

    def __init__(self, config: CollectorConfig) -> None:
        register_collectors(BaseCollector)
        self.config = config
        self.closed = False
        self._init_closing()
        _living[self] = os.getpid()
        self.pre_collect_hook: Callable[[], Any] | None = config.pre_collect_hook
        self.post_collect_hook: Callable[[Any], Any] | None = config.post_collect_hook
        self._batches = 0
        self._progress = FrameCounts()
        self._failed = False
        # The batch, if any, that was complete when Ctrl-C was pressed.
        self._kept: list[Any] = []
        self._cause = ""  # the error that closed the collector, as the end of a message
        self._background: Background | None = None
        self._limiter: RateLimiter | None = None
        self.extra = {}
        self._lock = RLock()
        self._init_watching()
        self._profiler: RolloutProfiler | None = None
        self._profile_config: ProfileConfig | None = None
        self._receivers = {}
        self._weight_sync_schemes = {}
        self._receiver_schemes = {}
        self._updater = None
        self._version: PolicyVersion | None = version_tracker(config.track_policy_version)
        self._whole: TrajectoryBatcher | None = None
        if config.whole_trajectories:
            self._whole = self._new_whole(config)
        if isinstance(config.sink, Sink):
            config.sink.info |= transform_facts(config)
        if isinstance(config.trace, TraceOptions):
            self._begin_trace(config.trace)

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
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds environments, policy sampling and random actions, and resets the environments.

        Args:
            seed: a non-negative integer.
            static_seed: True to give all environments the same seed.

        Returns:
            A seed for a further environment (equal to ``seed`` if ``static_seed`` is True).
        """

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
                f"the iteration ends at once: all {self._frames} frames of total_frames have been "
                "delivered already, and another collector would be needed for more"
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
        with interrupt, self._held(), suppress(CollectorClosed):
            if self._kept:
                found, self._kept = self._kept, []
            elif self._has_batch():
                found = [self._collect_or_close()]
        if interrupt.pending is not None:
            self._kept = found
            raise interrupt.pending
        return found

    def _finish_interrupted(self) -> None:
        """Completes a batch that Ctrl-C has ended, and keeps it for the next call of ``next``."""
        if self._is_under_way():
            self._kept = self._take()

    def _drop_interrupted(self) -> None:
        """Drops a batch that was under way when Ctrl-C was pressed."""
        self._kept = []

    def _is_under_way(self) -> bool:
        """Returns True if Ctrl-C has ended a batch that the next call of ``next`` goes on with."""
        return False

    def _has_batch(self) -> bool:
        """Returns True if a batch is ready to be delivered, or frames are left to collect."""
        waits = self._whole is not None and self._whole.ready and not self.closed
        return bool(self._kept) or waits or self._has_budget()

    def _collect_or_close(self) -> Any:
        """Collects the next batch; if that fails, shuts the collector down.

        Returns:
            The batch; None if it was written into a replay buffer, or if no batch is left.
        """
        try:
            if self._whole is None:
                return self._collect_timed()
            return self._collect_whole(self._whole)
        except BaseException as error:
            if is_deferred(error):
                raise
            self._failed = True
            if not isinstance(error, CollectorClosed):
                # Only the first line: the text of a worker's error contains a traceback.
                self._cause = f" after {type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
            # The user sees this error, even if closing fails as well.
            self.shutdown(raise_on_error=False)
            raise

    def _collect_profiled(self) -> Any:
        if self._profiler is None:
            return self._collect()
        with self._profiler.turn():
            return self._collect()

    def _collect_whole(self, whole: TrajectoryBatcher) -> Any:
        """Collects batches until there are enough whole trajectories, and delivers them.

        With a replay buffer, the method collects one batch, and writes all whole trajectories to
        the buffer.
        """
        if self.config.replay_buffer is not None:
            self._collect_timed()
            for group in whole.groups():
                batch = self._delivery.deliver_whole(group)
                written = self._delivery.write(batch, group.shape.numel())
                self._progress.replay_written_frames += written
                self._record(batch)
                self._note_whole(batch)
            self._batches += 1
            return None
        while not whole.ready:
            if not self._has_budget():
                if not self.closed:
                    whole.warn_if_undelivered(self.config.total_frames)
                return None
            check_interrupt()
            self._collect_timed()
        batch = self._delivery.deliver_whole(whole.pop_batch())
        self._batches += 1
        self._record(batch)
        self._note_whole(batch)
        return batch

    def _note_whole(self, batch: Any) -> None:
        """Hook for subclasses, called with whole trajectories that are delivered or written."""

    def _fake(self, batch: TensorDictBase) -> Any:
        """Returns a batch of zeros in the form in which batches are delivered."""
        if self._whole is None:
            return self._delivery.process(batch, batch.shape[-1])
        frames = self._delivery.frames(batch, batch.shape[-1])
        buffer = self.config.replay_buffer is not None
        return self._delivery.processed(self._whole.template(frames, buffer))

    def _load_delivery(self, state: Mapping[str, Any], order: int, resumed: bool) -> None:
        """Restores what :meth:`_delivery_state` returned."""
        self._drop_interrupted()
        kept = state.get(_KEPT, ())
        self._kept = [None if batch is None else from_plain(batch) for batch in kept]
        self._delivery.load_state_dict(state)
        self._load_watch(state)
        if self._whole is not None:
            self._whole.load_state_dict(state.get(STATE, {}), order, resumed)

    def _delivery_state(self) -> dict[str, Any]:
        """Returns the state of ``postproc``, and what has been collected but not delivered yet.

        Raises:
            TypeError: if Ctrl-C has kept a batch from its delivery that can't be part of a state.
        """
        whole: dict[str, Any] = {} if self._whole is None else {STATE: self._whole.state_dict()}
        for batch in self._kept:
            if batch is not None and not isinstance(batch, TensorDictBase):
                raise TypeError(
                    "the state can't hold the batch that was under way when Ctrl-C was pressed, "
                    f"because postproc made a {type(batch).__name__} of it: call next() first"
                )
            whole[_KEPT] = [None if batch is None else to_plain(batch.clone())]
        return {**whole, **self._delivery.state_dict(), **self._watch_state()}

    def _record(self, batch: Any) -> None:
        """Writes a batch to the sink, when it is delivered or put into the replay buffer."""
        if self.config.sink is not None:
            self.config.sink.write(batch)

    def set_post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        """Sets the function that is called with each delivered batch; None removes it."""
        self.post_collect_hook = hook

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
            if self._background is not None:
                self._background.stop(timeout)
            # After an error in the background, the collector is closed already.
            if not self.closed:
                self.closed = True
                try:
                    self._close(close_env)
                finally:
                    self._close_checkpoints()
                    try:
                        self._close_sink()
                    finally:
                        self._end_trace()
        except Exception:
            if raise_on_error:
                raise
        finally:
            if self.closed:
                self._note_closed()

    def _close_sink(self) -> None:
        if self.config.sink is not None:
            enough = self.config.endless or self._frames >= self.config.total_frames
            self.config.sink.close(complete=enough and not self._failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.config.endless and exc_info[0] is not None:
            self._failed = True
        self.shutdown(raise_on_error=exc_info[0] is None)

    def __del__(self) -> None:
        # A constructor that failed leaves an object without `closed`.
        if not getattr(self, "closed", True):
            self.shutdown(timeout=0, raise_on_error=False)

    def _check_open(self, what: str) -> None:
        if self.closed:
            raise RuntimeError(f"{what} failed because the collector was shut down{self._cause}")

    def _check_complete(self, what: str) -> None:
        """Raises an error if the collector was closed before ``total_frames`` were reached."""
        if self._background is not None:
            self._background.check()
        if self.config.endless or self._frames < self.config.total_frames:
            self._check_open(what)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} can't be pickled or copied, because it owns environments "
            "and workers: make one where it is needed, from create_env_fn, policy and options, "
            "and transfer the state with state_dict() and load_state_dict()"
        )

    # --- versions

    @property
    def policy_version(self) -> int | str | None:
        """Version of the policy that collects; None if versions are not tracked."""
        return None if self._version is None else self._version.version

    def get_policy_version(self) -> int | str | None:
        """Returns :attr:`policy_version`."""
        return self.policy_version

    def increment_version(self) -> None:
        """Advances to the next version of the policy, if versions are tracked."""
        if self._version is not None:
            with self._held():
                self._version.increment_version()

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

            The entries of :class:`~trawl.collectors.budget.FrameCounts` are included:
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
        return facts if workers == "aggregate" else facts | self._per_worker()

    def _per_worker(self) -> dict[str, Any]:
        """Returns the statistics of each worker, and how many workers there are."""
        return {}

    def _aggregate(self) -> dict[str, Any]:
        """Returns the statistics of the collector as a whole."""
        # A monitor must not take the error away from the learner.
        if self._background is not None and not is_polling():
            self._background.check()
        facts: dict[str, Any] = {
            "frames": self._frames,
            "batches": self._batches,
            "requested_frames_per_batch": self.requested_frames_per_batch,
            **asdict(self.progress),
            **self._figures(),
        }
        if not self.config.endless:
            facts["total_frames"] = self.config.total_frames
            facts["completed"] = self._frames >= self.config.total_frames
        if isinstance(self.policy_version, int):
            facts["policy_version"] = self.policy_version
        if self._whole is not None:
            facts |= self._whole.stats()
        return facts
