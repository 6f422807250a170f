"""Restarts of environments that step TensorDicts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor

from trawl.envs.base import TensorDictEnv
from trawl.envs.gym import GymEnv
from trawl.keys import Key
from trawl.rollout.restarts import FailureCounter, Restarts
from trawl.tensordicts import broadcastable


class PartFailures:
    """Tracks the failures of each part of one of Trawl's environments.

    Args:
        env: the environment.
        restarts: the collector's record of failures.
    """

    def __init__(self, env: TensorDictEnv, restarts: Restarts) -> None:
        self._batch = env.batch_size
        self._records: Sequence[TensorDictBase] = ()
        self._watched: list[tuple[GymEnv, FailureCounter]] = []
        first = 0
        for part in env.parts:
            num_envs = max(1, part.batch_size.numel())
            self._watched.append((part, FailureCounter(restarts, first, num_envs)))
            first += num_envs

    def begin(self, records: Sequence[TensorDictBase]) -> None:
        """Restarts parts that fail from now on; ``records`` will be the frames of the batch."""
        self._records = records
        for part, watch in self._watched:
            part.on_error = partial(self._restart, part, watch)

    def end(self) -> None:
        """Lets failures raise from now on."""
        for part, _ in self._watched:
            part.on_error = None

    def failed(self) -> Tensor:
        """Returns a bool mask of the last step's failures, of the environment's batch size."""
        flags = [
            torch.full((watch.num_envs,), part.step_failed, dtype=torch.bool)
            for part, watch in self._watched
        ]
        return torch.cat(flags).reshape(self._batch)

    def forgive(self) -> None:
        """Clears the failures of parts whose step in the current row succeeded."""
        for part, watch in self._watched:
            if not part.step_failed and not watch.failed_in(len(self._records)):
                watch.failures = 0

    def _restart(
        self, part: GymEnv, watch: FailureCounter, error: Exception, after_step: bool
    ) -> None:
        watch.restart(error, len(self._records), part.restart, after_step)


def break_off(frame: TensorDictBase, done_keys: Sequence[Key], mask: Tensor) -> None:
    """Marks the episodes in ``mask`` as truncated by ``frame``, unless they ended anyway.

    It sets new tensors, because the next step shares the existing ones.

    Args:
        frame: a frame.
        done_keys: keys of the flags that mark the end of an episode.
        mask: mask of the environments; bool, of the frame's batch size.
    """
    for key in done_keys:
        if key[-1] != "done":
            continue
        done = frame.get(key)
        cut = broadcastable(mask, done) & ~done
        for name in ("done", "truncated"):
            flags = frame.get((*key[:-1], name), None)
            if flags is not None:
                frame.set((*key[:-1], name), flags | cut)


def emptied(following: TensorDictBase, blank: TensorDictBase, mask: Tensor) -> TensorDictBase:
    """Returns ``following`` with blank entries in ``mask``.

    Args:
        following: the TensorDict under ``"next"``.
        blank: the TensorDict under ``"next"`` of the environment's frame of zeros.
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
