"""Base class of all collectors with workers, wherever the workers run."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from typing_extensions import override

from trawl.backends.base import Backend
from trawl.checks import check_bool
from trawl.collectors.base import BaseCollector, View
from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.driver.delivery import BatchDelivery
from trawl.collectors.driver.parts import of_part, weak
from trawl.collectors.driver.trajectory_batcher import TrajectoryBatcher
from trawl.collectors.face import Parts
from trawl.collectors.inference_service import is_service, use_service
from trawl.collectors.multi_config import MultiConfig, sources
from trawl.collectors.options import check_names
from trawl.collectors.single import Collector
from trawl.collectors.watch.profile import Profiling
from trawl.collectors.workers.access import WorkerCalls, WorkerEnv, WorkersAccess
from trawl.collectors.workers.control import WorkersControl, WorkersProfiling
from trawl.collectors.workers.figures import WorkersFigures
from trawl.collectors.workers.gathering import Gathering
from trawl.collectors.workers.pool import WorkerPool
from trawl.collectors.workers.requests import WorkerReady
from trawl.collectors.workers.service import fake
from trawl.collectors.workers.setups import WorkerSetups, shared_buffer
from trawl.collectors.workers.slot import SlotLimits
from trawl.collectors.workers.specs import WorkerSpecs
from trawl.collectors.workers.state import WorkersState
from trawl.collectors.workers.weights import WorkersWeights
from trawl.envs.build import distinct
from trawl.envs.types import is_list
from trawl.rollout.normalization import Normalization
from trawl.rollout.policy.kinds import refuse_class
from trawl.supported import SINK_SHARED, UPDATE_WITHOUT_MODULE, check
from trawl.weights.message_schemes import MessageWeightSyncScheme
from trawl.weights.scheme import WeightSyncScheme
from trawl.weights.shared import SharedMemWeightSyncScheme

if TYPE_CHECKING:
    OptionAttributes = MultiConfig
else:
    OptionAttributes = object


class WorkersParts(Parts):
    """The parts of a collector with workers.

    Attributes:
        calls: calls functions with the workers' collectors.
        control: seeds, resets and hooks of the workers.
        gathering: makes batches of those of the workers.
    """

    weights: WorkersWeights
    figures: WorkersFigures
    access: WorkersAccess
    state: WorkersState
    calls: WorkerCalls
    control: WorkersControl
    gathering: Gathering


class WorkerCollector(BaseCollector, OptionAttributes):  # type: ignore[misc]  # see BaseCollector
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
    _weights_class: ClassVar[type[WorkersWeights]] = WorkersWeights
    # True if exactly total_frames are always collected.
    _always_exact: ClassVar[bool] = False
    config: MultiConfig
    sync: bool
    num_workers: int
    trust_policy: bool
    parts: WorkersParts
    collector_class: Any

    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        self._check_given(policy, more, options)
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
        self.parts.budget.exact |= self._always_exact or config.adds_steps
        vars(self).update({name: tuple(values) for name, values in setups.given.items()})
        self.trust_policy = bool(config.trust_policy)
        self._check()
        self.policy = given
        setups.make(self.sync, kwargs, self._environments_of_worker)
        self._backend = self._new_backend()
        parts = self.parts
        parts.weights = weights = self._weights_class(
            self, setups, self._workers_write, self._update_every, self._batches_at_once == 1
        )
        weights.sender.connect(self, self._new_scheme)
        limits = SlotLimits(config.max_restarts, config.max_total_restarts, config.worker_timeout)
        self._specs, note = self._new_specs(), weak(weights.note_change)
        self._pool = pool = WorkerPool(self._backend, self._specs.spec, limits, note)
        if config.worker_snapshots:
            weights.sender.on_sent = weak(pool.keep_sent)
        weights.pool = parts.figures.pool = pool
        parts.figures.sender, parts.figures.lags = weights.sender, weights.lags
        parts.calls = WorkerCalls(parts.lifetime, parts.background, weights, pool)
        parts.access.calls = parts.calls
        parts.control = WorkersControl(self, setups, pool, parts.calls)
        # This process counts the frames that it writes, and the workers count all others.
        parts.budget.of_workers = lambda: [slot.progress for slot in pool.slots]
        try:
            self._prepare()
            weights.begin()
            self._apply_seed()
        except BaseException:
            self.shutdown(raise_on_error=False)
            raise

    def _check_given(self, policy: Any, more: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Checks what can be checked at once, before anything is started.

        Raises:
            TypeError: if an argument is unknown, missing, or given by position, or the policy is a
                class.
        """
        name = type(self).__name__
        if more:
            raise TypeError(
                f"{name} takes at most 2 positional arguments (create_env_fn, policy), but got "
                f"{2 + len(more)}: pass the others by name"
            )
        check({**options, "workers": True})
        check_names(name, options, MultiConfig)
        for one in policy if isinstance(policy, (list, tuple)) else [policy]:
            refuse_class(one)

    @override
    def _new_parts(self) -> WorkersParts:
        return WorkersParts()

    # --- methods for subclasses

    @property
    def _update_every(self) -> int | None:
        """Number of a worker's batches after which weights are sent to it; None if none are."""
        return None

    @abstractmethod
    def _new_backend(self) -> Backend:
        """Makes the backend, on which the workers run."""

    def _new_scheme(self) -> WeightSyncScheme:
        """Makes the weight-sync scheme that is used if the user gives none."""
        if self._backend.sends_descriptors:
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

    @property
    def _batches_at_once(self) -> int:
        """Number of batches that a worker makes at the same time."""
        return 1

    def _new_specs(self) -> WorkerSpecs:
        """Makes the part that specifies workers."""
        whole, sender = self.parts.outbox.whole is not None, self.parts.weights.sender
        return WorkerSpecs(
            self.config, self._setups, self._backend, sender, self._worker_class, whole
        )

    @override
    def _new_whole(self, config: CollectorConfig) -> TrajectoryBatcher:
        return TrajectoryBatcher(config, self._inner_workers, self.num_workers)

    @override
    def _new_figures(self) -> WorkersFigures:
        ahead = self._batches_at_once > 1
        return WorkersFigures(self.config, self.sync, ahead, remote=not self._workers_here)

    @override
    def _new_access(self) -> WorkersAccess:
        return WorkersAccess(self, self.parts.background, self.parts.lifetime)

    @override
    def _new_profiling(self) -> Profiling:
        return WorkersProfiling(weak(self._check_unbegun), self.parts.access)

    # --- construction

    @property
    def _has_source(self) -> bool:
        """True if there are weights to send when the user passes none."""
        return self.config.weight_updater is not None or self._setups.all_modules

    def _check(self) -> None:
        """Checks options that depend on the kind of collector, or on the policies."""
        self.config.check_sync(self.sync)
        if self.config.update_at_each_batch and not self._has_source:
            raise UPDATE_WITHOUT_MODULE.error("update_at_each_batch")

    def _prepare(self) -> None:
        config = self.config
        storing = set(self.storing_device)
        device = storing.pop() if len(storing) == 1 else None
        self.parts.outbox.delivery = BatchDelivery(config, device, [])
        if self._workers_write:
            if config.sink is not None:
                raise SINK_SHARED.error()
            self._specs.buffer = self._buffer_of_workers()
        self.parts.gathering = Gathering(
            self, self._backend, self._pool, self._batches_at_once, self._workers_write
        )
        self.parts.state = WorkersState(
            self, self._setups, self._pool, self.parts.calls, self.parts.gathering
        )
        ready = self._start_workers(self.num_workers)
        for text in dict.fromkeys(text for one in ready for text in one.warnings):
            warn(text)
        self._setups.warn_of_rounding(ready)
        self.parts.budget.warn_of_remainders()
        if config.storage_ndim > 1 and self._inner_workers == 1:
            for batch in self.parts.calls.all(fake):
                self.parts.outbox.delivery.check_storage(batch)

    def _start_workers(self, count: int) -> list[WorkerReady]:
        """Starts workers; batches to which all workers contribute grow accordingly.

        Returns:
            The first message of each worker, old and new.
        """
        self._pool.add_workers(count)
        ready = [slot.ready for slot in self._pool.slots if slot.ready is not None]
        for index, one in enumerate(ready):
            self.parts.weights.sender.set_layouts(index, one.weight_layouts)
        normalize = self.config.normalize
        gathering, figures = self.parts.gathering, self.parts.figures
        if gathering.normalization is None and normalize:
            gathering.normalization = Normalization(normalize, ready[0].statistics)
        figures.scheduler = gathering.scheduler
        # Before requests: new workers may be asked for their part of a batch that is under way.
        figures.connect(self.parts.timeline.tracer)
        gathering.start(ready)
        figures.assembler = gathering.assembler
        if callable(self.config.reset_kwargs):
            self.parts.control.number_environments(self.parts.control.first_env)
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
        self.parts.weights.sender.check_growth()
        self.parts.calls.catch_up()
        before = self.create_env_fn
        count = None if is_list(create_env_fn) else len(kwargs)
        found = distinct([*before, *sources(create_env_fn, count)])[len(before) :]
        for source, own in zip(found, kwargs, strict=True):
            self.create_env_fn.append(source)
            self._setups.add(source, policy, own, environments)
            self.parts.weights.sender.grow(policy)
        self.num_workers = self._setups.count
        self._start_workers(len(found))

    def _buffer_of_workers(self) -> Any:
        """Returns the replay buffer in the form that is sent to workers."""
        return shared_buffer(self.config.replay_buffer, self._setups, self.parts.outbox.delivery)

    @property
    def _workers_write(self) -> bool:
        """True if workers themselves write into the replay buffer, which must then be shared."""
        shared = bool(getattr(self.config.replay_buffer, "shared", False))
        return self._backend.isolated and self.config.workers_can_write and shared

    # --- batches

    @override
    def _collect(self) -> Any:
        return self.parts.gathering.collect()

    @override
    def _settle(self, timeout: float | None) -> None:
        self.parts.gathering.settle(timeout)

    def rollout(self) -> Any:
        """Raises ``NotImplementedError``: a collector with workers has no ``rollout()``."""
        raise NotImplementedError("a collector with workers has no rollout(): use next()")

    def fake_tensordict(self) -> Any:
        """Returns a batch of zeros with the layout of a delivered batch."""
        fakes = [one.clear_device_() for one in self.parts.calls.all(fake)]
        alone = self.parts.outbox.whole is not None or not self.sync
        tracker = self.parts.weights.tracker
        version = None if tracker is None else tracker.version
        assembler = self.parts.gathering.assembler
        batch = assembler.combine(fakes[:1] if alone else fakes, version)
        return self.parts.outbox.fake(batch[0] if alone and assembler.how == "stack" else batch)

    # --- control of the workers

    reset = of_part("control", WorkersControl.reset)
    set_seed = of_part("control", WorkersControl.set_seed)
    number_environments = of_part("control", WorkersControl.number_environments)
    worker_policy_versions = of_part("control", WorkersControl.worker_policy_versions)
    frames_per_batch_worker = of_part("control", WorkersControl.frames_per_batch_worker)
    get_distant_attr = of_part("access", WorkersAccess.get_distant_attr)
    get_cached_weights = of_part("weights", WorkersWeights.get_cached_weights)
    env_state_methods = of_part("state", WorkersState.env_state_methods)
    state_dict = of_part("state", WorkersState.state_dict)
    load_state_dict = of_part("state", WorkersState.load_state_dict)

    @property
    def env(self) -> WorkerEnv:
        """The environment of the first worker, as far as it can be used from this process."""
        self.parts.lifetime.check_open("env")
        # The object keeps the collector alive.
        return WorkerEnv(self._ask_first)

    def _ask_first(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self.parts.calls.first(function, *arguments)

    @property
    def policy_device(self) -> tuple[torch.device | None, ...]:  # type: ignore[override]
        """Device of each worker's policy; None if the policy stays where it was."""
        return tuple(setup.devices.policy for setup in self._setups)

    @property
    def env_device(self) -> tuple[torch.device | None, ...]:  # type: ignore[override]
        """Device of each worker's environment; None for no particular device."""
        return tuple(setup.devices.env for setup in self._setups)

    @property
    def storing_device(self) -> tuple[torch.device | None, ...]:  # type: ignore[override]
        """Device of each worker's batches; None for no particular device."""
        return tuple(setup.devices.storing for setup in self._setups)

    @property
    def pre_collect_hook(self) -> Any:
        """Function that each worker calls before it collects a batch."""
        return self.parts.control.hook("pre_collect_hook")

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Any) -> None:
        self.parts.control.set_hook("pre_collect_hook", hook)

    @property
    def post_collect_hook(self) -> Any:
        """Function that each worker calls with each batch that it has collected."""
        return self.parts.control.hook("post_collect_hook")

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Any) -> None:
        self.parts.control.set_hook("post_collect_hook", hook)

    @override
    def stats(self, workers: View = "aggregate") -> dict[str, Any]:
        """Returns statistics of the collector, as a flat dictionary.

        Besides the statistics of every collector, the dictionary contains:

        - ``workers`` and ``workers_alive``, the numbers of all workers and of living ones.
        - ``restarts``, the number of times that workers were replaced.
        - ``worker_frames``, the sum of ``worker_0/frames``, ``worker_1/frames`` and so on.
        - ``env_time_share``, the environment's share of the loop's time.
        - ``batches_held``, the number of batches that are still referred to, and
          ``memory_bytes``, the memory of these batches and of spare blocks.
        - ``schedule``, which is ``"synchronous"``, ``"prefetch"`` or ``"asynchronous"``.
        - For asynchronous collectors, with ``preemptive_threshold`` below 1 and with ``prefetch``,
          ``policy_lag_mean``, ``policy_lag_max``, and the number of frames with each lag, as
          ``policy_lag_0``, ``policy_lag_1`` and so on. The lag of a batch is the number of weight
          updates that were sent to its worker between the beginning of the batch and its delivery.
          Frames of random actions are left out.
        - With ``on_env_error="restart"``, ``env_restarts``, the number of times that an
          environment was rebuilt.

        The statistics of each worker are ``frames``, ``batches``, ``alive``, ``restarts``, and the
        other statistics of a ``Collector``. The numbers of delivered frames and batches include
        those of workers that were replaced. A worker sends its statistics with each batch, so the
        call doesn't wait for workers.

        Args:
            workers: ``"aggregate"`` for all workers together, ``"per_worker"`` for each worker
                (``worker_0/frames``, …), or ``"both"``.

        Raises:
            ValueError: if ``workers`` has another value.
        """
        return super().stats(workers)

    @override
    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        check_bool("close_env", close_env)
        thread = self.parts.background.thread
        if thread is not None and self._workers_write and not self.closed:
            deadline = None if timeout is None else time.monotonic() + timeout
            thread.stop(timeout)
            if not self.closed:
                # Workers finish the batches that they are writing.
                self.parts.gathering.settle(
                    None if deadline is None else deadline - time.monotonic()
                )
        super().async_shutdown(timeout, close_env)

    # --- the end

    def _count_written(self) -> None:
        """Counts what workers wrote into the replay buffer; the constructor may have failed."""
        if "gathering" in vars(self.parts):
            self.parts.gathering.count_written()

    @override
    def _end_timeline(self) -> None:
        # The timeline shows the last batches, too.
        self._count_written()
        super()._end_timeline()

    @override
    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Ends the workers; may be called any number of times.

        Args:
            timeout: seconds that workers have to close their environments before they are killed;
                None for a default of a few seconds.
            close_env: must be True: environments end with their workers.
            raise_on_error: True to raise errors that occur while closing.

        Raises:
            RuntimeError: if ``close_env`` is False.
            TypeError: if ``close_env`` or ``raise_on_error`` is a string.
        """
        check_bool("close_env", close_env)
        check_bool("raise_on_error", raise_on_error)
        if not close_env:
            raise RuntimeError(
                f"{type(self).__name__} can't shut down with close_env=False, because "
                "environments end with the workers that they live in"
            )
        self._closing_time = timeout
        try:
            thread = self.parts.background.thread
            if thread is not None and not self.closed:
                # The background thread waits for workers, and ends when they end.
                thread.request_stop()
                self._close(close_env)
        except Exception:
            if raise_on_error:
                raise
        finally:
            # If an environment raises an error while closing, the rest is still closed and counted.
            try:
                super().shutdown(timeout, close_env, raise_on_error)
            finally:
                self._count_written()

    @override
    def _tell_closed(self) -> None:
        # Whoever is told of the end sees all frames.
        self._count_written()
        super()._tell_closed()

    def __del__(self) -> None:
        # Workers get a few seconds to close their environments.
        if not getattr(self, "closed", True):
            self.parts.access.belong_to(self)
            self.shutdown(raise_on_error=False)

    def _close(self, close_env: bool) -> None:
        # The constructor may have failed.
        weights, pool = vars(self.parts).get("weights"), vars(self).get("_pool")
        try:
            if weights is not None:
                weights.close()
        finally:
            try:
                if pool is not None:
                    pool.close(self._closing_time)
            finally:
                if weights is not None:
                    weights.sender.close()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_workers={self.num_workers}, "
            f"frames_per_batch={self.parts.budget.requested}, "
            f"total_frames={self.config.total_frames})"
        )
