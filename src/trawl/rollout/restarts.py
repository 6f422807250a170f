"""Restarts of failed environments: they are rebuilt, and collection continues.

A failed step is not experience. Its row is masked out, like the row of a step that was only a
reset, and the previous frame ends the episode as truncated. If a reset fails, the step before it
has succeeded, so nothing is masked. Frames that are TensorDicts are the exception, if the reset is
of some environments of a vector: their step is masked out for the vector as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor

from trawl.envs.base import TensorDictEnv
from trawl.envs.processes.parallel import ParallelEnv
from trawl.errors import add_note
from trawl.tensordicts import broadcastable

# Restarts are for occasional failures. An environment that fails this many times without a
# successful step in between is broken, and rebuilding it forever would hide the problem.
MOST_FAILURES = 10


class EnvRestarts:
    """Record of the failures of all environments of a collector.

    Args:
        warn: function that warns the user of a failure.
        remake: function that rebuilds, as a whole, an environment that isn't Trawl's own.

    Attributes:
        count: number of times that an environment was rebuilt.
        steps_done: steps that each environment had taken before this batch.
    """

    def __init__(self, warn: Callable[[str], None], remake: Callable[[], Any]) -> None:
        self.warn = warn
        self.remake = remake
        self.count = 0
        self.steps_done = 0


class FailureCounter:
    """Tracks the failures of one environment, or of several that are rebuilt together.

    Args:
        restarts: record of all failures.
        first: index of the first environment in the batch.
        num_envs: number of environments.

    Attributes:
        num_envs: number of environments.
        failures: number of failures since the last successful step.
    """

    def __init__(self, restarts: EnvRestarts, first: int, num_envs: int) -> None:
        self.restarts = restarts
        self.num_envs = num_envs
        self.failures = 0
        self._last_failed = -1
        last = first + num_envs - 1
        self._which = f"environment {first}" if num_envs == 1 else f"environments {first} to {last}"

    def failed_in(self, row: int) -> bool:
        """Returns True if the last failure was in ``row`` of this batch."""
        return self._last_failed == self.restarts.steps_done + row

    def restart(
        self,
        error: Exception,
        row: int,
        rebuild: Callable[[], Any],
        after_step: bool = False,
        when: str | None = None,
    ) -> Any:
        """Rebuilds the environment after an error in ``row`` of the batch.

        Args:
            error: the exception that was raised.
            row: row of the batch.
            rebuild: function that rebuilds the environment and resets it.
            after_step: True if the step succeeded and the reset after it failed.
            when: text that says when it failed; by default, the number of the step.

        Returns:
            The result of ``rebuild``.

        Raises:
            Exception: ``error``, if the environment can't be rebuilt, or has failed
                ``MOST_FAILURES`` times without a successful step.
        """
        self.failures = 1 if after_step else self.failures + 1
        self._last_failed = self.restarts.steps_done + row
        if self.failures >= MOST_FAILURES:
            add_note(error, f"{self._which} failed {self.failures} times without a successful step")
            raise error
        try:
            result = rebuild()
        except Exception as why:
            cause = f"{type(why).__name__}: {why}"
            add_note(error, f"{self._which} could not be rebuilt after this error: {cause}")
            raise error from why
        self.restarts.count += 1
        when = f"at step {self._last_failed} (from 0)" if when is None else when
        self.restarts.warn(
            f"{self._which} failed {when} with "
            f"{_in_short(error)}; rebuilt because of on_env_error='restart'"
        )
        return result


def _in_short(error: Exception) -> str:
    """Returns an error's type and the first line of its text, without a worker's traceback."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


