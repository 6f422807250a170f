"""Collectors whose workers a launcher starts, on any machine."""

from __future__ import annotations

import inspect
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from typing_extensions import override

from trawl.backends.base import Backend
from trawl.checks import check_number, check_seconds
from trawl.collectors.arguments import accepts, describe
from trawl.collectors.config import warn
from trawl.extras.clusters.base import ClusterArguments, ClusterCollector, ClusterOptions
from trawl.extras.clusters.launching.command import CommandLauncher, check_template
from trawl.extras.clusters.launching.launch import (
    Launcher,
    LaunchPlan,
    LocalLauncher,
    OutsideLauncher,
)
from trawl.extras.clusters.launching.outside import (
    VARIABLE,
    environment_key,
    ranks_environment,
    start_prefix,
)
from trawl.extras.clusters.launching.submitit import SubmititLauncher
from trawl.extras.clusters.network.backend import RemoteBackend
from trawl.extras.clusters.network.control import LEAST_SECONDS
from trawl.extras.clusters.network.link import check_name
from trawl.extras.clusters.network.sockets import LOOPBACK, listening
from trawl.extras.clusters.network.weights import DistributedWeightSyncScheme
from trawl.supported import LAUNCHER_START
from trawl.weights.message_schemes import RPCWeightSyncScheme
from trawl.weights.scheme import WeightSyncScheme

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


def launch_plan(options: RemoteOptions, count: int) -> LaunchPlan:
    """Returns the launcher of ``count`` workers and the address of the driver."""
    launcher: Launcher
    host = LOOPBACK
    match options.launcher:
        case "mp":
            launcher = LocalLauncher()
        case "command":
            assert options.launcher_command is not None
            launcher = CommandLauncher(options.launcher_command)
        case "submitit":
            launcher = jobs = SubmititLauncher(options.slurm_kwargs)
            host = LOOPBACK if jobs.local else socket.gethostname()
        case "env" | "submitit_delayed" | None:
            return _outside(options, count)
    return LaunchPlan(launcher, options.address or host, options.tcp_port)


def _outside(options: RemoteOptions, count: int) -> LaunchPlan:
    """Returns the launch plan for ranks that were started from outside.

    Raises:
        RuntimeError: if the environment has no address, this process is not rank 0, or the number
            of ranks does not match the number of workers.
    """
    host, port, world = ranks_environment("the collector")
    if int(os.environ.get("RANK", 0)) != 0:
        raise RuntimeError(
            f"this process is rank {os.environ['RANK']}, but rank 0 must make the collector: "
            "call trawl.collectors.distributed.run_rank() in all other ranks"
        )
    if world - 1 < count:
        raise RuntimeError(
            f"there are {count} workers, but only {world - 1} ranks besides this one "
            f"(WORLD_SIZE={world})"
        )
    if world - 1 > count:
        raise RuntimeError(
            f"there are {world - 1} ranks besides this one (WORLD_SIZE={world}), but only "
            f"{count} workers: each rank is a worker, so some ranks would have nothing to do"
        )
    secret = _common_key(host, port)
    host, port = options.address or host, options.tcp_port or port
    launcher, has_store = OutsideLauncher(world - 1), _agent_has_store()
    return LaunchPlan(launcher, host, port, start_prefix(), not has_store, secret)


def _common_key(host: str, port: int) -> bytes:
    """Returns the key of ranks that were started from outside.

    If there is no key, this function warns and returns ``b""``.
    """
    found = environment_key(host, port)
    if found is None:
        warn(
            f"the ranks share no key: anyone who can reach {host}:{port} can run code as this "
            f"user. Unless you trust everyone on that network, set {VARIABLE} to the same secret "
            f"text in all ranks (export {VARIABLE}=$(openssl rand -hex 32))"
        )
    return found or b""


