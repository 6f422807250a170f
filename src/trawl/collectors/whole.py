"""Whole trajectories on their way from batches of frames to the user."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase

from trawl.collectors.config import CollectorConfig
from trawl.data.trajectories import TrajectoryAssembler, join

STATE = "trajectories"


class WholeTrajectories:
    """What ``trajs_per_batch`` asks for: trajectories that wait until they are delivered.

    Args:
        config: the options.
        workers: workers whose frames one source gives, told apart by their ids.
        stride: trajectories of one such worker have ids that differ by ``workers * stride``.

    Attributes:
        delivered: trajectories that were delivered, or written to the replay buffer.
        written: frames that were written there by this object.
    """

    def __init__(self, config: CollectorConfig, workers: int = 1, stride: int = 1) -> None:
        self._each = config.trajs_per_batch or 1
        self._group = config.trajs_per_write
        self._layout = config.traj_format or "cat"
        self._assembler = TrajectoryAssembler(workers, stride)
        # The orders after which states were loaded. Ids may begin again with each.
        self._loads: list[float] = []
        self.delivered = self.written = 0

    @property
    def ready(self) -> bool:
        """Whether there are enough for a batch."""
        return len(self._assembler) >= self._each

    def add(self, parts: Iterable[tuple[int, float, TensorDictBase]]) -> None:
        """Takes batches of frames that were collected at the same time.

        Args:
            parts: for each the worker, the number of its order, and the batch.
        """
        # What waits since the last time is not to keep the memory of its batch any longer.
        self._assembler.keep()
        self._assembler.add_parts(
            (self._source(worker, order), batch) for worker, order, batch in parts
        )

    def miss(self, batch: TensorDictBase) -> None:
        """Notes that somebody else has these frames of the only worker."""
        self._assembler.miss(batch, self._source(0, math.inf))

    def _source(self, worker: int, order: float) -> Hashable:
        return worker, bisect_left(self._loads, order)

    def take(self) -> TensorDictBase:
        """A batch of whole trajectories; there have to be enough."""
        self.delivered += self._each
        return join(self._assembler.take(self._each), self._layout)

    def groups(self) -> Iterator[TensorDictBase]:
        """All that wait, as they are to be written to a replay buffer: flat."""
        while len(self._assembler):
            group = self._assembler.take(self._group)
            joined = join(group, "cat")
            yield joined
            self.delivered += len(group)
            self.written += len(joined)

    def like(self, batch: TensorDictBase, buffer: bool) -> TensorDictBase:
        """A batch of trajectories with the entries of a batch of frames."""
        lane = batch.reshape(-1, batch.shape[-1])[0]
        return join([lane] * self._each, "cat" if buffer else self._layout)

    def stats(self) -> dict[str, Any]:
        """How many were delivered, and how many wait for that."""
        return {
            "trajectories": self.delivered,
            "trajectories_waiting": len(self._assembler),
        }

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on later."""
        return {"whole": self._assembler.state(), "delivered": self.delivered}

    def load_state_dict(self, state: Mapping[str, Any], order: int) -> None:
        """Goes on from such a state. Trajectories that were not whole are dropped.

        Args:
            state: the state.
            order: the number of the last order that was carried out before.
        """
        self._loads.append(order)
        self._assembler.load(state.get("whole", ()))
        self.delivered = int(state.get("delivered", 0))
