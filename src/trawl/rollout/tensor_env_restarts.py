"""Restarts of a failed environment whose data are tensors: it is rebuilt, and collection goes on.

See :mod:`trawl.rollout.env_restarts`. All sub-environments fail together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from trawl.envs.tensor_env import TensorEnv
from trawl.keys import DONE, MASK, TRUNCATED, Key
from trawl.rollout.batch_writer import StepFn
from trawl.rollout.env_restarts import EnvRestarts, FailureCounter
from trawl.rollout.policy_leaves import PolicyLeaves
from trawl.rollout.tensor_block import TensorBlock
from trawl.rollout.tensor_stepper import StepSource, TensorStepper


class RestartingTensorStepper(TensorStepper):
    """Steps an environment of tensors, and rebuilds it after a failure.

    Args:
        env: the environment.
        source: the environment, or an object that takes its steps and changes the results.
        limit: number of steps after which an episode is cut off; None for no limit.
        leaves: entries that the policy writes.
        next_row: for each entry of the next frame, the row after a batch's last row.
        restarts: the collector's record of failures.

    Attributes:
        cut: True if the step of the first row of the batch failed.
    """

    def __init__(
        self,
        env: TensorEnv,
        source: StepSource,
        limit: int | None,
        leaves: PolicyLeaves,
        next_row: Mapping[Key, Tensor],
        restarts: EnvRestarts,
    ) -> None:
        super().__init__(env, source, limit, leaves, next_row)
        self._rebuilt = env
        self._counter = FailureCounter(restarts, 0, env.batch_size.numel())
        self.cut = False

    @override
    def bind(self, block: TensorBlock, start: int, stop: int) -> StepFn:
        step_env, counter = super().bind(block, start, stop), self._counter

        def step(t: int) -> None:
            self.taken = -1
            try:
                step_env(t)
            except Exception as error:
                self._recover(error, block, start, stop, t)
            else:
                counter.failures = 0

        return step

    def _recover(self, error: Exception, block: TensorBlock, start: int, stop: int, t: int) -> None:
        row, tensors = start + t, block.tensors
        # The flags are written after a step and before the reset that may follow it.
        taken = self.taken == t
        begun = self._counter.restart(error, row, self._rebuild, taken)
        everywhere = torch.ones_like(tensors[MASK][row])
        if taken:
            _truncate(tensors, row)
        else:
            for key, rows in tensors.items():
                if key[0] == "next":
                    rows[row] = 0
            tensors[MASK][row] = False
            if row:
                _truncate(tensors, row - 1)
            else:
                # The last frames of the episodes have been delivered.
                self.cut = True
        self.latest = begun
        for key, value in zip(self._env.observation_keys, begun, strict=True):
            self._following(block, key, start, stop)[t].copy_(value)
        for write in self._followers(block, start, stop):
            write(t, everywhere)

    def _rebuild(self) -> list[Tensor]:
        self._rebuilt.rebuild()
        return self._source.begin(None)


def _truncate(tensors: Mapping[Key, Tensor], row: int) -> None:
    """Ends the episodes of the frames in a row that have not ended there."""
    going = (tensors[MASK][row] & ~tensors[DONE][row, :, 0]).unsqueeze(-1)
    for key in (TRUNCATED, DONE):
        tensors[key][row] |= going
