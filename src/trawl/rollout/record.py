"""Arrays of a batch that is being filled, with its trajectory ids, step counts and ``is_init``.

:class:`View` shows the arrays of a batch with time first, whatever the batch's shape.
:class:`Episodes` knows the row in which each environment's episode began, and writes trajectory
ids, step counts and ``is_init``. A *lane* is one environment of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trawl.keys import Key, next_of

Array = NDArray[Any]

TRAJ_IDS: Key = ("collector", "traj_ids")
MASK: Key = ("collector", "mask")
STEP_COUNT: Key = ("step_count",)
IS_INIT: Key = ("is_init",)
NO_TRAJECTORY = -1
NEVER = 2**62


class View:
    """Arrays of a batch with time first: ``(steps, lanes, *leaf)``.

    Args:
        arrays: the arrays, by key.
        carry: the row after the last one of the batch, ``(lanes, *leaf)``, for each entry that a
            step passes on to the next.
        first: index of the first lane shown.
        bfloat16: keys of bfloat16 entries. As numpy has no bfloat16, their arrays are int16.
    """

    def __init__(
        self,
        arrays: dict[Key, Array],
        carry: dict[Key, Array],
        first: int = 0,
        bfloat16: frozenset[Key] = frozenset(),
    ) -> None:
        self.arrays = arrays
        self.carry = carry
        self.first = first
        self.bfloat16 = bfloat16

    def part(self, first: int, lanes: int) -> View:
        """Returns a view of ``lanes`` environments, from index ``first`` on."""
        stop = first + lanes
        return View(
            {key: array[:, first:stop] for key, array in self.arrays.items()},
            {key: array[first:stop] for key, array in self.carry.items()},
            self.first + first,
            self.bfloat16,
        )

    def rows(self, key: Key, start: int, stop: int) -> list[Array]:
        """Returns an array of all lanes for each step, so that the loop doesn't slice."""
        return split_rows(self.arrays[key][start:stop])

    def following(self, key: Key, start: int, stop: int) -> list[Array]:
        """Returns for each step the row of the next step; for the batch's last one, the carry."""
        return following(self.rows(key, start + 1, stop + 1), stop - start, self.carry[key])

    def lane(self) -> View:
        """Returns a view of the only lane, without its dimension: arrays ``(steps, *leaf)``."""
        return View(
            {key: array[:, 0] for key, array in self.arrays.items()},
            {key: array[0, ...] for key, array in self.carry.items()},
            self.first,
            self.bfloat16,
        )


def following(rows: list[Array], steps: int, carry: Array) -> list[Array]:
    """Returns ``rows``, with the carry appended if the batch ends before ``steps`` rows."""
    return rows if len(rows) == steps else [*rows, carry]


def split_rows(array: Array) -> list[Array]:
    """Returns the rows of an array as arrays that can be written to, even if they are scalars."""
    return list(array) if array.ndim > 1 else [array[i, ...] for i in range(len(array))]


@dataclass(frozen=True)
class Start:
    """Entry that gets a value where an episode begins.

    Attributes:
        rows: ``(steps, lanes, *leaf)``, or None if only the carry is written.
        carry: the row after the last one of the batch, ``(lanes, *leaf)``.
        value: the value that is written.
    """

    rows: Array | None
    carry: Array
    value: Any


