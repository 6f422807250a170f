"""Environments that step TensorDicts, and are built anew when they fail."""

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
from trawl.rollout.restarts import Restarts, Watch


class PartWatches:
    """Follows the failures of each part of one of Trawl's environments.

    Args:
        env: the environment.
        restarts: what is known of failures.
    """

    def __init__(self, env: TensorDictEnv, restarts: Restarts) -> None:
        self._batch = env.batch_size
        self._records: Sequence[TensorDictBase] = ()
        self._watched: list[tuple[GymEnv, Watch]] = []
        first = 0
        for part in env.parts:
            lanes = max(1, part.batch_size.numel())
            self._watched.append((part, Watch(restarts, first, lanes)))
            first += lanes

    def begin(self, records: Sequence[TensorDictBase]) -> None:
        """From now on failures are dealt with; ``records`` will be the frames of the batch."""
        self._records = records
        for part, watch in self._watched:
            part.on_error = partial(self._restart, part, watch)

    def end(self) -> None:
        """From now on failures are raised."""
        for part, _ in self._watched:
            part.on_error = None

    def failed(self) -> Tensor:
        """Where the last step failed: bool, of the environment's batch size."""
        flags = [
            torch.full((watch.lanes,), part.step_failed, dtype=torch.bool)
            for part, watch in self._watched
        ]
        return torch.cat(flags).reshape(self._batch)

    def forgive(self) -> None:
        """After a row: a good step ends what failures there were before it."""
        for part, watch in self._watched:
            if not part.step_failed and not watch.failed_in(len(self._records)):
                watch.failures = 0

    def _restart(self, part: GymEnv, watch: Watch, error: Exception, after_step: bool) -> None:
        watch.restart(error, len(self._records), part.restart, after_step)


def break_off(frame: TensorDictBase, done_keys: Sequence[Key], lanes: Tensor) -> None:
    """Says that the episodes in ``lanes`` ended with ``frame``, unless they had already.

    New tensors are set: the step after the frame shares those that are there.

    Args:
        frame: a frame.
        done_keys: keys of its flags that an episode is over.
        lanes: bool, of the frame's batch size.
    """
    for key in done_keys:
        if key[-1] != "done":
            continue
        done = frame.get(key)
        extra = [1] * (done.ndim - lanes.ndim)
        cut = lanes.to(done.device).reshape(*lanes.shape, *extra) & ~done
        for name in ("done", "truncated"):
            flags = frame.get((*key[:-1], name), None)
            if flags is not None:
                frame.set((*key[:-1], name), flags | cut)


def emptied(following: TensorDictBase, blank: TensorDictBase, lanes: Tensor) -> TensorDictBase:
    """``following`` with nothing in ``lanes``.

    Args:
        following: what is under ``"next"``.
        blank: the same of a frame of zeros, as the environment makes it.
        lanes: bool, of the batch size.
    """
    keys = list(blank.keys(True, True, is_leaf=is_leaf_nontensor))
    if lanes.all():
        result = blank.copy()
    else:
        here = lanes.to(following.device or "cpu")
        result = torch.where(here, blank, following.select(*keys))
    for key in following.keys(True, True):
        if key not in keys:
            value: Any = following.get(key)
            extra = [1] * (value.ndim - lanes.ndim)
            mask = lanes.to(value.device).reshape(*lanes.shape, *extra)
            result.set(key, value.masked_fill(mask, 0))
    return result