class PartFailures:
    """Tracks the failures of each part of one of Trawl's own environments.

    Args:
        env: the environment.
        restarts: the collector's record of failures.
    """

    def __init__(self, env: TensorDictEnv, restarts: EnvRestarts) -> None:
        self._batch = env.batch_size
        self._records: Sequence[TensorDictBase] = ()
        # By part, a counter for each of its members.
        self._counters: list[tuple[TensorDictEnv, list[FailureCounter]]] = []
        first = 0
        for part in env.parts:
            count = part.num_members
            each = max(1, part.batch_size.numel() // count)
            places = range(first, first + count * each, each)
            self._counters.append((part, [FailureCounter(restarts, at, each) for at in places]))
            first += count * each

    def begin(self, records: Sequence[TensorDictBase]) -> None:
        """Restarts parts that fail from now on; ``records`` will get the frames of the batch."""
        self._records = records
        for part, counters in self._counters:
            part.on_error = partial(self._restart, part, counters)

    def end(self) -> None:
        """Stops restarting parts, so that failures raise errors from now on."""
        for part, _ in self._counters:
            part.on_error = None

    def failed(self) -> Tensor:
        """Returns a mask of the environments whose last step failed, of shape ``batch_size``."""
        flags = [
            index in part.failed
            for part, counters in self._counters
            for index, counter in enumerate(counters)
            for _ in range(counter.num_envs)
        ]
        return torch.tensor(flags).reshape(self._batch)

    def clear_successful(self) -> None:
        """Clears the failure counts of the parts whose step in the current row succeeded."""
        for part, counters in self._counters:
            for index, counter in enumerate(counters):
                if index not in part.failed and not counter.failed_in(len(self._records)):
                    counter.failures = 0

    def _restart(
        self,
        part: TensorDictEnv,
        counters: Sequence[FailureCounter],
        error: Exception,
        after_step: bool,
        member: int,
    ) -> None:
        rebuild = partial(part.restart, member)
        counters[member].restart(error, len(self._records), rebuild, after_step)


class ParallelRepairs:
    """Restarts the environments of a :class:`ParallelEnv` that fail, or whose process dies.

    Args:
        env: the environments.
        restarts: the collector's record of failures.
        first: index of the first environment in the batch.
    """

    def __init__(self, env: ParallelEnv, restarts: EnvRestarts, first: int = 0) -> None:
        env.processes.tolerant = True
        assert env.buffers is not None
        self._env, self._processes, self._buffers = env, env.processes, env.buffers
        per_env = env.buffers.rows_per_env
        self._counters = [
            FailureCounter(restarts, first + index * per_env, per_env)
            for index in range(env.num_workers)
        ]
        # Errors of environments whose group is not waited for yet, and environments without a
        # successful step since their last failure.
        self._errors: dict[int, Exception] = {}
        self._failing: set[int] = set()

    def restart(self, chosen: slice, row: int) -> list[int]:
        """Restarts the environments of a group that have failed in a step.

        Args:
            chosen: rows of the group's environments.
            row: row of the step in the batch.

        Returns:
            The rows of the failed environments, counted from the group's first row.

        Raises:
            Exception: the error of an environment that fails again and again.
        """
        self._errors |= self._processes.take_failures()
        if not (self._errors or self._failing):
            return []
        buffers = self._buffers
        group = range(chosen.start // buffers.rows_per_env, chosen.stop // buffers.rows_per_env)
        failed: set[int] = set()
        while found := {env: self._errors.pop(env) for env in group if env in self._errors}:
            failed |= found.keys()
            for env, error in found.items():
                self.begin(env, error, row)
            self._processes.wait_for_restarts()
            self._errors |= self._processes.take_failures()
        self.succeeded(env for env in group if env not in failed)
        places = [buffers.rows(env) for env in sorted(failed)]
        rows = [row for place in places for row in range(place.start, place.stop)]
        # The step left nothing valid there.
        buffers.discard(rows)
        return [row - chosen.start for row in rows]

    def begin(self, env: int, error: Exception, row: int, when: str | None = None) -> None:
        """Begins to restart an environment.

        Args:
            env: number of the environment.
            error: the error.
            row: row of the step in the batch.
            when: text that says when it failed; by default, the number of the step.

        Raises:
            Exception: ``error``, if the environment fails again and again.
        """
        self._failing.add(env)
        rebuild = partial(self._env.begin_restart, env)
        self._counters[env].restart(error, row, rebuild, when=when)

    def succeeded(self, envs: Iterable[int]) -> None:
        """Notes that environments have taken a step without failing."""
        if self._failing:
            for env in self._failing.intersection(envs):
                self._counters[env].failures = 0
                self._failing.discard(env)

    def failures(self) -> list[int]:
        """Returns the number of failures of each environment since its last successful step."""
        return [counter.failures for counter in self._counters]

    def load_failures(self, failures: Sequence[int]) -> None:
        """Restores what :meth:`failures` has returned."""
        for counter, count in zip(self._counters, failures, strict=True):
            counter.failures = count
        self._failing = {env for env, count in enumerate(failures) if count}


def emptied(following: TensorDictBase, blank: TensorDictBase, mask: Tensor) -> TensorDictBase:
    """Returns ``following`` with blank entries where ``mask`` is True.

    Args:
        following: the TensorDict under ``"next"``.
        blank: the TensorDict under ``"next"`` in a frame of zeros.
        mask: mask of the environments; bool, of the batch size.
    """
    keys = list(blank.keys(True, True, is_leaf=is_leaf_nontensor))
    if mask.all():
        result = blank.copy()
    else:
        here = mask.to(following.device or "cpu")
        result = torch.where(here, blank, following.select(*keys))
    for key in following.keys(True, True):
        if key not in keys:
            value: Any = following.get(key)
            result.set(key, value.masked_fill(broadcastable(mask, value), 0))
    return result
