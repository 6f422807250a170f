"""Collectors whose workers are ranks of process groups."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from typing_extensions import override

from trawl.backends.base import Backend
from trawl.backends.network import LOOPBACK
from trawl.backends.process_group import ProcessGroupBackend
from trawl.collectors.arguments import accepts, describe
from trawl.collectors.distributed.cluster import ClusterCollector, ClusterOptions
from trawl.collectors.distributed.launchers import Meeting, meeting
from trawl.collectors.distributed.process_group_config import (
    DistributedArguments,
    DistributedOptions,
    DistributedSyncArguments,
    RemoteOptions,
)
from trawl.weight_update.process_group import DistributedWeightSyncScheme
from trawl.weight_update.scheme import WeightSyncScheme


class RemoteCollector(ClusterCollector):
    """What collectors over process groups and over RPC have in common."""

    remote: RemoteOptions
    _options: ClassVar[type[ClusterOptions]] = RemoteOptions

    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        if options.get("start_method") is not None:
            raise TypeError("start_method has no meaning here: launcher says what starts workers")
        self._take_options(options)
        if self.remote.outside:
            options.setdefault("max_restarts", 0)
        super().__init__(create_env_fn, policy, *more, **options)
        self._warn_of_random_frames()

    @abstractmethod
    def _backend_at(self, place: Meeting) -> Backend:
        """The place where workers live, which meet this process somewhere."""

    @override
    def _new_backend(self) -> Backend:
        return self._backend_at(meeting(self.remote, self.num_workers))

    @property
    @override
    def _workers_write(self) -> bool:
        # They share no memory with a buffer of this process, which writes itself.
        return False


@describe(DistributedArguments)
class DistributedCollector(RemoteCollector):
    """Collects experience in processes that ``torch.distributed`` connects, on any machine.

    Each worker is in a process group of its own with this process: one that dies is replaced,
    and no other hears of it, if the ``launcher`` can start another. With ``sync=True`` batches
    are made by all workers together, as those of a
    :class:`~trawl.collectors.MultiSyncCollector`; otherwise by one each, in the order in which
    they are finished.

    Args:
        create_env_fn: what each worker makes its environment of (as
            :class:`~trawl.collectors.Collector` takes it), in a list; or one such thing for
            ``num_workers``.
        policy: a policy that every worker gets a copy of, or a list of policies.
        **options: the attributes of
            :class:`~trawl.collectors.distributed.process_group_config.DistributedOptions`, of
            :class:`~trawl.collectors.distributed.cluster.ClusterOptions`, and of
            :class:`~trawl.collectors.MultiConfig`.

    Raises:
        ImportError: if the launcher needs a package that is not installed.
        TypeError: for an argument of a wrong type, or unknown.
        ValueError: for a value that is out of range, or arguments that contradict each other.
        WorkerError: if a worker can't make its environment or policy; of the original type, too.

    Example:
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
    def _backend_at(self, place: Meeting) -> Backend:
        return ProcessGroupBackend(
            place.launcher,
            place.host or LOOPBACK,
            place.port,
            self.remote.timeout,
            place.prefix,
            place.store,
            self.remote.link_timeout,
            place.secret,
        )

    @override
    def _new_scheme(self) -> WeightSyncScheme:
        return DistributedWeightSyncScheme(self.remote.backend)

    @property
    @override
    def _sends_by_itself(self) -> bool:
        return super()._sends_by_itself or self.remote.update_interval is not None

    @override
    def _due(self) -> list[int]:
        every = self.remote.update_interval
        if every is None or not self._has_source():
            return super()._due()
        return self._after(every)


@describe(DistributedSyncArguments)
class DistributedSyncCollector(DistributedCollector):
    """Collects batches that all workers make together, over process groups.

    It is a :class:`DistributedCollector` with ``sync=True``, which sends the policy's weights to
    all workers every ``update_interval`` batches (1 by default).

    Args:
        create_env_fn: one environment, or a list of them with one per worker.
        policy: the policy of the workers. Beside ``policy_factory`` it is only where their
            weights come from.
        **options: those of :class:`DistributedCollector`, but for ``sync`` and
            ``update_after_each_batch``.

    Raises:
        TypeError: an option that this collector doesn't have.
        ValueError: a value that can't be used.
    """

    _sends_weights = True

    @accepts(DistributedSyncArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        for name in ("sync", "update_after_each_batch"):
            if name in options:
                raise TypeError(f"DistributedSyncCollector has no argument {name!r}")
        options.setdefault("update_interval", 1)
        super().__init__(create_env_fn, policy, *more, sync=True, **options)
