"""Base class of all collectors with workers, wherever the workers run."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tensordict import TensorDictBase
from typing_extensions import override

from trawl.backends.base import Backend
from trawl.collectors.assembler import BatchAssembler, WorkerBatch
from trawl.collectors.budget import FrameCounts
from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.delivery import BatchDelivery, count_frames
from trawl.collectors.exact import first_frames, limited
from trawl.collectors.inference_service import is_service, use_service
from trawl.collectors.lag import Lags
from trawl.collectors.multi_config import WRITER_OPTIONS, check_names, sources
from trawl.collectors.normalizing import normalize_options
from trawl.collectors.pool import WorkerPool
from trawl.collectors.requests import WorkerReady
from trawl.collectors.scheduler import AsyncScheduler, Scheduler, SyncScheduler
from trawl.collectors.setups import WorkerSetups, packed_program, shared_buffer
from trawl.collectors.single import Collector
from trawl.collectors.slot import SlotLimits, WorkerSlot
from trawl.collectors.snapshots import kept_copies
from trawl.collectors.tracer import Tracer, WorkerTracer
from trawl.collectors.trajectory_batcher import TrajectoryBatcher
from trawl.collectors.unsent import UnsentWeights
from trawl.collectors.weak import weak
from trawl.collectors.worker import WorkerProgram, WorkerSpec, fake
from trawl.collectors.worker_shutdown import WorkerShutdown
from trawl.envs.build import distinct
from trawl.envs.own_process import parent_registry
from trawl.envs.seeding import derive
from trawl.envs.types import is_list
from trawl.observe.trace_options import TraceOptions
from trawl.rollout.normalization import Normalization
from trawl.supported import SINK_SHARED, UPDATE_WITHOUT_MODULE
from trawl.weight_update.messages import MessageWeightSyncScheme
from trawl.weight_update.prepared import PreparedUpdate
from trawl.weight_update.scheme import WeightSyncScheme
from trawl.weight_update.shared import SharedMemWeightSyncScheme


class WorkerCollector(WorkerShutdown):
    """A collector with workers, each of which runs a :class:`Collector`.

    A subclass defines where the workers run (``_new_backend``), and whether all workers contribute
    to each batch (``sync``).

    Attributes:
        num_workers: number of workers.
        create_env_fn: the source of each worker's environment.
        policy: the policy as it was given; workers have copies.
    """

    # True if all workers run on this machine.
    _workers_here: ClassVar[bool] = True
    num_workers: int
    _first_env = 0
    trust_policy: bool
    collector_class: Any

    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        name = type(self).__name__
        if more:
            raise TypeError(
                f"{name} takes at most 2 positional arguments (create_env_fn, policy), but got "
                f"{2 + len(more)}: pass the others by name"
            )
        check_names(name, options)
        self.create_env_fn = sources(create_env_fn, options.get("num_workers"))
        self.num_workers = len(self.create_env_fn)
        given = policy
        if is_service(policy):
            use_service(policy, self.num_workers, options)
            policy = None
        kwargs = self._share_options(options)
        self._setups = setups = WorkerSetups(
            self.create_env_fn, policy, options, self._workers_here
        )
        config = setups.config
        # A policy may be given in addition to a factory, as the source of weights.
        made = any(map(setups.makes_policy, range(self.num_workers)))
        sourced = made and policy is not None
        if sourced and not setups.all_modules:
            raise TypeError(
                "policy and policy_factory can both be given only if the policy is a module, whose "
                f"weights are sent to the workers' policies, but it is {policy!r}"
            )
        if sourced and config.weight_updater is not None:
            raise TypeError(
                "policy and policy_factory can't both be given together with a weight_updater: "
                "leave out the policy, and pass weights to update_policy_weights_()"
            )
        super().__init__(config)
        vars(self).update({name: tuple(values) for name, values in setups.given.items()})
        self.trust_policy = bool(config.trust_policy)
        self._check()
        self.policy = given
        setups.make(self.sync, kwargs, self._environments_of_worker)
        self._lags = Lags()
        self._cut_ids: list[int] = []
        self._waited = 0.0
        self._registry = parent_registry()
        self._backend = self._new_backend()
        self._weight_sync_schemes.update(config.weight_sync_schemes or {})
        self._sender = self._new_sender()
        self._sender.connect(self, self._new_scheme)
        if config.worker_snapshots:
            self._sender.on_sent = weak(self._keep_sent)
        limits = SlotLimits(config.max_restarts, config.max_total_restarts, config.worker_timeout)
        specify, note = weak(self._spec), weak(self._note_change)
        self._pool = WorkerPool(self._backend, specify, limits, note)
        try:
            self._prepare()
            self._sender.send_first()
            self._init_weights()
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise
        self._unsent: UnsentWeights | None = None
        # The user's weight updater may share memory with workers.
        if not (self._sends_by_itself or config.weight_updater):
            policies = setups.policies
            parts = 1 if self.sync else self.num_workers
            self._unsent = UnsentWeights(policies, parts, weak(self._count_updates))

    @override
    def _counts(self) -> FrameCounts:
        # This process counts the frames that it writes, and the workers count all others.
        return FrameCounts.total([self._progress, *(slot.progress for slot in self._pool.slots)])

    # --- methods for subclasses

    @abstractmethod
    def _new_backend(self) -> Backend:
        """Makes the backend, on which the workers run."""

    def _new_scheme(self) -> WeightSyncScheme:
        """Makes the weight-sync scheme that is used if the user gives none."""
        if self._backend.shares_memory:
            return SharedMemWeightSyncScheme()
        return MessageWeightSyncScheme()

    def _share_options(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Adds options that were given for the workers' collectors to ``options``.

        Returns:
            For each worker, the options that only its own collector gets.
        """
        return [{} for _ in range(self.num_workers)]

    @property
    def _worker_class(self) -> Any:
        """The class of the workers' collectors."""
        chosen = self.config.collector_class or Collector
        return getattr(chosen, "in_worker", chosen)

    @property
    def _environments_of_worker(self) -> int:
        """Number of copies of its environment that each worker has."""
        return 1

    @property
    def _inner_workers(self) -> int:
        """Number of workers that a worker's collector has; 1 if the worker itself collects."""
        return 1

    @override
    def _new_whole(self, config: CollectorConfig) -> TrajectoryBatcher:
        return TrajectoryBatcher(config, self._inner_workers, self.num_workers)

    @override
    def _new_tracer(self, options: TraceOptions) -> Tracer:
        return WorkerTracer("trace", options, remote=not self._workers_here)

    def _note_parts(self, parts: Sequence[WorkerBatch]) -> None:
        """Hook for subclasses, which is called with the workers' batches when these are counted."""

    # --- construction

    def _check(self) -> None:
        """Checks options that depend on the kind of collector, or on the policies."""
        self.config.check_sync(self.sync)
        if self.config.update_at_each_batch and not self._has_source():
            raise UPDATE_WITHOUT_MODULE.error("update_at_each_batch")

    def _prepare(self) -> None:
        config = self.config
        storing = set(self.storing_device)
        self._delivery = BatchDelivery(config, storing.pop() if len(storing) == 1 else None, [])
        self._buffer = None
        if self._workers_write:
            if config.sink is not None:
                raise SINK_SHARED.error()
            self._buffer = self._buffer_of_workers()
        self._scheduler: Scheduler = (
            SyncScheduler(self._pool, config.preemptive_threshold, weak(self._room))
            if self.sync
            else AsyncScheduler(
                self._pool, self._lag_bound(), weak(self._room), self._batches_at_once
            )
        )
        ready = self._start_workers(self.num_workers)
        for text in dict.fromkeys(text for one in ready for text in one.warnings):
            warn(text)
        self._setups.warn_of_rounding(ready)
        self._warn_of_remainders()
        if config.storage_ndim > 1 and self._inner_workers == 1:
            for batch in self._all(fake):
                self._delivery.check_storage(batch)

    def _start_workers(self, count: int) -> list[WorkerReady]:
        """Starts workers; batches to which all workers contribute grow accordingly.

        Returns:
            The first message of each worker, old and new.
        """
        self._pool.add_workers(count)
        ready = [slot.ready for slot in self._pool.slots if slot.ready is not None]
        for index, one in enumerate(ready):
            self._sender.set_layouts(index, one.weight_layouts)
        self._delivery.first_ready = any(one.first_ready for one in ready)
        self._assembler = BatchAssembler.of(self.config, self.sync, ready, self._backend)
        frames = [one.num_envs * one.steps for one in ready]
        self.requested_frames_per_batch = sum(frames) if self.sync else max(frames)
        # A batch that is cut in the middle of a row must be the last one, or the next batch would
        # not go on from there. So if batches may have fewer frames than requested, only whole rows
        # are requested as long as possible.
        self._scheduler.whole_steps = self.config.adds_steps and not self.config.exact_frames
        short = self.config.preempts or self._scheduler.whole_steps
        units = [one.num_envs if short or one.masked else 1 for one in ready]
        assembler = None if self._workers_write else self._assembler
        self._scheduler.set_workers(assembler, frames, units)
        normalize = normalize_options(self.config)
        if self.normalization is None and normalize:
            self.normalization = Normalization(normalize, ready[0].statistics)
            self._scheduler.normalization = self.normalization
        self._connect_tracer()
        if callable(self.config.reset_kwargs):
            self.number_environments(self._first_env)
        return ready

    def _add_workers(
        self, create_env_fn: Any, policy: Any, kwargs: Sequence[dict[str, Any]], environments: int
    ) -> None:
        """Adds workers with the options of the first worker; called between two batches.

        Args:
            create_env_fn: a list with the environment of each new worker, or one environment for
                all new workers.
            policy: policy of the new workers; None for the first worker's policy.
            kwargs: for each new worker, the options that only its own collector gets.
            environments: number of copies of its environment that each new worker has.

        Raises:
            TypeError: if a weight-sync scheme has a fixed number of receivers.
        """
        self._sender.check_growth()
        self._catch_up()
        before = self.create_env_fn
        count = None if is_list(create_env_fn) else len(kwargs)
        found = distinct([*before, *sources(create_env_fn, count)])[len(before) :]
        for source, own in zip(found, kwargs, strict=True):
            self.create_env_fn.append(source)
            self._setups.add(source, policy, own, environments)
            self._sender.grow(policy)
        self.num_workers = self._setups.count
        self._start_workers(len(found))

    def _buffer_of_workers(self) -> Any:
        """Returns the replay buffer in the form that is sent to workers."""
        return shared_buffer(self.config.replay_buffer, self._setups, self._delivery)

    @property
    @override
    def _workers_write(self) -> bool:
        """True if workers themselves write into the replay buffer, which must then be shared."""
        shared = bool(getattr(self.config.replay_buffer, "shared", False))
        return self._backend.isolated and self.config.workers_can_write and shared

    def _program(self, index: int) -> WorkerProgram:
        """Returns what a worker gets from the user's program."""
        setup, config = self._setups[index], self.config
        options = self._setups.options(index)
        if self._buffer is not None:
            options |= {name: getattr(config, name) for name in WRITER_OPTIONS}
            options["replay_buffer"] = self._buffer
        source, count = setup.create_env_fn, setup.environments
        return WorkerProgram(
            init_fn=config.init_fn,
            policy=self._setups.initial_policy(index),
            collector_class=self._worker_class,
            create_env_fn=source if count == 1 else [source] * count,
            options=options,
            receivers=self._sender.receivers(index),
        )

    def _spec(self, slot: WorkerSlot) -> WorkerSpec:
        """Returns the current specification of a slot's worker."""
        index, config, setup = slot.index, self.config, self._setups[slot.index]
        program, hooks, receivers = setup.package, self._setups.hooks, None
        changed: dict[str, Any] = {}
        if program is None:
            made = self._program(index)
            program = packed_program(self._backend, made, index)
            # The learner changes its policy, but a replacement begins with the same one.
            if made.policy is not None:
                setup.package, setup.hooks = program, dict(hooks)
        else:
            changed = {name: hooks[name] for name in hooks if hooks[name] is not setup.hooks[name]}
            receivers = self._sender.receivers(index)
        begin, stride = self._setups.trajectories(index, slot.restarts, slot.trajectory)
        seed = setup.seed
        return WorkerSpec(
            index=index,
            program=program,
            options=changed,
            receivers=receivers,
            threads=config.num_sub_threads if self._backend.isolated else None,
            registry=self._registry,
            trajectory=begin,
            stride=stride,
            version=self._sender.versions[index],
            first_env=setup.first_env,
            begun=slot.begun,
            seed=None if seed is None else (derive(seed[0], "restart", slot.restarts), seed[1]),
            env_state=setup.env_state,
            given=self._sender.handed(index),
            whole=self._whole is not None,
            snapshots=config.worker_snapshots,
            recovery=slot.recovery,
        )

    def _keep_sent(self, updates: Sequence[PreparedUpdate], counts: Mapping[int, int]) -> None:
        """Keeps copies of weights, which replacements of workers may need."""
        slots = self._pool.slots
        if any(slot.snapshot is not None for slot in slots):
            for worker, sent in kept_copies(updates, counts):
                slots[worker].keep_sent(sent)

    # --- collecting

    def limit_batches(self, most: float) -> None:
        """Sets the number of batches that may be under way, with the one that is delivered next."""
        self._scheduler.most_batches = most

    def pop_cut(self) -> Sequence[int]:
        """Returns the ids of trajectories that a failure has ended before the last batch.

        See :meth:`~trawl.rollout.episodes.EpisodeTracker.pop_cut`.
        """
        cut, self._cut_ids = self._cut_ids, []
        return cut

    def _collect(self) -> Any:
        self._cut_ids = []
        if not self._scheduler.requested:
            self._before_request()
        collected = self._scheduler.collect(self._wanted, self._is_random)
        scheduler = self._scheduler
        parts = limited(collected, self._left(), scheduler.units if scheduler.whole_steps else None)
        self._count(parts)
        if self.config.prefetch:
            self._request_ahead(parts)
        self._count_lags(parts)
        if self._whole is not None:
            for part in parts:
                self._whole.end(part.answer.cut, part.answer.number)
            self._whole.add(
                ((part.index, env), part.answer.number, frames)
                for part in parts
                for env, frames in self._delivery.by_source(self._frames_of(part))
            )
            return None
        self._batches += 1
        if self.config.replay_buffer is not None:
            if not self._workers_write:
                self._write(parts)
            return None
        if self.sync:
            frames = sum(part.answer.frames for part in parts)
            batch = self._cut(self._assembler.assemble(parts), frames)
        else:
            batch = self._batch_of(parts[0])
        delivered = self._delivery.deliver(batch, batch.shape[-1])
        self._record(delivered)
        return delivered

    def _request_ahead(self, parts: Sequence[WorkerBatch]) -> None:
        """Requests the next batch, which workers collect while the learner uses these parts."""
        self._sender.release()
        self._before_request()
        # The buffer does not have these frames yet.
        ahead = self._scheduler.most_batches > 1
        if ahead and self._wanted(sum(part.answer.frames for part in parts)):
            # Later updates wait for the batch, so the weights don't depend on the workers' speed.
            self._sender.hold()
            self._scheduler.request_ahead(self._is_random())

    def _count(self, parts: Sequence[WorkerBatch]) -> None:
        """Counts the frames of batches that are being delivered or have been written."""
        for part in parts:
            self._frames += part.answer.frames
            self._episodes.add(*part.answer.ended)
            self._cut_ids.extend(part.answer.cut)
            if self.normalization is not None:
                self.normalization.merge(part.answer.statistics)
        tracer = self._tracer
        if isinstance(tracer, WorkerTracer):
            tracer.delivered(parts)
        self._note_parts(parts)

    @override
    def _count_written(self) -> None:
        if "_scheduler" in vars(self):
            rest = self._scheduler.pop_finished()
            if self._workers_write:
                self._count(rest)
                self._count_lags(rest)
                self._batches += len(rest)

    def _batch_of(self, part: WorkerBatch) -> TensorDictBase:
        """Returns a worker's batch."""
        batch = self._assembler.batch_of(part)
        if self._is_exact or self.most_frames < math.inf:
            batch = self._cut(batch[..., : part.answer.filled], part.answer.frames)
        return batch

    def _cut(self, batch: TensorDictBase, frames: int) -> TensorDictBase:
        """Returns the first frames of a batch, if exactly ``total_frames`` are wanted."""
        last = self._is_exact and not (self.closed or self._has_budget())
        if last or count_frames(batch, batch.shape[-1]) > frames:
            return first_frames(batch, frames, self.config.set_truncated)
        return batch

    def _frames_of(self, part: WorkerBatch) -> TensorDictBase:
        """Returns a worker's frames, from which trajectories are assembled."""
        batch = self._batch_of(part)
        return self._delivery.frames(batch, min(part.answer.filled, batch.shape[-1]))

    def _write(self, parts: Sequence[WorkerBatch]) -> None:
        """Writes the batch of each worker into the replay buffer, as the worker itself would."""
        for part in parts:
            batch = self._batch_of(part)
            batch = self._delivery.deliver(batch, min(part.answer.filled, batch.shape[-1]))
            written = self._delivery.write(batch, part.answer.frames)
            self._progress.replay_written_frames += written
            self._record(batch)

    @property
    @override
    def _is_exact(self) -> bool:
        return super()._is_exact or self.config.adds_steps

    def _room(self) -> float:
        """Returns the number of frames that may be requested, besides those under way."""
        room = self._left() - self._scheduler.frames_under_way
        random = self.config.init_random_frames
        if self.config.adds_steps and random and self._acted < random:
            # The policy acts from the step on that follows the last random one.
            room = min(room, random - self._acted)
        return room

    def _wanted(self, counted: int = 0) -> bool:
        """Returns True if more frames are wanted than are under way, or ``counted`` already."""
        under_way = self._scheduler.frames_under_way
        limiter = self._limiter if self.is_running() else None
        room = limiter is None or limiter.room(under_way + counted)
        return room and self._has_budget(under_way)

    @property
    @override
    def _frames_at_a_time(self) -> int:
        return self.requested_frames_per_batch * (1 if self.sync else self.num_workers)

    def _is_random(self) -> bool:
        first = self.config.init_random_frames
        if not first:
            return False
        return bool(self._acted < first)

    @property
    def _acted(self) -> int:
        """Number of frames that were written or requested, to compare with the random ones."""
        written = getattr(self.config.replay_buffer, "write_count", 0)
        return max(self._frames + self._scheduler.frames_under_way, written)
