"""Choice of the launcher of remote workers, and of the address at which they find the driver."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trawl.backends.launching.authentication import KEY_BYTES, derived_key
from trawl.backends.launching.command import CommandLauncher
from trawl.backends.launching.launch import Launcher, LaunchPlan, LocalLauncher, OutsideLauncher
from trawl.backends.launching.private_file import read_private, write_private
from trawl.backends.launching.submitit import (
    DEFAULT_SLURM_CONF,
    SubmititLauncher,
    executor,
    folder_of,
)
from trawl.backends.link import Address
from trawl.backends.network import LOOPBACK, is_loopback, listening, own_address
from trawl.backends.remote_rank import run_rank_at
from trawl.collectors.config import warn

if TYPE_CHECKING:
    from trawl.collectors.distributed.process_group_config import RemoteOptions

DEFAULT_SLURM_CONF_MAIN = {**DEFAULT_SLURM_CONF, "slurm_cpus_per_task": 32}


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
    host, port, world = _environment("the collector")
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
    return LaunchPlan(launcher, host, port, _prefix(), not has_store, secret)


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


def _environment(who: str) -> tuple[str, int, int]:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise RuntimeError(
            f"missing environment variables: {', '.join(missing)}. When ranks are started from "
            f"outside, {who} needs them; torchrun and submitit_delayed_launcher set them"
        )
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])


def _agent_has_store() -> bool:
    """Returns True if torchrun hosts the store."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _prefix() -> str:
    # torchrun may restart all ranks but keep the store, so each start has its own prefix.
    return f"trawl{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def run_rank(rank: int | None = None, timeout: float = 300.0) -> int:
    """Works for the collector of rank 0 (``launcher="env"``) until the collector is closed.

    In a script that ``torchrun`` starts::

        if int(os.environ["RANK"]) == 0:
            with DistributedCollector(..., launcher="env") as collector:
                ...
        else:
            run_rank()

    Args:
        rank: the rank, from 1. Default: ``RANK`` in the environment.
        timeout: seconds that rank 0 may take to make the collector.

    Returns:
        0, or 1 if the worker failed.

    Raises:
        RuntimeError: if the address of rank 0 is not in the environment, rank 0 does not appear in
            time, or rank 0 has another key (``TRAWL_KEY`` in its environment).
    """
    if rank is None:
        if "RANK" not in os.environ:
            raise RuntimeError("pass rank, or set the environment variable RANK")
        rank = int(os.environ["RANK"])
    host, port, world = _environment(f"rank {rank}")
    if not 1 <= rank < world:
        raise RuntimeError(f"rank {rank} is not a worker: the workers are ranks 1 to {world - 1}")
    prefix = f"{_prefix()}/{rank}/0"
    key = derived_key(environment_key(host, port) or b"", prefix)
    return run_rank_at(Address(host, port, timeout, prefix, key))


# --- a function that runs as a job, with further jobs as its workers


