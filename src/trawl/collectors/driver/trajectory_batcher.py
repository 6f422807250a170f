"""Assembly of whole trajectories from batches of frames."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase

from trawl.collectors.config import CollectorConfig, warn
from trawl.data.trajectories import TrajectoryAssembler, join

STATE = "trajectories"


class TrajectoryBatcher:
    """Assembles whole trajectories, and holds them until they are delivered.

    Collectors use this class for ``trajs_per_batch`` and ``replay_write_mode="trajectory"``.

    Args:
        config: the options.
        workers: number of workers behind each source of frames. A trajectory id shows which of
            these workers made the trajectory.
        stride: difference between successive trajectory ids of a source. The ids of one of its
            workers differ by multiples of ``workers * stride``.

    Attributes:
        delivered: number of trajectories that were delivered, or written to the replay buffer.
    """

    def __init__(self, config: CollectorConfig, workers: int = 1, stride: int = 1) -> None:
        self._each = config.trajs_per_batch or 1
        self._group = config.trajs_per_write
        self._layout = config.traj_format or "cat"
        in_turn = config.traj_sampling == "per_env"
        self._assembler = TrajectoryAssembler(workers, stride, in_turn)
        # For each loaded state, the number of the last request before it. A state may reuse ids.
        self._loads: list[float] = []
        self.delivered = 0

    @property
    def ready(self) -> bool:
        """True if there are enough trajectories for a batch."""
        return len(self._assembler) >= self._each

    def add(self, parts: Iterable[tuple[Hashable, float, TensorDictBase]]) -> None:
        """Adds batches of frames that were collected at the same time.

        Args:
            parts: for each batch, its source (a worker, for example), the number of its request,
                and the frames.
        """
        # Trajectories that are left from the last call are copied, to free the memory of batches.
        self._assembler.keep()
        self._assembler.add_parts(
            (self._source(source, order), batch) for source, order, batch in parts
        )

    def end(self, trajectories: Collection[int], order: float = math.inf) -> None:
        """Ends unfinished trajectories with their last frames, because their environments failed.

        Call this method before the frames of the batch in which the environments failed are added.

        Args:
            trajectories: ids of the trajectories.
            order: number of the request for that batch.
        """
        if trajectories:
            load = bisect_left(self._loads, order)
            self._assembler.truncate(trajectories, lambda source: source[1] == load)

    def miss(self, batch: TensorDictBase, worker: int = 0) -> None:
        """Marks the trajectories of a worker's batch as incomplete.

        The batch was returned to a caller of ``rollout()``, so its frames are not added.
        """
        self._assembler.miss(batch, self._source(worker, math.inf))

    def _source(self, source: Hashable, order: float) -> Hashable:
        return source, bisect_left(self._loads, order)

    def pop_batch(self) -> TensorDictBase:
        """Returns a batch of whole trajectories; call this method only if :attr:`ready` is True."""
        self.delivered += self._each
        return join(self._assembler.take(self._each), self._layout)

    def warn_if_undelivered(self, total: float) -> None:
        """Warns if no batch was delivered, although all frames have been collected.

        Args:
            total: the value of ``total_frames``.
        """
        if self.delivered:
            return
        several, held = self._each > 1, self._assembler.held_back
        others = f" (and {held} wait for the turns of their environments)" if held else ""
        warn(
            f"no batch is delivered: within total_frames={total}, the number of whole "
            f"trajectories is {len(self._assembler)}{others}, but a batch has {self._each}"
            f"{' (trajs_per_batch)' if several else ''}. Increase total_frames"
            f"{', decrease trajs_per_batch' if several else ''}, or end episodes earlier"
        )

    def groups(self) -> Iterator[TensorDictBase]:
        """Yields all waiting trajectories in groups, concatenated for the replay buffer."""
        while len(self._assembler):
            group = self._assembler.take(self._group)
            yield join(group, "cat")
            self.delivered += len(group)

    def template(self, batch: TensorDictBase, buffer: bool) -> TensorDictBase:
        """Returns an example of a batch of trajectories, made from the first row of a batch.

        Args:
            batch: the frames.
            buffer: whether the batch has the form that is written to a replay buffer.
        """
        frames = batch.reshape(-1, batch.shape[-1])[0]
        return join([frames] * self._each, "cat" if buffer else self._layout)

    def stats(self) -> dict[str, Any]:
        """Returns the numbers of delivered and of waiting trajectories."""
        return {
            "trajectories": self.delivered,
            "trajectories_waiting": len(self._assembler) + self._assembler.held_back,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to continue later."""
        return {"assembler": self._assembler.state(), "delivered": self.delivered}

    def load_state_dict(self, state: Mapping[str, Any], order: int, resumed: bool) -> None:
        """Restores a state that :meth:`state_dict` returned.

        Args:
            state: the state.
            order: number of the last request before the state was loaded.
            resumed: True if the episodes of the state go on; otherwise, incomplete trajectories are
                dropped.
        """
        self._loads.append(order)
        self._assembler.load(state.get("assembler", {}), self._now if resumed else None)
        self.delivered = int(state.get("delivered", 0))

    def _now(self, place: Any) -> tuple[Hashable, int, int]:
        """Returns the name of a place in a state after the last load."""
        (source, _), worker, row = place
        source = tuple(source) if isinstance(source, (list, tuple)) else source
        return (source, len(self._loads)), worker, row
