"""The layouts among which :func:`~trawl.tune` searches."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trawl.extras.tuning.candidate import Candidate

# Numbers of environments that one process steps: the policy is called once for all of them.
_ENVS = (1, 4, 16)
# Environments that wait take no processor meanwhile, so more processes than cores pay off. The
# policy is called rarely then, so few environments in a process show what more of them would.
_ENVS_THAT_WAIT = (1, 4)
_PROCESSES_PER_CORE = 8
_MOST_THAT_WAIT = 64
# Factor between two sizes of a batch.
_LARGER = 4


def usable_cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def most_processes(cores: int, waits: bool) -> int:
    """Returns the largest number of processes that can pay off.

    Args:
        cores: number of usable cores.
        waits: True if the environment mostly waits, and leaves its core to others.
    """
    return max(cores, min(_MOST_THAT_WAIT, cores * _PROCESSES_PER_CORE)) if waits else cores


def powers_of_two(limit: int) -> list[int]:
    """Returns the powers of two below ``limit``, followed by ``limit``.

    Examples:
        >>> powers_of_two(12)
        [1, 2, 4, 8, 12]
    """
    return [1 << i for i in range((limit - 1).bit_length())] + [limit]


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """All layouts that can be tried, and an order in which to try them.

    Attributes:
        processes: largest number of workers or of environment processes.
        frames: number of frames in a batch. Each layout rounds it to whole steps of all its
            environments.
        fixed_frames: True if ``frames`` is the only size of a batch. It is then rounded up, as a
            collector does.
        envs_per_process: numbers of environments that one process steps.
        max_envs: largest number of environments in all processes together; None for no limit.
        sync: True or False if workers have to be synchronous or asynchronous; None for both.
        learner: True if a learner works between batches. Only then do one worker and ``prefetch``
            gain anything, because the learner and the worker work at the same time.
        compiled: True if the policy is compiled. The best layouts are then tried without it, too.
    """

    processes: int
    frames: int
    fixed_frames: bool = False
    envs_per_process: tuple[int, ...] = _ENVS
    max_envs: int | None = None
    sync: bool | None = None
    learner: bool = False
    compiled: bool = False

    def initial(self) -> list[Candidate]:
        """Returns the layouts that are measured first.

        The simplest one comes first, then the most promising ones, in case there is no time for
        all of them.
        """
        counts = [self.processes]
        if self.processes >= 8:
            counts.append(self.processes // 4)
        if self.learner and self.processes > 1:
            counts.append(1)
        rows = [self._one(1)]
        for envs in reversed(self.envs_per_process):
            rows.append(self._one(envs))
            for count in counts:
                rows += self._workers(count, envs)
                rows.append(self._parallel(count, envs))
        return self._allowed(rows)

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Returns the layouts that differ from ``candidate`` in one number."""
        rows: list[Candidate] = []
        for count in _near(candidate.workers, self.processes):
            envs = candidate.envs
            rows += (each for each in self._workers(count, envs) if _same_order(each, candidate))
        for count in _near(candidate.env_processes, self.processes):
            rows.append(self._parallel(count, candidate.envs // candidate.env_processes))
        if not self.fixed_frames and candidate.frames_per_batch < 2 * self.frames:
            rows.append(replace(candidate, frames_per_batch=_LARGER * candidate.frames_per_batch))
        if self.compiled:
            rows.append(replace(candidate, compiled=False))
        return self._allowed(rows)

    def everything(self) -> list[Candidate]:
        """Returns all layouts that a search can reach."""
        found = self.initial()
        for candidate in found:  # grows meanwhile
            found += (each for each in self.neighbours(candidate) if each not in found)
        return found

    def _one(self, envs: int) -> Candidate:
        return Candidate(envs=envs, frames_per_batch=self._frames(envs))

    def _workers(self, count: int, envs: int) -> Iterator[Candidate]:
        if self.sync is not False:
            joint = Candidate(
                workers=count, envs=envs, frames_per_batch=self._frames(count * envs), sync=True
            )
            yield joint
            if self.learner:
                yield replace(joint, prefetch=1)
        if self.sync is not True:
            # A batch has the frames of one worker.
            frames = self._frames(envs)
            yield Candidate(workers=count, envs=envs, frames_per_batch=frames, sync=False)

    def _parallel(self, count: int, envs: int) -> Candidate:
        total = count * envs
        frames = self._frames(total)
        return Candidate(envs=total, env_processes=count, frames_per_batch=frames)

    def _frames(self, envs: int) -> int:
        if self.fixed_frames:
            return math.ceil(self.frames / envs) * envs
        return max(1, round(self.frames / envs)) * envs

    def _allowed(self, rows: list[Candidate]) -> list[Candidate]:
        return [each for each in dict.fromkeys(rows) if self._is_allowed(each)]

    def _is_allowed(self, candidate: Candidate) -> bool:
        if candidate.workers == 1 and not self.learner:
            return False  # like one process, with the cost of a second
        if candidate.env_processes == 1 or candidate.total_envs > (self.max_envs or 1 << 62):
            return False
        # Each batch has at least one frame of each environment.
        per_batch = candidate.total_envs if candidate.sync else candidate.envs
        return per_batch <= (self.frames if self.fixed_frames else candidate.frames_per_batch)


def space_for(
    *,
    cores: int,
    waits: bool,
    batched: bool,
    frames: int,
    fixed_frames: bool,
    max_workers: int | None,
    max_envs: int | None,
    sync: bool | None,
    learner: bool,
    compiled: bool = False,
) -> SearchSpace:
    """Returns the search space for an environment on this machine.

    Args:
        cores: number of usable cores.
        waits: True if the environment mostly waits, and leaves its core to others.
        batched: True if the environment is itself a batch of environments.
        frames: number of frames in a batch.
        fixed_frames: True if ``frames`` is the only size of a batch.
        max_workers: largest number of processes; None to derive it from ``cores``.
        max_envs: largest number of environments in total; None for no limit.
        sync: restriction to synchronous or asynchronous workers; None for both.
        learner: True if a learner works between batches.
        compiled: True if the policy is compiled.
    """
    envs = (1,) if batched else _ENVS_THAT_WAIT if waits else _ENVS
    return SearchSpace(
        processes=most_processes(cores, waits) if max_workers is None else max_workers,
        frames=frames,
        fixed_frames=fixed_frames,
        envs_per_process=envs,
        max_envs=max_envs,
        sync=sync,
        learner=learner,
        compiled=compiled,
    )


def _near(count: int, limit: int) -> list[int]:
    """Returns half and twice a number of processes, and one less than all cores have room for."""
    if not count:
        return []
    near = [count // 2, count * 2, *([limit - 1] if count == limit else [])]
    return [each for each in near if 1 <= each <= limit]


def _same_order(one: Candidate, other: Candidate) -> bool:
    return one.sync == other.sync and one.prefetch == other.prefetch
