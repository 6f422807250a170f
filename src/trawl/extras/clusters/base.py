"""Base class of collectors whose workers may be on other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from trawl.checks import check_number
from trawl.collectors.arguments import MultiArguments
from trawl.collectors.config import warn
from trawl.collectors.multi import (
    MultiAsyncCollector,
    MultiSyncCollector,
)
from trawl.collectors.options import at_least, option, validate
from trawl.collectors.single import Collector
from trawl.collectors.worker_collector import WorkerCollector
from trawl.collectors.workers.specs import WorkerSpecs
from trawl.envs.types import is_list
from trawl.extras.clusters.nested import NestedService, nested
from trawl.extras.clusters.sharing import share_options
from trawl.supported import LAG_PREEMPTION, SNAPSHOTS_NESTED, UPDATE_WITHOUT_MODULE

CollectorClass = Literal["single", "sync", "async"] | Callable[..., Any] | None

KINDS = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}


def _sync(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, but it is {value!r}")
    return value


def _collector_class(name: str, value: Any) -> Any:
    if isinstance(value, str) and value not in KINDS:
        raise ValueError(
            f"{name} must be a class, or one of {', '.join(map(repr, KINDS))}, but it is {value!r}"
        )
    return value


def _interval(name: str, value: Any) -> int:
    return -1 if value is None else max(check_number(name, value), -1)


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options of cluster collectors, besides those of every collector with workers.

    Attributes:
        sync: whether all workers contribute to each batch. Default: each batch comes from one
            worker.
        collector_class: collector that each worker runs: ``"single"`` (a ``Collector``),
            ``"sync"`` or ``"async"`` (a collector with its own workers), or a class.
        num_workers_per_collector: number of copies of its environment that each worker has. If the
            worker's collector has its own workers, each copy runs in a separate process.
            Otherwise, the copies are stepped as one batch.
        collector_kwargs: options of the workers' collectors: one mapping for all workers, or a
            list. An option with the same value for all workers acts as if it were given to this
            collector. ``init_random_frames`` are summed over the workers. An option that would
            have no effect in a worker is rejected.
        update_after_each_batch: whether to send the policy's weights to a worker after each of the
            worker's batches.
        max_weight_update_interval: number of batches of a worker after which the policy's weights
            are sent to it automatically. None or a negative number: never.
    """

    sync: bool = option(False, _sync)
    collector_class: CollectorClass = option("single", _collector_class)
    num_workers_per_collector: int = option(1, at_least(1))
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    update_after_each_batch: bool = False
    max_weight_update_interval: int = option(-1, _interval)

    def __post_init__(self) -> None:
        validate(self)

    @property
    def kind(self) -> Any:
        """The class of the workers' collectors."""
        chosen = self.collector_class
        return KINDS[chosen] if isinstance(chosen, str) else chosen or Collector

    @property
    def nested(self) -> bool:
        """True if the workers' collectors have their own workers."""
        return isinstance(self.kind, type) and issubclass(self.kind, WorkerCollector)

    @property
    def interval(self) -> int | None:
        """Number of batches after which a worker's weights are updated automatically, or None."""
        if self.update_after_each_batch:
            return 1
        interval = self.max_weight_update_interval
        return None if interval < 0 else max(1, interval)


@dataclass(frozen=True)
class ClusterArguments(MultiArguments):
    """The arguments that cluster collectors share with collectors of local worker processes.

    Raises:
        ImportError: if a package that starts the workers is not installed.
    """

    collector_class: CollectorClass = field(default="single", kw_only=True)  # type: ignore[assignment]
    # The fastest number of workers on this machine says nothing about a cluster.
    num_workers: int | None = field(default=None, kw_only=True)
    # A launcher or Ray starts the workers.
    start_method: Any = field(default=None, init=False)
    worker_idx: None = field(default=None, init=False)


class ClusterCollector(WorkerCollector):
    """A collector with workers on a cluster.

    Attributes:
        remote: the options that only cluster collectors have.
    """

    remote: ClusterOptions
    _options: ClassVar[type[ClusterOptions]] = ClusterOptions
    _workers_here = False

    def _take_options(self, options: dict[str, Any]) -> None:
        """Moves the options that only cluster collectors have from ``options`` to ``remote``."""
        names = {field.name for field in fields(self._options)}
        self.remote = self._options(**{name: options.pop(name) for name in names & options.keys()})
        self.sync = self.remote.sync

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # The options in `remote` can be read as attributes, like all others.
            remote = self.__dict__.get("remote")
            if remote is not None and any(name == field.name for field in fields(remote)):
                return getattr(remote, name)
            return super().__getattr__(name)

    @property
    def collector_class(self) -> Any:
        """The class of the workers' collectors."""
        return self.remote.kind

    @property
    @override
    def _worker_class(self) -> Any:
        return self.remote.kind

    @property
    @override
    def _environments_of_worker(self) -> int:
        return self.remote.num_workers_per_collector

    @override
    def _share_options(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        given = each("collector_kwargs", self.remote.collector_kwargs, self.num_workers)
        return share_options([own or {} for own in given], options)

    @property
    @override
    def _inner_workers(self) -> int:
        return self.remote.num_workers_per_collector if self.remote.nested else 1

    @property
    @override
    def _batches_at_once(self) -> int:
        together = getattr(self.remote.kind, "sync", False)
        return 1 if together else self._inner_workers

    def _warn_of_random_frames(self) -> None:
        frames = self.config.init_random_frames
        if not self.sync and frames:
            warn(
                f"init_random_frames={frames} with sync=False: slow workers may begin random "
                "batches when other workers already act with the policy"
            )

    @override
    def _check(self) -> None:
        super()._check()
        if self.remote.interval is not None and not self._has_source:
            after_each = self.remote.update_after_each_batch
            name = "update_after_each_batch" if after_each else "max_weight_update_interval"
            raise UPDATE_WITHOUT_MODULE.error(name)
        if self.remote.nested and self.config.worker_snapshots:
            raise SNAPSHOTS_NESTED.error("worker_snapshots", self.config.worker_snapshots)
        if self.config.max_policy_lag is not None:
            given = each("collector_kwargs", self.remote.collector_kwargs, self.num_workers)
            shares = {(own or {}).get("preemptive_threshold") for own in given} - {None, 1}
            if shares:
                raise LAG_PREEMPTION.error(
                    "max_policy_lag",
                    self.config.max_policy_lag,
                    against=f"preemptive_threshold={shares.pop()!r} in collector_kwargs",
                )

    @property
    @override
    def _update_every(self) -> int | None:
        return self.remote.interval

    @override
    def _new_specs(self) -> WorkerSpecs:
        specs = super()._new_specs()
        if self.remote.nested:
            specs.adapt, specs.service = nested, NestedService
        return specs


def each(name: str, given: Any, count: int) -> list[Any]:
    """Returns an entry for each worker, from a list or from one entry for all workers.

    Raises:
        ValueError: if the list has the wrong length.
        TypeError: if an entry is neither a mapping nor None.
    """
    found = list(given) if is_list(given) else [given] * count
    if len(found) != count:
        raise ValueError(f"{name} has {len(found)} entries, but there are {count} collectors")
    for one in found:
        if one is not None and not isinstance(one, Mapping):
            raise TypeError(
                f"{name} must be a mapping or a list of mappings, but got {type(one).__name__}: "
                f"{one!r}"
            )
    return found
