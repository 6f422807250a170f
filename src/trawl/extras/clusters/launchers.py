"""Choice of the launcher of remote workers, and of the address at which they find the driver."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from trawl.collectors.config import warn
from trawl.extras.clusters.launching.command import CommandLauncher
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
from trawl.extras.clusters.network.sockets import LOOPBACK

if TYPE_CHECKING:
    from trawl.extras.clusters.process_group_config import RemoteOptions


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
