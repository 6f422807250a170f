"""Warning for programs whose learner never sends its weights to the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from trawl.collectors.config import warn
from trawl.foreign.torch import writes_of

# Number of checks before the warning, counted from the first one that finds a change. The first
# change is not enough, because some learners send weights rarely.
_PATIENCE = 4
# Maximum number of batches of each worker between two checks.
_LONGEST_PAUSE = 64


class UnsentWeights:
    """Warns the user once if the policy's weights change but are never sent to the workers.

    With TorchRL, programs work without any update, because workers on the same machine share the
    learner's memory. Changes through ``parameter.data`` are not detected.

    Args:
        policies: the policies of which the workers have copies.
        parts: number of calls of :meth:`settled` in which each worker makes one batch.
        sent: function that returns the number of updates so far.
    """

    def __init__(self, policies: Sequence[Any], parts: int, sent: Callable[[], int]) -> None:
        self._modules = {id(one): one for one in policies if isinstance(one, nn.Module)}.values()
        self._sent, self._before = sent, (sent(), self._state())
        self._parts, self._calls, self._found, self._due = parts, 0, 0, 1

    def _state(self) -> list[tuple[int, int]]:
        """Returns values that change if a parameter is written to, replaced or given new memory."""
        return [
            (writes_of(one), one.data_ptr())
            for module in self._modules
            for one in module.parameters()
            if not (is_lazy(one) or one.is_inference())
        ]

    def settled(self) -> bool:
        """Warns if needed; called before each batch.

        To save time, the weights are checked only after each worker has made 1, 2, 4, …, 64, 128,
        192, … batches. After a check that finds a change, the next checks follow at intervals of
        1, 2 and 4 batches.

        Returns:
            True if no further call is needed, because weights were sent or the warning was given.
        """
        rounds, rest = divmod(self._calls, self._parts)
        self._calls += 1
        if rest or rounds != self._due:
            return False
        sent, state = self._before
        if self._sent() != sent:
            return True
        if self._found or self._state() != state:
            self._due += 2**self._found
            self._found += 1
        else:
            self._due += min(rounds, _LONGEST_PAUSE)
        if self._found < _PATIENCE:
            return False
        warn(
            "the policy's weights have changed, but update_policy_weights_() was never called: "
            "workers still act with the weights that the policy had when the collector was made. "
            "Call update_policy_weights_() after each optimiser step, or pass "
            "update_at_each_batch=True. If you mean to send the weights later, ignore this "
            "warning"
        )
        return True
