"""Learners whose weights never reach the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from trawl.collectors.config import warn


class UnsentWeights:
    """Tells a user whose policy learns, and who never sends its weights to the workers.

    TorchRL's workers on the same machine share the learner's memory, so that programs without any
    update work there.

    Args:
        policies: what the workers were given copies of.
        sent: how many updates there were until now.
    """

    def __init__(self, policies: Sequence[Any], sent: Callable[[], int]) -> None:
        modules = {id(policy): policy for policy in policies if isinstance(policy, nn.Module)}
        parameters = (one for module in modules.values() for one in module.parameters())
        self._parameters = [one for one in parameters if not (is_lazy(one) or one.is_inference())]
        self._sent, self._before = sent, (sent(), self._changes())
        self._batches = 0

    def _changes(self) -> list[int]:
        return [one._version for one in self._parameters]

    def settled(self) -> bool:
        """Whether there is nothing to tell any more: it was told, or weights were sent.

        To be called before each batch. It looks before the first, the second, the fourth, and so
        on, and so takes no time.
        """
        self._batches += 1
        if self._batches & (self._batches - 1):
            return False
        sent, changes = self._before
        if self._sent() != sent:
            return True
        if self._changes() == changes:
            return False
        warn(
            "the policy's weights have changed, but workers act with those that it had when the "
            "collector was made: update_policy_weights_() was never called. Call it after each "
            "step of the optimiser, or give update_at_each_batch=True"
        )
        return True
