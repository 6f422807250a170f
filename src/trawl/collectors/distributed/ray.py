"""Collectors whose workers are actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from typing_extensions import override

from trawl.backends.base import Backend
from trawl.backends.ray_backend import RayBackend, RayWorker
from trawl.backends.ray_cluster import (
    DEFAULT_RAY_INIT_CONFIG,
    DEFAULT_REMOTE_CLASS_CONFIG,
    connect,
    disconnect,
    end_connection,
    with_defaults,
)
from trawl.checks import check_bool, check_number
from trawl.collectors.arguments import accepts, describe
from trawl.collectors.distributed.cluster import ClusterCollector, each
from trawl.collectors.distributed.ray_config import RayArguments, RayOptions
from trawl.collectors.distributed.sharing import check_added
from trawl.collectors.handle_calls import methods_of
from trawl.collectors.single import Collector
from trawl.envs.types import is_list
from trawl.weight_update.ray import RayWeightSyncScheme
from trawl.weight_update.scheme import WeightSyncScheme
from trawl.weight_update.updaters import Updater, WeightUpdaterBase

__all__ = ["DEFAULT_RAY_INIT_CONFIG", "DEFAULT_REMOTE_CLASS_CONFIG", "RayCollector"]


@describe(RayArguments)
class RayCollector(ClusterCollector):
    """Collects experience in the actors of a Ray cluster, on any of its nodes.

    With ``sync=True`` all actors contribute to each batch, as with a
    :class:`~trawl.collectors.MultiSyncCollector`. Otherwise each batch comes from one actor, and
    batches are delivered in the order in which they are finished. Batches come through Ray's
    object store, and are read in its memory.

    If this process is not connected to a cluster, it joins the one that ``ray_init_config`` or
    ``RAY_ADDRESS`` names, or that ``ray start`` has started on this machine. If there is none, it
    starts one on this machine.

    Args:
        create_env_fn: a list with the environment of each actor, in any form that
            :class:`~trawl.collectors.Collector` takes; or one environment for all
            ``num_collectors``.
        policy: the policy, of which every actor gets a copy; or a list with one for each actor.
        **options: the attributes of
            :class:`~trawl.collectors.distributed.ray_config.RayOptions`, of
            :class:`~trawl.collectors.distributed.cluster.ClusterOptions`, and of
            :class:`~trawl.collectors.MultiConfig`.

    Raises:
        ImportError: if Ray is not installed.
        TypeError: for an unknown argument, or one of a wrong type.
        ValueError: for a value that is out of range, or arguments that contradict each other.
        RuntimeError: if the cluster has no place for the actors (after ``placement_timeout``).
        WorkerError: if a worker can't make its environment or policy. It is also an instance of
            the original exception's type.
    """

    remote: RayOptions
    _options = RayOptions

    @accepts(RayArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        self._take_options(options)
        count = options.pop("num_workers", None)
        if count is not None and self.remote.num_collectors not in (None, count):
            raise ValueError(
                f"num_workers={count} and num_collectors={self.remote.num_collectors} are the same "
                "thing: give one of them"
            )
        if self.remote.num_collectors is not None or count is not None:
            options["num_workers"] = self.remote.num_collectors or count
        if options.get("start_method") is not None:
            raise TypeError("start_method has no meaning for actors of a Ray cluster")
        started = connect(self.remote.ray_init_config)
        try:
            super().__init__(create_env_fn, policy, *more, **options)
            self._warn_of_random_frames()
        except BaseException:
            if started:
                disconnect()
            raise

    # --- where workers live

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
        # All workers are clients of one buffer, which takes its layout from the first batch.
        return self.config.replay_buffer.client()

    # --- weights

    @override
    def _reached(self, updater: Updater) -> Sequence[int] | None:
        ours = isinstance(updater, WeightUpdaterBase)
        if not ours or getattr(updater, "remote_collectors", None):
            # Batches requested from now on are made with the weights that went to handles.
            for slot in self._pool.slots:
                if isinstance(slot.worker, RayWorker):
                    slot.worker.await_calls()
        # TorchRL's updaters send weights to handles, and the workers report what they took.
        return super()._reached(updater) if ours else []

    def batches_of(self, worker_id: int) -> int:
        """Returns the number of batches that a worker has delivered."""
        return self._pool.slots[worker_id].batches

    def local_policy(self) -> Any:
        """Returns the policy that was passed to the constructor, or None if there was none."""
        return self.policy

    @override
    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]], strict: bool = True
    ) -> None:
        """Restores an earlier state; new trajectories begin.

        Args:
            state_dict: a state from :meth:`state_dict`. States of single collectors, as TorchRL's
                RayCollector returns them, are accepted too: a list with one for each actor, or
                one for all.
            strict: whether weights that don't fit exactly are an error.

        Raises:
            KeyError: if an entry is missing.
            ValueError: if the number of states is not that of the actors.
        """
        super().load_state_dict(of_actors(state_dict, self.num_workers, self.sync), strict)

    @override
    def pause(
        self, timeout: float | None = 30.0, *, resume: bool = True
    ) -> AbstractContextManager[None]:
        """Pauses collection within a ``with`` block, whether or not it runs in the background.

        Entering the block waits for the batches under way; no frame is added within the block.

        Args:
            timeout: seconds to wait for these batches; None to wait as long as it takes.
            resume: whether collection in the background continues after the block. If not,
                ``start()`` continues it.

        Raises:
            TimeoutError: on entering, if the batches take longer.
        """
        if self._background is None:
            self._check_open("pause()")
            return self._settled(timeout)
        return super().pause(timeout, resume=resume)

    @contextmanager
    def _settled(self, timeout: float | None) -> Iterator[None]:
        with self._held():
            self._settle(timeout)
            yield

    @override
    def stats(self, workers: str = "aggregate", *, timeout: float | None = 10.0) -> dict[str, Any]:
        """Returns statistics of the collector, as other collectors with workers do.

        Args:
            workers: ``"aggregate"``, ``"per_worker"`` or ``"both"``.
            timeout: accepted for compatibility; no actor is asked, so there is nothing to wait for.

        Raises:
            ValueError: for another value of ``workers``.
        """
        return super().stats(workers)

    # --- actors

    @property
    def num_collectors(self) -> int:
        """Number of actors."""
        return self.num_workers

    @property
    def remote_collectors(self) -> list[Any]:
        """Handles of the actors, by number of the worker.

        A handle has the methods of the worker's collector: ``handle.state_dict.remote()``. The
        list stays the same object: the handle of a replacement takes its predecessor's position.
        """
        backend = self._backend
        assert isinstance(backend, RayBackend)
        # No warning of unsent weights: the caller may send weights through the handles.
        self._unsent = None
        return backend.handles

    def add_collectors(
        self,
        create_env_fn: Any,
        num_envs: int | None = None,
        policy: Any = None,
        collector_kwargs: Any = None,
        remote_configs: Any = None,
    ) -> None:
        """Starts more actors, also while others collect. Batches of all actors grow accordingly.

        If an actor can't be started, the collector is closed and the exception is raised.

        Args:
            create_env_fn: a list with the environment of each new actor, or one environment for
                all of them.
            num_envs: with a list, the number of copies of its environment that each new actor has
                (default: ``num_workers_per_collector``); otherwise the number of new actors
                (default: 1).
            policy: their policy; None for that of the first actor.
            collector_kwargs: options of their collectors: one mapping for all, or a list; None
                for those of the first actor.
            remote_configs: options of the actors: one mapping for all, or a list; None for those
                of the first actor.

        Raises:
            RuntimeError: if the collector is closed, or the cluster has no place for the actors.
            TypeError: if the number of receivers of a weight-sync scheme is fixed.
            ValueError: if numbers don't match.
        """
        self._check_open("add_collectors()")
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
        with self._held():
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
                None for a few seconds.
            shutdown_ray: whether to end this process's connection to Ray as well, with all of its
                actors, even if other code made the connection. A cluster that this process
                started ends with it; a cluster that ran before continues.
            close_env: must be True: environments end with their actors.
            raise_on_error: whether errors of closing are raised.

        Raises:
            RuntimeError: with ``close_env=False``.
            TypeError: for a string as one of the switches.
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
        """Ends background collection after the batch under way, and shuts down.

        Meanwhile, other tasks of the event loop can run.

        Args:
            shutdown_ray: as :meth:`shutdown` takes it.
            timeout: seconds to wait for that batch; None to wait as long as it takes.
            close_env: must be True: environments end with their actors.
        """
        import asyncio

        check_bool("shutdown_ray", shutdown_ray)
        await asyncio.to_thread(super().async_shutdown, timeout, close_env)
        # Not reached after a time-out, which closes nothing.
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
