"""Warning for programs whose learner never sends its weights to the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from trawl.collectors.config import warn

# Number of checks that must find changes before the warning: some learners send weights rarely.
_PATIENCE = 4


class UnsentWeights:
    """Warns the user once if the policy's weights change but are never sent to the workers.

    TorchRL's workers on the same machine share the learner's memory, so programs without any
    update work there.

    Args:
        policies: the policies of which the workers have copies.
        parts: number of calls of :meth:`settled` for one batch of each worker.
        sent: returns the number of updates so far.
    """

    def __init__(self, policies: Sequence[Any], parts: int, sent: Callable[[], int]) -> None:
        modules = {id(policy): policy for policy in policies if isinstance(policy, nn.Module)}
        parameters = (one for module in modules.values() for one in module.parameters())
        self._parameters = [one for one in parameters if not (is_lazy(one) or one.is_inference())]
        self._sent, self._before = sent, (sent(), self._changes())
        self._parts, self._calls, self._found = parts, 0, 0

    def _changes(self) -> list[int]:
        return [one._version for one in self._parameters]

    def settled(self) -> bool:
        """Warns if needed; called before each batch.

        The weights are checked only after each worker has made 1, 2, 4, 8, … batches, so this
        takes no time.

        Returns:
            True if no further call is needed, as weights were sent or the warning was given.
        """
        rounds, rest = divmod(self._calls, self._parts)
        self._calls += 1
        if rest or not rounds or rounds & (rounds - 1):
            return False
        sent, changes = self._before
        if self._sent() != sent:
            return True
        self._found += self._changes() != changes
        if self._found < _PATIENCE:
            return False
        warn(
            "the policy's weights have changed, but workers act with copies of those that it had "
            "when the collector was made: update_policy_weights_() was never called. Call it after "
            "each step of the optimiser, or pass update_at_each_batch=True"
        )
        return True
