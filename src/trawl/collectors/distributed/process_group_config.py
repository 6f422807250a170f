"""The options that collectors have whose workers are reached over a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from trawl.backends.process_group import check_name
from trawl.collectors.config import check_number
from trawl.collectors.distributed.ray_config import KINDS, each
from trawl.collectors.fleet_collector import FleetCollector
from trawl.collectors.single import Collector

LAUNCHERS = ("mp", "submitit", "submitit_delayed", "env")


@dataclass(frozen=True)
class RemoteOptions:
    """The options beside those of every collector with workers.

    Attributes:
        sync: whether batches are made by all workers together.
        collector_class: what a worker runs: ``"single"`` (a ``Collector``), ``"sync"`` or
            ``"async"`` (a collector with workers of its own), or the class.
        num_workers_per_collector: processes of each worker, if its collector is one with workers.
        collector_kwargs: more options of the workers' collectors: for all, or a list.
        update_after_each_batch: sends a worker the policy's weights after each of its batches.
        max_weight_update_interval: the same, after that many of its batches; -1: not by itself.
        launcher: what starts the workers. ``"mp"``: they are processes of this machine.
            ``"submitit"``: jobs of a Slurm cluster, or, where there is none, of this machine.
            ``"submitit_delayed"``: jobs that
            :func:`~trawl.collectors.distributed.submitit_delayed_launcher` starts. ``"env"`` or
            None: you, or ``torchrun``, which is told by the environment (``WORLD_SIZE``,
            ``MASTER_ADDR``, ``MASTER_PORT``); ranks from 1 on call
            :func:`~trawl.collectors.distributed.run_rank`. These can't be replaced when they die.
        slurm_kwargs: for ``"submitit"``: parameters of the jobs; among them ``"folder"``, for
            their logs, and ``"cluster"``, as ``"local"`` or ``"slurm"``.
        tcp_port: the port at which workers find this process; None for any that is free.
        address: the address of this machine at which they do. None: the loopback address, where
            no other machine finds it; with Slurm, its name.
        timeout: seconds that a worker may take to be started and to join.
    """

    sync: bool = False
    collector_class: Any = "single"
    num_workers_per_collector: int = 1
    collector_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None
    update_after_each_batch: bool = False
    max_weight_update_interval: int = -1
    launcher: str | None = "submitit"
    slurm_kwargs: Mapping[str, Any] | None = None
    tcp_port: int | None = None
    address: str | None = None
    timeout: float = 300.0

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
        if self.launcher not in (*LAUNCHERS, None):
            raise ValueError(
                f"launcher must be one of {', '.join(map(repr, LAUNCHERS))}, but it is "
                f"{self.launcher!r}"
            )
        self._check_place()

    def _check_place(self) -> None:
        if self.tcp_port is not None:
            # torchrun's users have it as a string.
            number = int(self.tcp_port) if isinstance(self.tcp_port, str) else self.tcp_port
            object.__setattr__(self, "tcp_port", check_number("tcp_port", number, 1))
            if number > 65_535:
                raise ValueError(f"tcp_port must be at most 65535, but it is {number}")
        seconds = self.timeout
        if isinstance(seconds, bool) or not isinstance(seconds, Real):
            raise TypeError(f"timeout must be a number of seconds, but it is {seconds!r}")
        if not seconds > 0:
            raise ValueError(f"timeout must be seconds above 0, but it is {seconds!r}")

    @property
    def outside(self) -> bool:
        """Whether somebody else starts the workers."""
        return self.launcher in ("env", "submitit_delayed", None)

    @property
    def kind(self) -> Any:
        """The class of the workers' collectors."""
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

    def kwargs(self, count: int) -> list[dict[str, Any]]:
        """More options of each worker's collector."""
        return [dict(own or {}) for own in each("collector_kwargs", self.collector_kwargs, count)]


@dataclass(frozen=True)
class DistributedOptions(RemoteOptions):
    """The options of a collector over process groups.

    Attributes:
        backend: the kind of process group: ``"gloo"``.
        update_interval: batches after which all workers are sent the policy's weights.
    """

    backend: str = "gloo"
    update_interval: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name(self.backend)
        if self.update_interval is not None:
            check_number("update_interval", self.update_interval, 1)