def submitit_delayed_launcher(
    num_jobs: int,
    framework: str = "distributed",
    backend: str = "gloo",
    tcpport: int | None = None,
    submitit_main_conf: Mapping[str, Any] | None = None,
    submitit_collection_conf: Mapping[str, Any] | None = None,
    timeout: float = 3600.0,
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Returns a decorator that runs a function and its collector's workers as separate jobs.

    The collector is made with ``launcher="submitit_delayed"``::

        @submitit_delayed_launcher(num_jobs=4)
        def main():
            with DistributedCollector(..., launcher="submitit_delayed") as collector:
                ...

        if __name__ == "__main__":
            main()

    Args:
        num_jobs: number of workers.
        framework: must be ``"distributed"``.
        backend: accepted for compatibility, but has no effect.
        tcpport: port at which workers reach the function's job; None for any free port.
        submitit_main_conf: parameters of the function's job (see ``slurm_kwargs``).
        submitit_collection_conf: parameters of the workers' jobs.
        timeout: seconds that a job may wait before it runs.

    Returns:
        A decorator. The decorated function waits for the job, and returns its result.

    Raises:
        ValueError: if ``framework`` has another value.
    """
    if framework != "distributed":
        raise ValueError(f"framework must be 'distributed', but it is {framework!r}")

    def decorated(main: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(main)
        def run() -> Any:
            return _run_delayed(
                main, num_jobs, tcpport, submitit_main_conf, submitit_collection_conf, timeout
            )

        return run

    return decorated


def _run_delayed(
    main: Callable[[], Any],
    count: int,
    port: int | None,
    of_main: Mapping[str, Any] | None,
    of_workers: Mapping[str, Any] | None,
    timeout: float,
) -> Any:
    from datetime import timedelta

    from trawl.backends.link import dist

    mains, workers = executor(of_main, DEFAULT_SLURM_CONF_MAIN), executor(of_workers)
    here = LOOPBACK if mains.cluster == "local" else socket.gethostname()
    found = listening(here, 0)
    own = found.getsockname()[1]
    limit = timedelta(seconds=timeout)
    store = dist.TCPStore(here, own, None, True, limit, False, master_listen_fd=found.detach())
    # The key is in a private file, because other users may read the files that submitit writes.
    key = write_private(folder_of(mains), os.urandom(KEY_BYTES).hex().encode())
    jobs: list[Any] = []
    try:
        jobs.append(mains.submit(_as_main, main, count, port, (here, own), timeout, key))
        host, at = store.get("main").decode().rsplit(":", 1)
        where = {"MASTER_ADDR": host, "MASTER_PORT": at, "WORLD_SIZE": str(count + 1)}
        ranks = range(1, count + 1)
        jobs += [workers.submit(_as_rank, rank, where, timeout, key) for rank in ranks]
        return jobs[0].result()
    except BaseException:
        for job in jobs:
            job.cancel(check=False)
        raise
    finally:
        key.unlink()


def _as_main(
    main: Callable[[], Any],
    count: int,
    port: int | None,
    told: tuple[str, int],
    timeout: float,
    key: Path,
) -> Any:
    """Publishes the address of the function's job, and runs the function in this job."""
    host = own_address(*told)
    if port is None:
        with listening(host, 0) as found:
            port = found.getsockname()[1]
    os.environ |= {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count + 1),
        "RANK": "0",
        VARIABLE: read_private(key).decode(),
    }
    Address(*told, timeout, "").client().set("main", f"{host}:{port}")
    return main()


def _as_rank(rank: int, where: Mapping[str, str], timeout: float, key: Path) -> int:
    os.environ |= {**where, VARIABLE: read_private(key).decode()}
    return run_rank(rank, timeout)


#: Environment variable with the secret text from which all processes of a run derive their keys.
VARIABLE = "TRAWL_KEY"
_SHORTEST = 32


def environment_key(host: str, port: int) -> bytes | None:
    """Returns the key of all ranks that connect to an address.

    The key is derived from the environment variable ``TRAWL_KEY``. If the variable is not set, and
    all ranks are on this machine, they use the key in a file of this user. The file is created on
    first use.

    Returns:
        The key; None if there is none.

    Raises:
        ValueError: if the text in the variable is too short for a key.
        PermissionError: if other users can read or write the file.
    """
    text = os.environ.get(VARIABLE)
    if text:
        if len(text) < _SHORTEST:
            raise ValueError(
                f"{VARIABLE} has {len(text)} characters, but must have at least {_SHORTEST} that "
                "nobody can guess: `openssl rand -hex 32` generates such a key"
            )
        return hashlib.sha256(text.encode()).digest()
    return _users_key() if _within_this_machine(host, port) else None


def _within_this_machine(host: str, port: int) -> bool:
    """Returns True if all ranks are processes of this machine."""
    everywhere = os.environ.get("WORLD_SIZE")
    if everywhere is not None and os.environ.get("LOCAL_WORLD_SIZE") == everywhere:
        return True
    return is_loopback(own_address(host, port))


def _users_key() -> bytes | None:
    """Returns the key in the file of this user; None if the file can't be created."""
    try:
        path = _folder() / "key"
        if not path.exists():
            _write_key(path)
    except (OSError, RuntimeError):
        return None
    return read_private(path)


def _folder() -> Path:
    given = os.environ.get("XDG_STATE_HOME")
    return (Path(given) if given else Path.home() / ".local" / "state") / "trawl"


def _write_key(path: Path) -> None:
    written = write_private(path.parent, os.urandom(KEY_BYTES))
    try:
        # Another process may have created the file first.
        with contextlib.suppress(FileExistsError):
            os.link(written, path)
    finally:
        written.unlink()
