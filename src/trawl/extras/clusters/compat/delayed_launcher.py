"""Decorator that runs a function as a submitit job, with further jobs as its workers."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trawl.extras.clusters.launching.authentication import KEY_BYTES, read_private, write_private
from trawl.extras.clusters.launching.outside import VARIABLE, run_rank
from trawl.extras.clusters.launching.submitit import DEFAULT_SLURM_CONF, executor, folder_of
from trawl.extras.clusters.network.link import Address, hosted_store
from trawl.extras.clusters.network.sockets import LOOPBACK, listening, own_address

DEFAULT_SLURM_CONF_MAIN = {**DEFAULT_SLURM_CONF, "slurm_cpus_per_task": 32}


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
    mains, workers = executor(of_main, DEFAULT_SLURM_CONF_MAIN), executor(of_workers)
    here = LOOPBACK if mains.cluster == "local" else socket.gethostname()
    store, own = hosted_store(here, 0, timeout)
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
