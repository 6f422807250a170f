"""The options that collectors have whose workers are reached over a network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from trawl.backends.lifeline import LEAST_SECONDS
from trawl.backends.process_group import check_name
from trawl.collectors.config import check_number
from trawl.collectors.distributed.cluster import ClusterOptions

LAUNCHERS = ("mp", "submitit", "submitit_delayed", "env")


@dataclass(frozen=True)
class RemoteOptions(ClusterOptions):
    """The options of collectors whose workers are started by a launcher.

    Attributes:
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
        link_timeout: seconds for which the machine of a worker may be out of reach, after which
            that worker counts as dead, and it ends by itself: as when a link is cut, or power is.
            At least 2; None: for ever. (A process that dies is noticed at once.)
    """

    launcher: str | None = "submitit"
    slurm_kwargs: Mapping[str, Any] | None = None
    tcp_port: int | None = None
    address: str | None = None
    timeout: float = 300.0
    link_timeout: float | None = 30.0

    def __post_init__(self) -> None:
        super().__post_init__()
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
        if not _seconds("timeout", self.timeout) > 0:
            raise ValueError(f"timeout must be seconds above 0, but it is {self.timeout!r}")
        limit = self.link_timeout
        if limit is not None and not LEAST_SECONDS <= _seconds("link_timeout", limit) < math.inf:
            raise ValueError(
                f"link_timeout must be at least {LEAST_SECONDS:g} seconds, or None for no limit, "
                f"but it is {limit!r}"
            )

    @property
    def outside(self) -> bool:
        """Whether somebody else starts the workers."""
        return self.launcher in ("env", "submitit_delayed", None)


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, but it is {value!r}")
    return float(value)


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