class Episodes:
    """Position of each lane in its episode.

    Args:
        lanes: number of environments.
        limit: steps after which an episode is cut off, or None.

    Attributes:
        next_id: id of the next new trajectory.
        stride: difference between an id and the next.
        counts_ahead: True if steps are numbered before they are taken, for a policy that reads
            the count. Otherwise they are numbered when the episode or the batch ends, which costs
            less.
    """

    def __init__(self, lanes: int, limit: int | None) -> None:
        self.limit = limit
        self.counts_ahead = False
        self.next_id = lanes
        self.stride = 1
        self._ids = list(range(lanes))
        self._began = [0] * lanes  # first row of this batch that is not yet numbered
        self._steps = [0] * lanes  # steps of the episode before that row
        self._traj_ids: Array | None = None
        self._counts: tuple[Array, Array] | None = None
        self._starts: list[Start] = []

    def begin(self, view: View, starts: list[Start]) -> None:
        """Begins a new batch.

        Args:
            view: the arrays of the batch.
            starts: other entries to write when an episode begins.
        """
        self._traj_ids = view.arrays.get(TRAJ_IDS)
        self._starts = starts
        self._counts = None
        if STEP_COUNT in view.arrays:
            self._counts = (
                view.arrays[STEP_COUNT][..., 0],
                view.arrays[next_of(STEP_COUNT)][..., 0],
            )
        for lane in range(len(self._ids)):
            self._count_ahead(lane, 0)

    def cutoff(self, lane: int) -> int:
        """Returns the row whose step brings the lane's episode to the limit."""
        if self.limit is None:
            return NEVER
        return self._began[lane] + self.limit - self._steps[lane] - 1

    def end(self, lane: int, row: int) -> None:
        """Ends the lane's episode with the step in ``row``, and begins another after it."""
        self._write(lane, row + 1)
        self._renew(lane)
        self._start(lane, row + 1)

    def skip(self, lane: int, row: int) -> None:
        """Takes the step in ``row`` out of all episodes: the lane spent it on a reset."""
        if self._traj_ids is not None:
            self._traj_ids[row, lane] = NO_TRAJECTORY
        self._start(lane, row + 1)

    def break_off(self, lane: int, row: int) -> bool:
        """Discards the failed step in ``row``, and ends the lane's episode with the step before.

        Returns:
            True if the episode has a step before ``row`` in this batch.
        """
        frames = row - self._began[lane]
        # The failed row is numbered, too: the policy may have read its number.
        self._write(lane, row + 1)
        if self._steps[lane] + frames:
            self._renew(lane)
        self.skip(lane, row)
        return frames > 0

    def restart(self, lane: int) -> None:
        """Begins a new trajectory, after the lane was reset between two batches."""
        self._renew(lane)

    def finish(self, steps: int) -> None:
        """Writes the missing ids and counts of a batch of which ``steps`` rows were filled."""
        for lane, began in enumerate(self._began):
            self._write(lane, steps)
            self._steps[lane] += steps - began
            self._began[lane] = 0
        if self._traj_ids is not None:
            self._traj_ids[steps:] = NO_TRAJECTORY
        self._traj_ids = self._counts = None
        self._starts = []

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which the numbering of trajectories can go on."""
        return {"traj_id": self.next_id}

    def load(self, next_id: int, stride: int | None = None) -> None:
        """Continues from ``next_id``, with a new trajectory in every lane."""
        self.next_id = next_id
        self.stride = self.stride if stride is None else stride
        for lane in range(len(self._ids)):
            self._renew(lane)

    def _renew(self, lane: int) -> None:
        self._ids[lane] = self.next_id
        self._steps[lane] = 0
        self.next_id += self.stride

    def _write(self, lane: int, stop: int) -> None:
        began = self._began[lane]
        if self._traj_ids is not None:
            self._traj_ids[began:stop, lane] = self._ids[lane]
        if not self.counts_ahead:
            self._count(lane, began, stop)

    def _count_ahead(self, lane: int, row: int) -> None:
        """Numbers the steps from ``row`` to the episode's limit, for a policy that reads them."""
        if self.counts_ahead and self._counts is not None and self.limit is not None:
            self._count(lane, row, min(row + self.limit - self._steps[lane], len(self._counts[0])))

    def _count(self, lane: int, start: int, stop: int) -> None:
        """Numbers the steps of the lane's episode in these rows."""
        if self._counts is None or start >= stop:
            return
        before, after = self._counts
        first = self._steps[lane]
        numbers = np.arange(first, first + stop - start)
        before[start:stop, lane] = numbers
        after[start:stop, lane] = numbers + 1

    def _start(self, lane: int, row: int) -> None:
        """Makes ``row`` the first of an episode."""
        self._began[lane] = row
        self._count_ahead(lane, row)
        for start in self._starts:
            rows = start.rows
            (start.carry if rows is None or row == len(rows) else rows[row])[lane] = start.value
