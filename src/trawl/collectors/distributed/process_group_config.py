"""The options of collectors that reach their workers over a network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trawl.backends.control import LEAST_SECONDS
from trawl.backends.launch_command import check_template
from trawl.backends.link import check_name
from trawl.backends.network import listening
from trawl.checks import check_number
from trawl.collectors.distributed.cluster import ClusterArguments, ClusterOptions
from trawl.collectors.options import check_seconds

LAUNCHERS = ("mp", "submitit", "submitit_delayed", "command", "env")


@dataclass(frozen=True, kw_only=True)
class RemoteOptions(ClusterOptions):
    """The options of collectors whose workers are started by a launcher.

    Attributes:
        launcher: how the workers are started. ``"mp"``: as processes of this machine.
            ``"submitit"``: as jobs of a Slurm cluster, or of this machine if there is no Slurm.
            ``"submitit_delayed"``: as jobs of
            :func:`~trawl.collectors.distributed.submitit_delayed_launcher`. ``"command"``: by
            ``launcher_command``. ``"env"`` or None: by you or ``torchrun``, with ``WORLD_SIZE``,
            ``MASTER_ADDR`` and ``MASTER_PORT`` in the environment; ranks from 1 on call
            :func:`~trawl.collectors.distributed.run_rank`. With ``"submitit_delayed"``, ``"env"``
            and None, a worker that dies can't be replaced. On several machines, set ``TRAWL_KEY``
            to the same secret text for all ranks, with which they authenticate each other.
        slurm_kwargs: parameters of the jobs, for ``"submitit"``. Among them are ``"folder"``, for
            their logs, and ``"cluster"``, which is ``"local"`` or ``"slurm"``.
        launcher_command: command that starts a worker, for ``"command"``, with placeholders in
            braces. A string is run by a shell; a list of strings is run without one. ``{worker}``
            is the command line of the worker, ``{arguments}`` the same without the Python
            interpreter. ``{index}`` (from 0), ``{rank}`` (from 1) and ``{name}`` tell workers
            apart, ``{address}`` and ``{port}`` are those of this process. A worker finds its key in
            the environment or in the first line of its input; if the command passes neither on,
            the placeholder ``{key_file}`` names a file with the key.
        tcp_port: port at which workers reach this process; None for any free one.
        address: address of this machine at which workers reach this process. None: the loopback
            address, which other machines can't reach; with Slurm, the name of this machine; with
            ``"submitit_delayed"``, ``"env"`` and None, ``MASTER_ADDR`` of the environment.
        timeout: seconds that a worker may take to start and join.
        link_timeout: seconds for which a worker's machine may be out of reach, as after a cut
            link or a power failure. After that the worker counts as dead, and it ends by itself.
            At least 2; None: no limit. (If only the process dies, that is noticed at once.)
    """

    launcher: Literal["mp", "submitit", "submitit_delayed", "command", "env"] | None = "submitit"
    slurm_kwargs: Mapping[str, Any] | None = None
    launcher_command: str | Sequence[str] | None = None
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
        if (self.launcher_command is not None) != (self.launcher == "command"):
            raise ValueError(
                "launcher='command' and launcher_command belong together, but launcher is "
                f"{self.launcher!r} and launcher_command is {self.launcher_command!r}"
            )
        if self.launcher_command is not None:
            check_template("launcher_command", self.launcher_command)
        self._check_place()

    def _check_place(self) -> None:
        if self.tcp_port is not None:
            # Users of torchrun may have the port as a string.
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
        """True if the workers are started from outside, not by this process."""
        return self.launcher in ("env", "submitit_delayed", None)


@dataclass(frozen=True, kw_only=True)
class DistributedOptions(RemoteOptions):
    """The options of a collector over process groups.

    Attributes:
        backend: the kind of process group: ``"gloo"``.
        update_interval: number of a worker's batches after which it is sent the policy's weights.
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
