"""The options that collectors have whose workers are reached over a network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from trawl.backends.lifeline import LEAST_SECONDS
from trawl.backends.link import check_name
from trawl.backends.network import listening
from trawl.collectors.config import check_number, check_seconds
from trawl.collectors.distributed.cluster import ClusterArguments, ClusterOptions

LAUNCHERS = ("mp", "submitit", "submitit_delayed", "env")


@dataclass(frozen=True, kw_only=True)
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
            On several machines, set ``TRAWL_KEY`` to the same text on all: ranks prove by it that
            they belong together.
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

    launcher: Literal["mp", "submitit", "submitit_delayed", "env"] | None = "submitit"
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
        if self.slurm_kwargs is not None and not isinstance(self.slurm_kwargs, Mapping):
            raise TypeError(f"slurm_kwargs must be a mapping, but it is {self.slurm_kwargs!r}")
        if self.slurm_kwargs and self.launcher != "submitit":
            raise ValueError(
                f"slurm_kwargs is for launcher='submitit', but launcher is {self.launcher!r}"
            )
        self._check_place()

    def _check_place(self) -> None:
        if self.tcp_port is not None:
            # torchrun's users have it as a string.
            port: Any = self.tcp_port
            number = int(port) if isinstance(port, str) and port.isdigit() else port
            object.__setattr__(self, "tcp_port", check_number("tcp_port", number, 1))
            if number > 65_535:
                raise ValueError(f"tcp_port must be at most 65535, but it is {number}")
        self._check_address()
        if not 0 < check_seconds("timeout", self.timeout) < math.inf:
            raise ValueError(
                f"timeout must be seconds above 0, and not infinite, but it is {self.timeout!r}"
            )
        limit = self.link_timeout
        if limit is None:
            return
        if not LEAST_SECONDS <= check_seconds("link_timeout", limit) < math.inf:
            raise ValueError(
                f"link_timeout must be at least {LEAST_SECONDS:g} seconds, or None for no limit, "
                f"but it is {limit!r}"
            )

    def _check_address(self) -> None:
        address = self.address
        if address is None:
            return
        wanted = "the address or the name of this machine in the network of the workers, no port"
        if not isinstance(address, str):
            raise TypeError(f"address must be {wanted}, but it is {address!r}")
        try:
            listening(address, 0).close()
        except OSError as error:
            raise ValueError(
                f"address must be {wanted}, but it is {address!r}: {error.strerror or error}"
            ) from None

    @property
    def outside(self) -> bool:
        """Whether somebody else starts the workers."""
        return self.launcher in ("env", "submitit_delayed", None)


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True)
class DistributedArguments(DistributedOptions, ClusterArguments):
    """The arguments of a :class:`DistributedCollector`."""


@dataclass(frozen=True)
class DistributedSyncArguments(DistributedArguments):
    """The arguments of a :class:`DistributedSyncCollector`."""

    sync: bool = field(default=True, init=False)
    update_after_each_batch: bool = field(default=False, init=False)
    update_interval: int | None = field(default=1, kw_only=True)
