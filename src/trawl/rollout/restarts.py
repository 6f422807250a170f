"""What is done when an environment fails: it is built anew, and collection goes on.

The step that failed is no experience: its row is masked out, as that of a step which an
environment spent on resetting. The episode ends as truncated with the frame before it. Where a
reset failed, the step before it was a good one, and nothing is masked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trawl.errors import add_note

# A failure now and then is what a restart is for. An environment that has never taken a step in
# so many attempts is broken, and building it anew for ever would hide that.
MOST_FAILURES = 10


class Restarts:
    """What is known of failures, for all environments of a collector.

    Args:
        warn: tells the user of a failure.
        remake: makes an environment that isn't one of Trawl's anew, as a whole.

    Attributes:
        count: how often an environment was built anew.
        steps_done: steps that each environment had taken before this batch.
    """

    def __init__(self, warn: Callable[[str], None], remake: Callable[[], Any]) -> None:
        self.warn = warn
        self.remake = remake
        self.count = 0
        self.steps_done = 0


class Watch:
    """Follows the failures of what is built anew as one.

    Args:
        restarts: what is known of all.
        first: number of its first environment in the batch.
        lanes: how many environments it is.

    Attributes:
        lanes: how many environments it is.
        failures: failures since the last good step.
    """

    def __init__(self, restarts: Restarts, first: int, lanes: int) -> None:
        self.restarts = restarts
        self.lanes = lanes
        self.failures = 0
        self._last_failed = -1
        last = first + lanes - 1
        self._which = f"environment {first}" if lanes == 1 else f"environments {first} to {last}"

    def failed_in(self, row: int) -> bool:
        """Whether the last failure was in ``row`` of this batch."""
        return self._last_failed == self.restarts.steps_done + row

    def restart(
        self, error: Exception, row: int, rebuild: Callable[[], Any], after_step: bool
    ) -> Any:
        """Builds the environment anew after an error in ``row`` of the batch.

        Args:
            error: what was raised.
            row: where.
            rebuild: makes the environment anew, and resets it.
            after_step: whether the step was a good one, and what failed is the reset after it.

        Returns:
            What ``rebuild`` returned.

        Raises:
            Exception: the error, if the environment can't be built, or fails again and again.
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
