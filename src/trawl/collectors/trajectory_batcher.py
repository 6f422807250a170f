"""Whole trajectories, assembled from batches of frames until they are delivered."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase

from trawl.collectors.config import CollectorConfig
from trawl.data.trajectories import TrajectoryAssembler, join

STATE = "trajectories"


class TrajectoryBatcher:
    """Assembles whole trajectories, and holds them until they are delivered.

    It is used with ``trajs_per_batch``.

    Args:
        config: the options.
        workers: number of workers behind each source of frames; trajectory ids tell them apart.
        stride: the ids of one such worker's trajectories differ by ``workers * stride``.

    Attributes:
        delivered: number of trajectories that were delivered, or written to the replay buffer.
        written: number of frames that were written to the replay buffer as whole trajectories.
    """

    def __init__(self, config: CollectorConfig, workers: int = 1, stride: int = 1) -> None:
        self._each = config.trajs_per_batch or 1
        self._group = config.trajs_per_write
        self._layout = config.traj_format or "cat"
        self._assembler = TrajectoryAssembler(workers, stride)
        # Numbers of the last requests before states were loaded. Each state may reuse ids.
        self._loads: list[float] = []
        self.delivered = self.written = 0

    @property
    def ready(self) -> bool:
        """True if there are enough trajectories for a batch."""
        return len(self._assembler) >= self._each

    def add(self, parts: Iterable[tuple[int, float, TensorDictBase]]) -> None:
        """Adds batches of frames that were collected at the same time.

        Args:
            parts: for each batch, its worker, the number of its request, and the frames.
        """
        # Copies trajectories that still wait since the last call, to free the memory of batches.
        self._assembler.keep()
        self._assembler.add_parts(
            (self._source(worker, order), batch) for worker, order, batch in parts
        )

    def miss(self, batch: TensorDictBase) -> None:
        """Notes frames that the caller of ``rollout()`` has: their trajectories are incomplete."""
        self._assembler.miss(batch, self._source(0, math.inf))

    def _source(self, worker: int, order: float) -> Hashable:
        return worker, bisect_left(self._loads, order)

    def pop_batch(self) -> TensorDictBase:
        """Returns a batch of whole trajectories; call it only if :attr:`ready`."""
        self.delivered += self._each
        return join(self._assembler.take(self._each), self._layout)

    def groups(self) -> Iterator[TensorDictBase]:
        """Yields all waiting trajectories in flat groups, for the replay buffer."""
        while len(self._assembler):
            group = self._assembler.take(self._group)
            joined = join(group, "cat")
            yield joined
            self.delivered += len(group)
            self.written += len(joined)

    def template(self, batch: TensorDictBase, buffer: bool) -> TensorDictBase:
        """Returns a batch of trajectories with the entries of a batch of frames.

        Args:
            batch: the frames.
            buffer: whether the batch has the form that is written to a replay buffer.
        """
        frames = batch.reshape(-1, batch.shape[-1])[0]
        return join([frames] * self._each, "cat" if buffer else self._layout)

    def stats(self) -> dict[str, Any]:
        """Returns the number of trajectories that were delivered, and that still wait."""
        return {
            "trajectories": self.delivered,
            "trajectories_waiting": len(self._assembler),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to continue from."""
        return {"whole": self._assembler.state(), "delivered": self.delivered}

    def load_state_dict(self, state: Mapping[str, Any], order: int) -> None:
        """Restores a state from :meth:`state_dict`; incomplete trajectories are dropped.

        Args:
            state: the state.
            order: number of the last request before the state was loaded.
        """
        self._loads.append(order)
        self._assembler.load(state.get("whole", ()))
        self.delivered = int(state.get("delivered", 0))
