"""Collectors whose workers are actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from trawl.backends.base import Backend
from trawl.checks import check_bool, check_number, check_seconds
from trawl.collectors.arguments import accepts, describe
from trawl.collectors.base import View
from trawl.collectors.driver.weights import OwnUpdater, Updater
from trawl.collectors.single import Collector
from trawl.collectors.workers.handle_calls import methods_of
from trawl.collectors.workers.weights import WorkersWeights
from trawl.envs.types import is_list
from trawl.extras.clusters.base import (
    ClusterArguments,
    ClusterCollector,
    ClusterOptions,
    each,
)
from trawl.extras.clusters.ray.backend import RayBackend, RayWorker
from trawl.extras.clusters.ray.cluster import (
    connect,
    disconnect,
    end_connection,
    with_defaults,
)
from trawl.extras.clusters.ray.weights import RayWeightSyncScheme
from trawl.extras.clusters.sharing import check_added
from trawl.supported import RAY_START
from trawl.weights.scheme import WeightSyncScheme


@dataclass(frozen=True, kw_only=True)
class RayOptions(ClusterOptions):
    """The options that only a :class:`RayCollector` has.

    Attributes:
        num_collectors: number of actors, if ``create_env_fn`` is not a list.
        ray_init_config: arguments of ``ray.init``, for a process that is not connected to Ray yet.
        remote_configs: options of the actors (``num_cpus``, ``num_gpus``, ``memory``,
            ``resources``, …): one mapping for all actors, or a list.
        placement_timeout: seconds that an actor may wait for its resources; None for no limit.
        use_env_creator: accepted for compatibility, but has no effect.
    """

    num_collectors: int | None = None
    ray_init_config: Mapping[str, Any] | None = None
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    placement_timeout: float | None = 30.0
    use_env_creator: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_collectors is not None:
            check_number("num_collectors", self.num_collectors, 1)
        wait = self.placement_timeout
        if wait is not None and not check_seconds("placement_timeout", wait) > 0:
            raise ValueError(
                f"placement_timeout must be a number of seconds above 0, but it is {wait!r}"
            )

    def remote(self, count: int) -> list[dict[str, Any]]:
        """Returns the options of each of ``count`` actors."""
        return [with_defaults(own) for own in each("remote_configs", self.remote_configs, count)]


@dataclass(frozen=True)
class RayArguments(RayOptions, ClusterArguments):
    """The arguments of a :class:`RayCollector`.

    Raises:
        RuntimeError: if the cluster still has no room for the actors after ``placement_timeout``.
    """


class RayWeights(WorkersWeights):
    """The weights of a collector whose workers are actors."""

    @override
    def reached(self, updater: Updater) -> Sequence[int] | None:
        ours = isinstance(updater, OwnUpdater)
        if not ours or getattr(updater, "remote_collectors", None):
            # Batches that are requested from now on use the weights that were sent to handles.
            for slot in self.pool.slots:
                if isinstance(slot.worker, RayWorker):
                    slot.worker.await_calls()
        # TorchRL's updaters send weights to handles, and the workers report the loaded weights.
        return super().reached(updater) if ours else []


@describe(RayArguments)
class RayCollector(ClusterCollector):
    """Collects experience in the actors of a Ray cluster, on any of its nodes.

    With ``sync=True``, all actors contribute to each batch, as with a
    :class:`~trawl.collectors.MultiSyncCollector`. Otherwise, each batch comes from one actor, and
    batches are delivered in the order in which they are finished. Batches arrive in Ray's object
    store, and are read in the store's memory.

    If this process is not connected to a cluster, it joins the cluster that ``ray_init_config`` or
    ``RAY_ADDRESS`` names, or that ``ray start`` has started on this machine. If there is no
    cluster, the process starts one on this machine.

    Args:
        **options: options of the collector, which these classes document:
            :class:`~trawl.extras.clusters.ray.collector.RayOptions`,
            :class:`~trawl.extras.clusters.base.ClusterOptions` and
            :class:`~trawl.collectors.MultiConfig`.
    """

    _weights_class = RayWeights
    remote: RayOptions
    _options = RayOptions

    @accepts(RayArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        self._take_options(options)
        count = options.pop("num_workers", None)
        if count is not None and self.remote.num_collectors not in (None, count):
            raise ValueError(
                f"num_workers={count} and num_collectors={self.remote.num_collectors} are two "
                "names of the same option: pass only one of them"
            )
        if self.remote.num_collectors is not None or count is not None:
            options["num_workers"] = self.remote.num_collectors or count
        if options.get("start_method") is not None:
            raise RAY_START.error("start_method", options["start_method"])
        # A cluster takes seconds to start.
        self._check_given(policy, more, options)
        started = connect(self.remote.ray_init_config)
        try:
            super().__init__(create_env_fn, policy, *more, **options)
            self._warn_of_random_frames()
        except BaseException:
            if started:
                disconnect()
            raise

    # --- where workers run

    @override
    def _new_backend(self) -> Backend:
        self._remote = self.remote.remote(self.num_workers)
        kind = self.remote.kind
        return RayBackend(
            self._remote,
            self.remote.placement_timeout,
            in_step=self.sync,
            methods=methods_of(kind if isinstance(kind, type) else Collector),
        )

    @override
    def _new_scheme(self) -> WeightSyncScheme:
        return RayWeightSyncScheme()

    @property
    @override
    def _workers_write(self) -> bool:
        ray = getattr(self.config.replay_buffer, "service_backend", None) == "ray"
        return self.config.workers_can_write and ray

    @override
    def _buffer_of_workers(self) -> Any:
        # All workers are clients of one buffer, which gets its layout from the first batch.
        return self.config.replay_buffer.client()

    # --- weights

    def batches_of(self, worker_id: int) -> int:
        """Returns the number of batches that a worker has delivered."""
        return self._pool.slots[worker_id].batches

    def local_policy(self) -> Any:
        """Returns the policy that was passed to the constructor, or None if there was none."""
        return self.policy

    @override
    def load_state_dict(
        self,
        state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        strict: bool = True,
        *,
        trust: bool = False,
        on_state_mismatch: Literal["raise", "new_episodes"] = "raise",
    ) -> None:
        """Restores an earlier state.

        Args:
            state_dict: a state that :meth:`state_dict` returned. States of the actors' collectors,
                as returned by TorchRL's RayCollector, are accepted too: a list with a state for
                each actor, or one state for all actors.
            strict: whether to raise an error if the weights don't fit exactly.
            trust: True to open pickled environments, which can run any code.
            on_state_mismatch: see :meth:`MultiSyncCollector.load_state_dict`.

        Raises:
            KeyError: if an entry is missing.
            EnvStateError: if the state of an environment can't be restored.
            ValueError: if the number of states doesn't match the number of actors.
        """
        states = of_actors(state_dict, self.num_workers, self.sync)
        super().load_state_dict(states, strict, trust=trust, on_state_mismatch=on_state_mismatch)

    @override
    def pause(
        self, timeout: float | None = 30.0, *, resume: bool = True
    ) -> AbstractContextManager[None]:
        """Pauses collection within a ``with`` block, whether or not it runs in the background.

        Entering the block waits for the batches that are being collected. No frame is added within
        the block.

        Args:
            timeout: seconds to wait for these batches; None for no limit.
            resume: whether background collection continues after the block. If not, ``start()``
                continues it.

        Raises:
            TimeoutError: when the block is entered, if the batches take longer.
        """
        if self.parts.background.thread is None:
            self.parts.lifetime.check_open("pause()")
            return self._settled(timeout)
        return super().pause(timeout, resume=resume)

    @contextmanager
    def _settled(self, timeout: float | None) -> Iterator[None]:
        with self.parts.background.held():
            self.parts.gathering.settle(timeout)
            yield

    @override
    def stats(self, workers: View = "aggregate", *, timeout: float | None = 10.0) -> dict[str, Any]:
        """Returns the same statistics as other collectors with workers.

        Args:
            workers: ``"aggregate"``, ``"per_worker"`` or ``"both"``.
            timeout: accepted for compatibility, but has no effect: the call doesn't wait for
                actors.

        Raises:
            ValueError: if ``workers`` has another value.
        """
        return super().stats(workers)

    # --- actors

    @property
    def num_collectors(self) -> int:
        """Number of actors."""
        return self.num_workers

    @property
    def remote_collectors(self) -> list[Any]:
        """Handles of the actors, in the order of the workers' numbers.

        A handle has the methods of the worker's collector, for example
        ``handle.state_dict.remote()``. The property always returns the same list. In this list,
        the handle of a replacement takes its predecessor's position.
        """
        backend = self._backend
        assert isinstance(backend, RayBackend)
        # Unsent weights cause no warning, because the caller may send them through the handles.
        self.parts.weights.may_be_sent()
        return backend.handles

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int | None = None,
        policy: Any = None,
        collector_kwargs: Any = None,
        remote_configs: Any = None,
    ) -> None:
        """Starts more actors, even while other actors are collecting.

        Batches to which all actors contribute grow accordingly. If an actor can't be started, the
        collector is closed and the exception is raised.

        Args:
            create_env_fn: a list with the environment of each new actor, or one environment for
                all of them.
            num_envs: if ``create_env_fn`` is a list, the number of copies of its environment that
                each new actor has (default: ``num_workers_per_collector``). Otherwise, the number
                of new actors (default: 1).
            policy: policy of the new actors; None for the first actor's policy.
            collector_kwargs: options of the new actors' collectors: one mapping for all of them,
                or a list; None for the options of the first actor's collector.
            remote_configs: options of the new actors: one mapping for all of them, or a list; None
                for the options of the first actor.

        Raises:
            RuntimeError: if the collector is closed, or the cluster has no room for the actors.
            TypeError: if a weight-sync scheme has a fixed number of receivers.
            ValueError: if a number is out of range, a list has the wrong length, or an option
                can't be set for new actors.
        """
        self.parts.lifetime.check_open("add_collectors()")
        several = is_list(create_env_fn)
        if num_envs is not None:
            check_number("num_envs", num_envs, 1)
        count = len(create_env_fn) if several else num_envs or 1
        environments = self.remote.num_workers_per_collector
        if several and num_envs is not None:
            environments = num_envs
        remote = self._remote[:1] * count
        if remote_configs is not None:
            remote = [with_defaults(own) for own in each("remote_configs", remote_configs, count)]
        if collector_kwargs is None:
            collector_kwargs = self._setups[0].kwargs
        kwargs = [dict(own or {}) for own in each("collector_kwargs", collector_kwargs, count)]
        check_added(kwargs)
        with self.parts.background.held():
            self._remote += remote
            try:
                self._add_workers(create_env_fn, policy, kwargs, environments)
            except BaseException:
                self.shutdown(raise_on_error=False)
                raise

    def stop_remote_collectors(self) -> None:
        """Ends the actors and closes this collector."""
        self.shutdown()

    # --- the end

    @override
    def shutdown(  # type: ignore[override]
        self,
        timeout: float | None = None,
        shutdown_ray: bool = False,
        *,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """Ends the actors; may be called any number of times.

        Args:
            timeout: seconds that actors have to close their environments before they are killed;
                None for a default of a few seconds.
            shutdown_ray: whether to end this process's connection to Ray as well, even if other
                code made the connection. This also ends all actors of the connection, and the
                cluster if this process started it. A cluster that ran before continues.
            close_env: must be True: environments end with their actors.
            raise_on_error: whether to raise errors that occur while closing.

        Raises:
            RuntimeError: if ``close_env`` is False.
            TypeError: if a flag is a string.
        """
        check_bool("shutdown_ray", shutdown_ray)
        try:
            super().shutdown(timeout, close_env, raise_on_error)
        finally:
            if shutdown_ray:
                end_connection()

    async def async_shutdown(  # type: ignore[override]
        self,
        shutdown_ray: bool = False,
        *,
        timeout: float | None = None,
        close_env: bool = True,
    ) -> None:
        """Ends background collection after the current batch, and shuts down.

        Meanwhile, other tasks of the event loop can run.

        Args:
            shutdown_ray: whether to end the connection to Ray as well (see :meth:`shutdown`).
            timeout: seconds to wait for the current batch; None for no limit.
            close_env: must be True: environments end with their actors.
        """
        import asyncio

        check_bool("shutdown_ray", shutdown_ray)
        await asyncio.to_thread(super().async_shutdown, timeout, close_env)
        # This line is not reached after a time-out, which closes nothing.
        if shutdown_ray:
            end_connection()


def of_actors(given: Any, count: int, sync: bool) -> Mapping[str, Any]:
    """Converts any accepted form of a state to the state of a Ray collector."""
    if isinstance(given, Mapping):
        if "worker0" in given or "frames" not in given:
            return given
        whole = {"frames": given["frames"], "iter": given.get("iter", 0)}
        return {**whole, **{f"worker{index}": given for index in range(count)}}
    states = list(given)
    if len(states) != count:
        raise ValueError(f"state_dict has {len(states)} states, but there are {count} actors")
    batches = [int(state["iter"]) for state in states]
    return {
        "frames": sum(int(state["frames"]) for state in states),
        "iter": max(batches) if sync else sum(batches),
        **{f"worker{index}": state for index, state in enumerate(states)},
    }
