"""Collectors whose workers are reached over a network."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from trawl.backends.base import Backend
from trawl.collectors.arguments import accepts, describe
from trawl.extras.clusters.base import ClusterCollector, ClusterOptions
from trawl.extras.clusters.launchers import launch_plan
from trawl.extras.clusters.launching.launch import LaunchPlan
from trawl.extras.clusters.network.backend import RemoteBackend
from trawl.extras.clusters.network.weights import DistributedWeightSyncScheme
from trawl.extras.clusters.process_group_config import (
    DistributedArguments,
    DistributedOptions,
    DistributedSyncArguments,
    RemoteOptions,
)
from trawl.supported import LAUNCHER_START
from trawl.weights.scheme import WeightSyncScheme


class RemoteCollector(ClusterCollector):
    """Base class of the collectors whose workers are started by a launcher."""

    remote: RemoteOptions
    _options: ClassVar[type[ClusterOptions]] = RemoteOptions

    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        if options.get("start_method") is not None:
            raise LAUNCHER_START.error("start_method", options["start_method"])
        self._take_options(options)
        if self.remote.outside:
            options.setdefault("max_restarts", 0)
        super().__init__(create_env_fn, policy, *more, **options)
        self._warn_of_random_frames()

    @override
    def _new_backend(self) -> Backend:
        return self._backend_at(launch_plan(self.remote, self.num_workers))

    def _backend_at(self, plan: LaunchPlan) -> Backend:
        """Returns the backend for workers that connect to this process according to a plan."""
        return RemoteBackend(plan, self.remote.timeout, self.remote.link_timeout)

    @property
    @override
    def _workers_write(self) -> bool:
        # Workers share no memory with the buffer of this process, so this process writes.
        return False


@describe(DistributedArguments)
class DistributedCollector(RemoteCollector):
    """Collects experience in other processes, on any machine.

    Each worker is connected with this process only. If a worker dies and the
    ``launcher`` can start another, the worker is replaced. Other workers are not affected. With
    ``sync=True``, all workers contribute to each batch, as with a
    :class:`~trawl.collectors.MultiSyncCollector`. Otherwise, each batch comes from one worker, and
    batches are delivered in the order in which they are finished.

    Args:
        **options: options of the collector, which these classes document:
            :class:`~trawl.extras.clusters.process_group_config.DistributedOptions`,
            :class:`~trawl.extras.clusters.base.ClusterOptions` and
            :class:`~trawl.collectors.MultiConfig`.

    Examples:
        >>> from trawl.collectors.distributed import DistributedCollector
        >>> with DistributedCollector(
        ...     ["CartPole-v1", "CartPole-v1"], frames_per_batch=50, total_frames=100, launcher="mp"
        ... ) as collector:
        ...     frames = sum(batch.numel() for batch in collector)
        >>> frames
        100
    """

    remote: DistributedOptions
    _options = DistributedOptions

    @accepts(DistributedArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        super().__init__(create_env_fn, policy, *more, **options)

    @override
    def _new_scheme(self) -> WeightSyncScheme:
        return DistributedWeightSyncScheme(self.remote.backend)

    @property
    @override
    def _update_every(self) -> int | None:
        every = self.remote.update_interval
        return super()._update_every if every is None or not self._has_source else every


@describe(DistributedSyncArguments)
class DistributedSyncCollector(DistributedCollector):
    """Collects batches to which all workers contribute, on any machine.

    This is a :class:`DistributedCollector` with ``sync=True`` that sends the policy's weights to
    all workers every ``update_interval`` batches (1 by default).

    Args:
        **options: options of :class:`DistributedCollector`, except ``sync`` and
            ``update_after_each_batch``.

    Raises:
        TypeError: if an option is unknown, or is not available in this collector.
        ValueError: if the value of an option can't be used.
    """

    @accepts(DistributedSyncArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        for name in ("sync", "update_after_each_batch"):
            if name in options:
                raise TypeError(f"DistributedSyncCollector has no argument {name!r}")
        options.setdefault("update_interval", 1)
        super().__init__(create_env_fn, policy, *more, sync=True, **options)
