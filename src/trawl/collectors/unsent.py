"""A warning of learners whose weights never reach the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from trawl.collectors.config import warn

# It warns after so many looks that found changes: some learners send their weights now and then.
_PATIENCE = 4


class UnsentWeights:
    """Warns a user, once, if the policy learns and the workers are never sent its weights.

    TorchRL's workers on the same machine share the learner's memory, so that programs without any
    update work there.

    Args:
        policies: what the workers were given copies of.
        parts: number of calls of :meth:`settled` for one batch of each worker.
        sent: how many updates there were until now.
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
        """Warns if it has to; tells whether it is over, as weights were sent or it has warned.

        To be called before each batch. It looks when workers have made one, two, four, and so on,
        batches each, and so takes no time.
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