def _agent_has_store() -> bool:
    """Returns True if torchrun hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class RemoteCollector(ClusterCollector):
    """Base class of the collectors whose workers are started by a launcher."""

    remote: RemoteOptions
    _options: ClassVar[type[ClusterOptions]] = RemoteOptions

    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        if options.get("start_method") is not None:
            raise LAUNCHER_START.error("start_method", options["start_method"])
        self._take_options(options)
        if self.remote.outside:
            options.setdefault("max_restarts", 0)
        super().__init__(create_env_fn, policy, *more, **options)
        self._warn_of_random_frames()

    @override
    def _new_backend(self) -> Backend:
        return self._backend_at(launch_plan(self.remote, self.num_workers))

    def _backend_at(self, plan: LaunchPlan) -> Backend:
        """Returns the backend for workers that connect to this process according to a plan."""
        return RemoteBackend(plan, self.remote.timeout, self.remote.link_timeout)

    @property
    @override
    def _workers_write(self) -> bool:
        # Workers share no memory with the buffer of this process, so this process writes.
        return False


@describe(DistributedArguments)
class DistributedCollector(RemoteCollector):
    """Collects experience in other processes, on any machine.

    Each worker is connected with this process only. If a worker dies and the
    ``launcher`` can start another, the worker is replaced. Other workers are not affected. With
    ``sync=True``, all workers contribute to each batch, as with a
    :class:`~trawl.collectors.MultiSyncCollector`. Otherwise, each batch comes from one worker, and
    batches are delivered in the order in which they are finished.

    Args:
        **options: options of the collector, which these classes document:
            :class:`~trawl.extras.clusters.remote.DistributedOptions`,
            :class:`~trawl.extras.clusters.base.ClusterOptions` and
            :class:`~trawl.collectors.MultiConfig`.

    Examples:
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
    def _new_scheme(self) -> WeightSyncScheme:
        return DistributedWeightSyncScheme(self.remote.backend)

    @property
    @override
    def _update_every(self) -> int | None:
        every = self.remote.update_interval
        return super()._update_every if every is None or not self._has_source else every


@describe(DistributedSyncArguments)
class DistributedSyncCollector(DistributedCollector):
    """Collects batches to which all workers contribute, on any machine.

    This is a :class:`DistributedCollector` with ``sync=True`` that sends the policy's weights to
    all workers every ``update_interval`` batches (1 by default).

    Args:
        **options: options of :class:`DistributedCollector`, except ``sync`` and
            ``update_after_each_batch``.

    Raises:
        TypeError: if an option is unknown, or is not available in this collector.
        ValueError: if the value of an option can't be used.
    """

    @accepts(DistributedSyncArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        for name in ("sync", "update_after_each_batch"):
            if name in options:
                raise TypeError(f"DistributedSyncCollector has no argument {name!r}")
        options.setdefault("update_interval", 1)
        super().__init__(create_env_fn, policy, *more, sync=True, **options)


@dataclass(frozen=True, kw_only=True)
class RPCOptions(RemoteOptions):
    """The options of an :class:`RPCCollector`.

    Attributes:
        tensorpipe_options: arguments of ``torch.distributed.rpc.TensorPipeRpcBackendOptions``,
            such as ``num_worker_threads``. They are checked, and have no effect.
        visible_devices: a list of devices, which has no effect: batches and weights travel between
            CPUs, and ``storing_device`` says where batches are delivered.
    """

    tensorpipe_options: Mapping[str, Any] | None = None
    visible_devices: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.tensorpipe_options
        if given is not None and not isinstance(given, Mapping):
            raise TypeError(
                f"tensorpipe_options must be a mapping, but it is {type(given).__name__}"
            )
        if isinstance(self.visible_devices, str):
            raise TypeError(
                f"visible_devices must be a list of devices, but it is {self.visible_devices!r}"
            )
        if given:
            _check_names(given)


def _check_names(options: Mapping[str, Any]) -> None:
    from torch.distributed import rpc

    known = inspect.signature(rpc.TensorPipeRpcBackendOptions).parameters
    unknown = options.keys() - known
    if unknown:
        raise ValueError(
            f"tensorpipe_options has unknown options {', '.join(map(repr, sorted(unknown)))}: "
            f"TensorPipeRpcBackendOptions takes {', '.join(sorted(known))}"
        )


@dataclass(frozen=True)
class RPCArguments(RPCOptions, ClusterArguments):
    """The arguments of a :class:`RPCCollector`."""


@describe(RPCArguments)
class RPCCollector(RemoteCollector):
    """Collects experience in other processes, on any machine.

    This is a :class:`~trawl.collectors.distributed.DistributedCollector` with the name, the options
    and the shape of batches of TorchRL's collector over ``torch.distributed.rpc``. It does not use
    RPC, so programs that use RPC themselves can have any number of such collectors.

    A worker that dies is replaced if the ``launcher`` can start another. With ``sync=True``, all
    workers contribute to each batch, and their parts are concatenated (``cat_results=0``).
    Otherwise, each batch comes from one worker, and batches are delivered in the order in which
    they are finished.

    Args:
        **options: options of the collector, which these classes document:
            :class:`~trawl.extras.clusters.remote.RPCOptions`,
            :class:`~trawl.extras.clusters.base.ClusterOptions` and
            :class:`~trawl.collectors.MultiConfig`.
    """

    remote: RPCOptions
    _options = RPCOptions

    @accepts(RPCArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        if options.get("sync"):
            options.setdefault("cat_results", 0)
        super().__init__(create_env_fn, policy, *more, **options)

    @override
    def _new_scheme(self) -> WeightSyncScheme:
        return RPCWeightSyncScheme()
