"""Layout: a way to divide environments among processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from trawl.envs.processes.parallel import ParallelEnv
from trawl.observe.formats import plural


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Layout: where environments are stepped, and how batches are made.

    Attributes:
        workers: number of workers. 0: this process collects.
        envs: number of environments in each worker or, without workers, in total.
        env_processes: number of processes of a :class:`~trawl.envs.ParallelEnv` that the
            environments are divided among. 0: they run in the process that collects.
        frames_per_batch: number of frames in a batch.
        sync: True if all workers together make each batch.
        prefetch: number of batches that synchronous workers collect ahead.
        compiled: False to leave the option ``compile_policy`` out.

    Examples:
        >>> from trawl.extras.tuning import Candidate
        >>> candidate = Candidate(workers=2, envs=4, frames_per_batch=800, sync=False)
        >>> str(candidate)
        '2 asynchronous workers with 4 environments each'
        >>> candidate.options("CartPole-v1")["num_collectors"]
        2
    """

    workers: int = 0
    envs: int = 1
    env_processes: int = 0
    frames_per_batch: int
    sync: bool = True
    prefetch: int = 0
    compiled: bool = True

    @property
    def total_envs(self) -> int:
        """Number of environments in all processes together."""
        return max(1, self.workers) * self.envs

    @property
    def complexity(self) -> tuple[int, ...]:
        """Key that sorts candidates from the simplest to the most complex."""
        processes = self.workers + self.env_processes
        size = self.total_envs, self.frames_per_batch
        return (processes, not self.sync, self.prefetch, *size, self.compiled)

    def chosen(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of a collector's other options that belong to the layout."""
        return {k: v for k, v in options.items() if self.compiled or k != "compile_policy"}

    def options(self, source: Any, env_kwargs: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the arguments of :class:`~trawl.Collector` that select this layout.

        Args:
            source: the source of one environment: an id, or a function that makes it.
            env_kwargs: keyword arguments for the function that makes the environment.
        """
        found: dict[str, Any] = {"frames_per_batch": self.frames_per_batch}
        if env_kwargs and not self.env_processes:
            found["create_env_kwargs"] = dict(env_kwargs)
        each = [source] * self.envs if self.envs > 1 else source
        if self.env_processes:
            each = partial(
                ParallelEnv,
                self.envs,
                source,
                create_env_kwargs=env_kwargs,
                envs_per_worker=self.envs // self.env_processes,
            )
        if not self.workers:
            return {"create_env_fn": each, **found}
        if self.prefetch:
            found["prefetch"] = self.prefetch
        sources = [each] * self.workers
        return {
            "create_env_fn": sources,
            "num_collectors": self.workers,
            "sync": self.sync,
            **found,
        }

    @property
    def label(self) -> str:
        """Short name for tables.

        Examples:
            >>> Candidate(workers=2, envs=4, frames_per_batch=800, sync=False).label
            '2 workers x 4 envs, async'
        """
        return self._place + ("" if self.compiled else ", not compiled")

    @property
    def _place(self) -> str:
        if self.env_processes:
            each = self.envs // self.env_processes
            return f"ParallelEnv, {self.env_processes} x {_envs(each)}"
        if not self.workers:
            return f"one process, {_envs(self.envs)}"
        order = "sync" if self.sync else "async"
        ahead = f", prefetch={self.prefetch}" if self.prefetch else ""
        return f"{plural(self.workers, 'worker')} x {_envs(self.envs)}, {order}{ahead}"

    def __str__(self) -> str:
        return self._sentence + ("" if self.compiled else " and no compile_policy")

    @property
    def _sentence(self) -> str:
        envs = plural(self.envs, "environment")
        if self.env_processes:
            return f"a ParallelEnv of {envs} in {plural(self.env_processes, 'process')}"
        if not self.workers:
            return f"one process with {envs}"
        kind = "synchronous worker" if self.sync else "asynchronous worker"
        ahead = f" and prefetch={self.prefetch}" if self.prefetch else ""
        each = " each" if self.workers > 1 else ""
        return f"{plural(self.workers, kind)} with {envs}{each}{ahead}"


def _envs(count: int) -> str:
    return plural(count, "env")
