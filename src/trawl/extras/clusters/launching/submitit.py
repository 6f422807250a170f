"""Launcher that starts processes as submitit jobs, on a Slurm cluster or (for tests) locally."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from trawl.extras.clusters.launching.authentication import read_private, write_private
from trawl.extras.clusters.launching.launch import Ended, Launcher, Process
from trawl.extras.clusters.network.link import Address
from trawl.extras.clusters.network.rank import run_rank_at

DEFAULT_SLURM_CONF = {
    "timeout_min": 10,
    "slurm_partition": "train",
    "slurm_cpus_per_task": 32,
    "slurm_gpus_per_node": 0,
}


def executor(given: Mapping[str, Any] | None, default: Mapping[str, Any] | None = None) -> Any:
    """Returns a submitit executor, which starts jobs with the given parameters.

    Args:
        given: the parameters; ``"folder"`` and ``"cluster"`` go to the executor's constructor.
        default: the parameters to use if ``given`` is None; by default ``DEFAULT_SLURM_CONF``.

    Raises:
        ImportError: if submitit is not installed.
    """
    try:
        import submitit
    except ImportError:
        raise ImportError(
            "launcher='submitit' needs the package submitit: pip install 'trawl-rl[submitit]'. "
            "Without it, launcher='mp' starts workers on this machine"
        ) from None
    default = DEFAULT_SLURM_CONF if default is None else default
    parameters = dict(default if given is None else given)
    folder, cluster = parameters.pop("folder", "submitit_logs"), parameters.pop("cluster", None)
    found = submitit.AutoExecutor(folder=folder, cluster=cluster)
    found.update_parameters(**parameters)
    return found


def folder_of(executor: Any) -> Path:
    """Returns the part of the job folders' path that is the same for all jobs of an executor."""
    from submitit.core.utils import JobPaths

    return Path(JobPaths.get_first_id_independent_folder(executor.folder))


class SubmititLauncher(Launcher):
    """Starts processes as jobs of submitit.

    submitit passes the arguments of a job in a file that other users may be able to read. Therefore
    this file only names a second file, which only this user can read. :meth:`close` deletes the
    second file.

    Args:
        parameters: parameters of the jobs. ``"folder"`` is the folder for their logs. ``"cluster"``
            is ``"slurm"`` or ``"local"``; by default, submitit uses Slurm if it is available.

    Attributes:
        local: True if the jobs are processes of this machine.
    """

    def __init__(self, parameters: Mapping[str, Any] | None = None) -> None:
        self._executor = executor(parameters)
        self.local = self._executor.cluster == "local"
        self._jobs: list[Any] = []
        self._files: list[Path] = []

    @override
    def start(self, index: int, address: Address, ended: Ended) -> Process:
        file = write_private(folder_of(self._executor), pickle.dumps(address))
        self._files.append(file)
        job = self._executor.submit(_run_private, file)
        self._jobs.append(job)
        # submitit has no event for the end of a job, so the thread polls. The result only matters
        # if the job ends before its worker has connected.
        watch = threading.Thread(target=_watch, args=(job, ended), daemon=True)
        watch.start()
        return _Job(job)

    @override
    def close(self) -> None:
        for job in self._jobs:
            with contextlib.suppress(Exception):
                if not job.done():
                    job.cancel(check=False)
        for file in self._files:
            file.unlink(missing_ok=True)


def _run_private(file: Path) -> int:
    """Runs a rank at the address in a file, which only this user can have written or read."""
    address: Address = pickle.loads(read_private(file))
    return run_rank_at(address)


def _watch(job: Any, ended: Ended) -> None:
    with contextlib.suppress(Exception):
        job.wait()
    ended(f"ended with its job {job.job_id}: see {job.paths.stderr}")


class _Job(Process):
    def __init__(self, job: Any) -> None:
        self._job = job

    @override
    def kill(self) -> None:
        with contextlib.suppress(Exception):
            self._job.cancel(check=False)
