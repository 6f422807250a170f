"""Calls of a policy for some of the environments, whose data are rows of arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trawl.keys import Key
from trawl.memory import Array
from trawl.rollout.device_transfer import DeviceTransfer
from trawl.rollout.layout import Leaf
from trawl.rollout.plan import Plan
from trawl.rollout.policy import Policy
from trawl.rollout.policy_leaves import PolicyLeaves
from trawl.rollout.policy_outputs import array_checker

Rows = NDArray[np.int64]
_HINT = (
    "The policy acts for the environments that are ready, whose number changes from call to call "
    "unless server_config has static_batch_size. "
)


class ReadyPolicy:
    """A policy that is called for some rows of arrays that have a row for each environment.

    Args:
        policy: the policy.
        leaves: entries that the policy writes.
        roots: layout of the entries that the environments write.
        before: arrays of the entries that the policy can read, except flags, which are False.
        begun: arrays of the entries that the policy writes.
        size: number of rows in each call, filled up with copies of the last row; None for no
            filling.
        transfer: copies to and from the policy's device; None if the policy is on the CPU.
    """

    def __init__(
        self,
        policy: Policy,
        leaves: PolicyLeaves,
        roots: Mapping[Key, Leaf],
        before: Mapping[Key, Array],
        begun: Mapping[Key, Array],
        size: int | None,
        transfer: DeviceTransfer | None,
    ) -> None:
        self._policy, self._size = policy, size
        self._transfer = transfer
        self._before, self._begun = before, begun
        self._leaves = {**leaves.read_later, **roots}
        self._plan = policy.direct(set(self._leaves))
        self._plans: dict[int, Plan] = {}
        self._checkers = {
            key: array_checker(key, leaf.dtype, leaves.convert[key], 1, _HINT)
            for key, leaf in leaves.written.items()
        }

    def call(self, chosen: Rows) -> None:
        """Acts for some environments: writes the policy's entries into their rows."""
        padded = chosen
        if self._size is not None and len(chosen) < self._size:
            padded = np.concatenate([chosen, np.repeat(chosen[-1:], self._size - len(chosen))])
        plan = self._plan or self._plan_for(len(padded))
        outputs = plan.call(*self._inputs(plan, padded))
        if len(plan.writes) == 1:
            outputs = (outputs,)
        if self._transfer is not None:
            outputs = self._transfer.receive(outputs)
        for key, value in zip(plan.writes, outputs, strict=True):
            target = self._begun[key]
            array = self._checkers[key](value, (len(padded), *target.shape[1:]))
            target[chosen] = array[: len(chosen)]

    def _plan_for(self, count: int) -> Plan:
        """Returns a plan for ``count`` rows, for a policy that needs a TensorDict."""
        found = self._plans.get(count)
        if found is None:
            found = self._policy.plan(set(self._leaves), (count,))
            self._plans[count] = found
        return found

    def _inputs(self, plan: Plan, chosen: Rows) -> list[Tensor]:
        """Returns copies of the entries that the policy reads, on its device."""
        if self._transfer is not None:
            leaves = {key: self._leaves[key] for key in plan.reads}
            sent = self._transfer.send(leaves, self._before, chosen)
            return [sent[key] for key in plan.reads]
        return [self._input(key, chosen) for key in plan.reads]

    def _input(self, key: Key, chosen: Rows) -> Tensor:
        found, leaf = self._before.get(key), self._leaves[key]
        if found is None:
            # The flags before a step are always False.
            return torch.zeros((len(chosen), *leaf.shape), dtype=leaf.dtype)
        tensor = torch.from_numpy(found[chosen])
        # The arrays of bfloat16 entries are int16.
        return tensor if tensor.dtype is leaf.dtype else tensor.view(leaf.dtype)
