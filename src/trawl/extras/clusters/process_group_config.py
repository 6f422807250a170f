"""The options of collectors that reach their workers over a network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from trawl.checks import check_number, check_seconds
from trawl.extras.clusters.base import ClusterArguments, ClusterOptions
from trawl.extras.clusters.launching.command import check_template
from trawl.extras.clusters.network.control import LEAST_SECONDS
from trawl.extras.clusters.network.link import check_name
from trawl.extras.clusters.network.sockets import listening

LauncherName = Literal["mp", "submitit", "submitit_delayed", "command", "env"]
LAUNCHERS = get_args(LauncherName)


@dataclass(frozen=True, kw_only=True)
class RemoteOptions(ClusterOptions):
    """The options of collectors whose workers are started by a launcher.

    Attributes:
        launcher: how the workers are started. ``"mp"``: as processes on this machine.
            ``"submitit"``: as jobs on a Slurm cluster, or on this machine if there is no Slurm.
            ``"submitit_delayed"``: as jobs of
            :func:`~trawl.collectors.distributed.submitit_delayed_launcher`. ``"command"``: by
            ``launcher_command``. ``"env"`` or None: by you or by ``torchrun``. The environment
            then has ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT``, and all ranks except 0
            call :func:`~trawl.collectors.distributed.run_rank`. With ``"submitit_delayed"``,
            ``"env"`` and None, a worker that dies can't be replaced. With ``"env"`` and None on
            several machines, set ``TRAWL_KEY`` to the same secret text for all ranks, so that the
            ranks can authenticate each other.
        slurm_kwargs: parameters of the jobs, for ``"submitit"``. Among them are ``"folder"``, for
            their logs, and ``"cluster"``, which is ``"local"`` or ``"slurm"``.
        launcher_command: command that starts a worker, for ``"command"``, with placeholders in
            braces. A string is run by a shell; a list of strings is run without a shell.
            ``{worker}`` is the command line of the worker, and ``{arguments}`` is the same without
            the Python interpreter. ``{index}`` (from 0), ``{rank}`` (from 1) and ``{name}``
            identify the worker. ``{address}`` and ``{port}`` are the address and port of this
            process. A worker finds its key in the environment or in the first line of its input.
            If your command passes on neither of them, use the placeholder ``{key_file}``, the path
            of a file with the key.
        tcp_port: port at which workers reach this process; None for any free port.
        address: address of this machine at which workers reach this process. The default is the
            loopback address, which other machines can't reach. With Slurm, the default is the name
            of this machine. With the launchers ``"submitit_delayed"``, ``"env"`` and None, it is
            the value of the environment variable ``MASTER_ADDR``.
        timeout: seconds that a worker may take to start and join.
        link_timeout: seconds for which a worker's machine may be out of reach, for example after a
            power failure or a broken link. After this time, the worker counts as dead, and its
            process ends by itself. At least 2; None for no limit. If only the worker's process
            dies, its death is noticed at once.
    """

    launcher: LauncherName | None = "submitit"
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
                "launcher='command' and launcher_command must be used together, but launcher is "
                f"{self.launcher!r} and launcher_command is {self.launcher_command!r}"
            )
        if self.launcher_command is not None:
            check_template("launcher_command", self.launcher_command)
        self._check_place()

    def _check_place(self) -> None:
        if self.tcp_port is not None:
            # Users of torchrun may pass the port as a string.
            port: Any = self.tcp_port
            number = int(port) if isinstance(port, str) and port.isdigit() else port
            object.__setattr__(self, "tcp_port", check_number("tcp_port", number, 1))
            if number > 65_535:
                raise ValueError(f"tcp_port must be at most 65535, but it is {number}")
        self._check_address()
        if not 0 < check_seconds("timeout", self.timeout) < math.inf:
            raise ValueError(
                f"timeout must be a finite number of seconds above 0, but it is {self.timeout!r}"
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
        wanted = "the address or name of this machine in the workers' network, without a port"
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
    """The options of a :class:`DistributedCollector`.

    Attributes:
        backend: accepted for compatibility, has no effect, and must be ``"gloo"``.
        update_interval: number of batches of a worker after which the policy's weights are sent to
            it. If it is None, ``update_after_each_batch`` and ``max_weight_update_interval`` apply.
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
    """The arguments of a :class:`DistributedSyncCollector`.

    Attributes:
        policy: the policy of the workers. If ``policy_factory`` makes the workers' policies, this
            policy is only the source of their weights.
    """

    sync: bool = field(default=True, init=False)
    update_after_each_batch: bool = field(default=False, init=False)
    update_interval: int | None = field(default=1, kw_only=True)
