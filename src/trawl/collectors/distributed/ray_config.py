"""The options that only a Ray collector has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trawl.backends.ray_cluster import with_defaults
from trawl.checks import check_number, check_seconds
from trawl.collectors.distributed.cluster import ClusterArguments, ClusterOptions, each


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
    """The arguments of a :class:`RayCollector`."""
