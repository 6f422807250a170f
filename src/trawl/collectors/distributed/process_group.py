"""Collectors whose workers are ranks of process groups."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar

from torch import nn
from typing_extensions import override

from trawl.backends.base import Backend
from trawl.backends.process_group import LOOPBACK, ProcessGroupBackend
from trawl.collectors.assembly import Part
from trawl.collectors.config import warn
from trawl.collectors.dispatch import full_signature
from trawl.collectors.distributed.launchers import Meeting, meeting
from trawl.collectors.distributed.nested import NestedProgram, inner_options
from trawl.collectors.distributed.process_group_config import DistributedOptions, RemoteOptions
from trawl.collectors.distributed.ray_config import warn_of
from trawl.collectors.fleet import Member
from trawl.collectors.fleet_collector import FleetCollector
from trawl.collectors.multi import frames_of_sync_workers
from trawl.collectors.multi_config import NOT_HERE, MultiConfig
from trawl.collectors.worker import Program
from trawl.weight_update.process_group import DistributedWeightSyncScheme
from trawl.weight_update.scheme import WeightSyncScheme


class RemoteCollector(FleetCollector):
    """What collectors over process groups and over RPC have in common.

    Attributes:
        remote: the options that only these have.
    """

    remote: RemoteOptions
    _options: ClassVar[type[RemoteOptions]] = RemoteOptions

    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        if options.get("start_method") is not None:
            raise TypeError("start_method has no meaning here: launcher says what starts workers")
        names = {field.name for field in fields(self._options)}
        own = {name: options.pop(name) for name in names & options.keys()}
        self.remote = self._options(**own)
        self.sync = self.remote.sync
        if self.remote.outside:
            options.setdefault("max_restarts", 0)
        # Batches of each worker since it was sent weights.
        self._since: dict[int, int] = {}
        super().__init__(create_env_fn, policy, *more, **options)
        warn_of(self.remote, self.config.init_random_frames)  # type: ignore[arg-type]

    @abstractmethod
    def _backend_at(self, place: Meeting) -> Backend:
        """The place where workers live, which meet this process somewhere."""

    @override
    def _check(self) -> None:
        super()._check()
        self._kwargs = self.remote.kwargs(self.num_workers)
        if self.remote.interval is not None and not self._has_source():
            raise ValueError(
                "update_after_each_batch and max_weight_update_interval need a policy whose "
                "weights are sent: a module. This one is none, or was made by a policy_factory"
            )
        odd = [p for p in self._own.policies if p is not None and not isinstance(p, nn.Module)]
        if odd and self.config.weight_updater is None:
            warn(
                f"policy {type(odd[0]).__name__} is no module: it has no weights that could be "
                "updated"
            )

    @override
    def _new_backend(self) -> Backend:
        return self._backend_at(meeting(self.remote, self.num_workers))

    @override
    def _frames_of_workers(self) -> list[int]:
        if self.sync:
            return frames_of_sync_workers(self.config, self._own, self.num_workers)
        return [self.config.frames_per_batch] * self.num_workers

    @override
    def _program(self, member: Member) -> Program:
        program = super()._program(member)
        parts = {field.name: getattr(program, field.name) for field in fields(Program)}
        parts["options"] = {**program.options, **self._kwargs[member.index]}
        parts["collector_class"] = self.remote.kind
        if not self.remote.nested:
            return Program(**parts)
        count = self.remote.num_workers_per_collector
        parts["options"] = inner_options(parts["options"], count)
        parts["create_env_fn"] = [program.create_env_fn] * count
        return NestedProgram(**parts)

    @property
    @override
    def _workers_write(self) -> bool:
        # They share no memory with a buffer of this process, which writes itself.
        return False

    @override
    def _collect(self) -> Any:
        due = self._due()
        if due:
            self.update_policy_weights_(worker_ids=due)
            for index in due:
                del self._since[index]
        return super()._collect()

    def _due(self) -> list[int]:
        """The workers that are to be sent weights now."""
        interval = self.remote.interval
        if interval is None:
            return []
        return sorted(index for index, count in self._since.items() if count >= interval)

    @override
    def _note_parts(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._since[part.index] = self._since.get(part.index, 0) + 1


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
            :class:`~trawl.collectors.distributed.process_group_config.DistributedOptions`, and of
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

    @override
    def _backend_at(self, place: Meeting) -> Backend:
        return ProcessGroupBackend(
            place.launcher,
            place.host or LOOPBACK,
            place.port,
            self.remote.timeout,
            place.prefix,
            place.store,
        )

    @override
    def _new_scheme(self) -> WeightSyncScheme:
        return DistributedWeightSyncScheme(self.remote.backend)

    @override
    def _due(self) -> list[int]:
        every = self.remote.update_interval
        if every is None or not self._has_source():
            return super()._due()
        return sorted(index for index, count in self._since.items() if count >= every)


class DistributedSyncCollector(DistributedCollector):
    """Collects batches that all workers make together, over process groups.

    It is a :class:`DistributedCollector` with ``sync=True``, which sends the policy's weights to
    all workers every ``update_interval`` batches (1 by default).

    Args:
        create_env_fn: as there.
        policy: as there.
        **options: as there, but for ``sync`` and ``update_after_each_batch``.

    Raises:
        as there.
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        for name in ("sync", "update_after_each_batch"):
            if name in options:
                raise TypeError(f"DistributedSyncCollector has no argument {name!r}")
        options.setdefault("update_interval", 1)
        super().__init__(create_env_fn, policy, *more, sync=True, **options)


def signature(options: type[RemoteOptions], *without: str) -> inspect.Signature:
    """The signature of a collector with such options."""
    of_all = full_signature(MultiConfig, *NOT_HERE, "start_method", "collector_class")
    own = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
        for field in fields(options)
        if field.name not in without
    ]
    return inspect.Signature([*of_all.parameters.values(), *own])


setattr(DistributedCollector, "__signature__", signature(DistributedOptions))  # noqa: B010
setattr(  # noqa: B010
    DistributedSyncCollector,
    "__signature__",
    signature(DistributedOptions, "sync", "update_after_each_batch"),
)
