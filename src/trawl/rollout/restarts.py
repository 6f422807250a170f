"""Restarts of environments that fail: they are rebuilt, and collection goes on.

A step that failed is no experience: its row is masked out, like the row of a step that an
environment spent on a reset. The episode ends as truncated with the frame before it. If a reset
failed, the step before it succeeded, and nothing is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trawl.errors import add_note

# Restarts are for occasional failures. An environment that fails so many times without a good
# step in between is broken, and rebuilding it forever would hide that.
MOST_FAILURES = 10


class Restarts:
    """Record of the failures of all environments of a collector.

    Args:
        warn: warns the user of a failure.
        remake: rebuilds an environment that isn't one of Trawl's, as a whole.

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
        failures: failures since the last good step.
    """

    def __init__(self, restarts: Restarts, first: int, num_envs: int) -> None:
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
        self, error: Exception, row: int, rebuild: Callable[[], Any], after_step: bool
    ) -> Any:
        """Rebuilds the environment after an error in ``row`` of the batch.

        Args:
            error: the exception that was raised.
            row: row of the batch.
            rebuild: rebuilds the environment, and resets it.
            after_step: True if the step succeeded and the reset after it failed.

        Returns:
            The result of ``rebuild``.

        Raises:
            Exception: ``error``, if the environment can't be rebuilt, or has failed
                ``MOST_FAILURES`` times without a good step.
        """
        self.failures = 1 if after_step else self.failures + 1
        self._last_failed = self.restarts.steps_done + row
        if self.failures >= MOST_FAILURES:
            add_note(error, f"{self._which} failed {self.failures} times without a good step")
            raise error
        try:
            result = rebuild()
        except Exception as why:
            told = f"{type(why).__name__}: {why}"
            add_note(error, f"{self._which} could not be built anew after this: {told}")
            raise error from why
        self.restarts.count += 1
        self.restarts.warn(
            f"{self._which} failed at step {self._last_failed} (from 0) with "
            f"{type(error).__name__}: {error}; built anew, as on_env_error='restart' asks"
        )
        return result
