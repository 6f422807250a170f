"""The options that only a Ray collector has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trawl.backends.ray_cluster import with_defaults
from trawl.collectors.config import check_number, warn
from trawl.collectors.fleet_collector import FleetCollector
from trawl.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from trawl.collectors.single import Collector

KINDS = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}


@dataclass(frozen=True)
class RayOptions:
    """The options of a :class:`RayCollector` beside those of every collector with workers.

    Attributes:
        num_collectors: number of actors, if ``create_env_fn`` is no list.
        num_workers_per_collector: processes of each actor, if its collector is one with workers.
        collector_class: what an actor runs: ``"single"`` (a ``Collector``), ``"sync"`` or
            ``"async"`` (a collector with workers of its own), or the class.
        collector_kwargs: more options of the actors' collectors: for all, or a list.
        sync: whether batches are made by all actors together.
        ray_init_config: arguments of ``ray.init``, if this process is not connected.
        remote_configs: options of the actors (``num_cpus``, ``num_gpus``, ``memory``,
            ``resources``, …): for all, or a list.
        placement_timeout: seconds that an actor may wait for these; None: as long as it takes.
        update_after_each_batch: sends a worker the policy's weights after each of its batches.
        max_weight_update_interval: the same, after that many of its batches; -1: not by itself.
        use_env_creator: changes nothing: what makes environments is packed in any case.
    """

    num_collectors: int | None = None
    num_workers_per_collector: int = 1
    collector_class: Any = "single"
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    sync: bool = False
    ray_init_config: Mapping[str, Any] | None = None
    remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    placement_timeout: float | None = 30.0
    update_after_each_batch: bool = False
    max_weight_update_interval: int = -1
    use_env_creator: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.sync, bool):
            raise TypeError(f"sync must be a bool, but it is {self.sync!r}")
        number = self.num_workers_per_collector
        check_number("num_workers_per_collector", number, 1)
        check_number("max_weight_update_interval", self.max_weight_update_interval, -1)
        if isinstance(self.collector_class, str) and self.collector_class not in KINDS:
            raise ValueError(
                f"collector_class must be a class, or one of {', '.join(map(repr, KINDS))}, but it "
                f"is {self.collector_class!r}"
            )
        if number > 1 and not self.nested:
            raise ValueError(
                f"num_workers_per_collector={number} needs a collector_class with workers "
                "('sync' or 'async')"
            )
        wait = self.placement_timeout
        if wait is not None and (isinstance(wait, bool) or not wait > 0):
            raise ValueError(f"placement_timeout must be seconds above 0, but it is {wait!r}")

    @property
    def kind(self) -> Any:
        """The class of the actors' collectors."""
        named = isinstance(self.collector_class, str)
        return KINDS[self.collector_class] if named else self.collector_class or Collector

    @property
    def nested(self) -> bool:
        """Whether these have workers of their own."""
        return isinstance(self.kind, type) and issubclass(self.kind, FleetCollector)

    @property
    def interval(self) -> int | None:
        """Batches of a worker after which it is sent weights by itself; None for never."""
        if self.max_weight_update_interval > 0:
            return self.max_weight_update_interval
        return 1 if self.update_after_each_batch or not self.max_weight_update_interval else None

    def remote(self, count: int) -> list[dict[str, Any]]:
        """The options of each actor."""
        return [with_defaults(own) for own in each("remote_configs", self.remote_configs, count)]

    def kwargs(self, count: int) -> list[dict[str, Any]]:
        """More options of each actor's collector."""
        return [dict(own or {}) for own in each("collector_kwargs", self.collector_kwargs, count)]


def each(name: str, given: Any, count: int) -> list[Any]:
    """An entry for each actor, of one for all or a list.

    Raises:
        ValueError: if the number is wrong.
        TypeError: if these are no mappings.
    """
    several = isinstance(given, (list, tuple))
    found = list(given) if several else [given] * count
    if len(found) != count:
        raise ValueError(f"{name} has {len(found)} entries, but there are {count} collectors")
    for one in found:
        if one is not None and not isinstance(one, Mapping):
            raise TypeError(
                f"{name} must be a mapping, or a list of such, but there is "
                f"{type(one).__name__}: {one!r}"
            )
    return found


def warn_of(options: RayOptions, random_frames: int | None) -> None:
    """Warns of options that may not do what is expected of them."""
    if not options.sync and random_frames:
        warn(
            f"init_random_frames={random_frames} with sync=False: workers that are slow may begin "
            "random batches when others act by the policy already"
        )
