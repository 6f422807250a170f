"""Arrays of a batch that is being filled, with its trajectory ids, step counts and ``is_init``.

:class:`StepArrays` holds the arrays of a batch with time as the first dimension, for any shape of
the batch. :class:`EpisodeTracker` records the row in which each environment's episode began, and
writes trajectory ids, step counts and ``is_init``. :class:`BatchEpisodeTracker` writes the ids of a
whole batch with many environments, row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from typing_extensions import override

from trawl.keys import (
    DONE,
    MASK,
    NO_TRAJECTORY,
    STEP_COUNT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    next_of,
)
from trawl.memory import Array, Mask
from trawl.rollout.cuts import mark_rows, steps_to_limit
from trawl.rollout.inputs import LatestObservation
from trawl.rollout.layout import as_array

NEVER = 2**62


class StepArrays:
    """Arrays of a batch with time first: ``(steps, num_envs, *leaf)``.

    Args:
        arrays: the arrays, by key.
        next_obs: the observations after the last step, ``(num_envs, *leaf)``, and all other entries
            that a step passes on to the next step. The next batch begins with these entries.
        first: index of the first environment.
        bfloat16: keys of bfloat16 entries. Their arrays are int16, because numpy has no bfloat16.

    Attributes:
        latest: object to which a single environment's stepper assigns each observation; None if
            nothing reads it there.
    """

    latest: LatestObservation | None = None

    def __init__(
        self,
        arrays: dict[Key, Array],
        next_obs: dict[Key, Array],
        first: int = 0,
        bfloat16: frozenset[Key] = frozenset(),
    ) -> None:
        self.arrays = arrays
        self.next_obs = next_obs
        self.first = first
        self.bfloat16 = bfloat16

    def part(self, first: int, count: int) -> StepArrays:
        """Returns the arrays of ``count`` environments, from index ``first`` on."""
        stop = first + count
        return StepArrays(
            {key: array[:, first:stop] for key, array in self.arrays.items()},
            {key: array[first:stop] for key, array in self.next_obs.items()},
            self.first + first,
            self.bfloat16,
        )

    def replaced(self, rows: Mapping[Key, Tensor]) -> StepArrays:
        """Returns the arrays, with other memory for some entries, ``(steps, num_envs, *leaf)``."""
        found = self.arrays | {key: as_array(row) for key, row in rows.items()}
        return StepArrays(found, self.next_obs, self.first, self.bfloat16)

    def rows(self, key: Key, start: int, stop: int) -> list[Array]:
        """Returns an array for each step, so that the loop doesn't have to slice."""
        return split_rows(self.arrays[key][start:stop])

    def following(self, key: Key, start: int, stop: int) -> list[Array]:
        """Returns the next step's row for each step; for a batch's last step, ``next_obs``."""
        return following(self.rows(key, start + 1, stop + 1), stop - start, self.next_obs[key])

    def single(self) -> StepArrays:
        """Returns the arrays of a single environment, without the environment dimension."""
        single = StepArrays(
            {key: array[:, 0] for key, array in self.arrays.items()},
            {key: array[0, ...] for key, array in self.next_obs.items()},
            self.first,
            self.bfloat16,
        )
        single.latest = self.latest
        return single


def following(rows: Sequence[Any], steps: int, next_obs: Any) -> list[Any]:
    """Returns ``rows``, followed by ``next_obs`` if the batch ends before ``steps`` rows."""
    return [*rows] if len(rows) == steps else [*rows, next_obs]


def split_rows(array: Array) -> list[Array]:
    """Returns the rows of an array as writable arrays, even if the rows are scalars."""
    return list(array) if array.ndim > 1 else [array[i, ...] for i in range(len(array))]


#: Writes entries of the next frame, given the row and the environments in which an episode begins.
Follow = Callable[[int, Tensor], None]


class EpisodeStart(Protocol):
    """Object that writes entries of a batch where an episode begins."""

    def write(self, index: int, row: int) -> None:
        """Writes the entries of the environment ``index``, whose episode begins in ``row``."""


@dataclass(frozen=True)
class StartValue(EpisodeStart):
    """Entry that is set to a fixed value where an episode begins.

    Attributes:
        rows: the entry in all rows, ``(steps, num_envs, *leaf)``; None if only ``next_obs`` is
            written.
        next_obs: the entry after the last step of the batch, ``(num_envs, *leaf)``.
        value: the value that is written.
    """

    rows: Array | None
    next_obs: Array
    value: Any

    @override
    def write(self, index: int, row: int) -> None:
        target = self.next_obs if self.rows is None or row == len(self.rows) else self.rows[row]
        target[index] = self.value


class EpisodeTracker:
    """Record of each environment's position in its episode.

    Args:
        num_envs: number of environments.
        limit: number of steps after which an episode is cut off; None for no limit.

    Attributes:
        next_id: id of the next new trajectory.
        stride: difference between consecutive ids.
        ids: id of each environment's current trajectory.
        counts_ahead: True if steps are numbered before they are taken, for a policy that reads
            the count. Otherwise they are numbered when the episode or the batch ends, which costs
            less.
    """

    def __init__(self, num_envs: int, limit: int | None) -> None:
        self.limit = limit
        self.counts_ahead = False
        self.next_id = num_envs
        self.stride = 1
        self.ids: list[int] | Array = list(range(num_envs))
        self._began = [0] * num_envs  # first row of this batch that is not yet numbered
        self._steps = [0] * num_envs  # steps of the episode before that row
        self._traj_ids: Array | None = None
        self._counts: tuple[Array, Array] | None = None
        self._starts: Sequence[EpisodeStart] = []
        self._cut: list[int] = []

    def begin(self, batch: StepArrays, starts: Sequence[EpisodeStart]) -> None:
        """Begins a new batch.

        Args:
            batch: the arrays of the batch.
            starts: objects that are called when an episode begins.
        """
        self._traj_ids = batch.arrays.get(TRAJ_IDS)
        self._starts = starts
        self._counts = None
        if STEP_COUNT in batch.arrays:
            self._counts = (
                batch.arrays[STEP_COUNT][..., 0],
                batch.arrays[next_of(STEP_COUNT)][..., 0],
            )
        for index in range(len(self.ids)):
            self._count_ahead(index)

    def cutoff(self, index: int) -> int:
        """Returns the row whose step brings the environment's episode to the limit."""
        if self.limit is None:
            return NEVER
        return self._began[index] + steps_to_limit(self.limit, self._steps[index]) - 1

    def first_row(self, index: int) -> int:
        """Returns the row in which the environment's episode began; 0 if it began before."""
        return self._began[index]

    def end(self, index: int, row: int) -> None:
        """Ends the environment's episode with the step in ``row``, and begins a new one."""
        self.end_all((index,), row)

    def end_all(self, indices: Iterable[int], row: int) -> None:
        """Ends the episodes of some environments with the step in ``row``, and begins new ones."""
        stop, began, ids, numbers = row + 1, self._began, self.ids, self._traj_ids
        if self._counts is None and not self._starts:
            for index in indices:
                if numbers is not None:
                    numbers[began[index] : stop, index] = ids[index]
                self._renew(index)
                began[index] = stop
            return
        for index in indices:
            self._write(index, stop)
            self._renew(index)
            self._start(index, stop)

    def skip(self, index: int, row: int) -> None:
        """Excludes the step in ``row``, such as an autoreset, from all episodes."""
        if self._traj_ids is not None:
            self._traj_ids[row, index] = NO_TRAJECTORY
        self._start(index, row + 1)

    def break_off(self, index: int, row: int) -> None:
        """Discards the failed step in ``row``, and ends the episode with the previous step."""
        frames = row - self._began[index]
        # The failed row is numbered too, because the policy may have read its number.
        self._write(index, row + 1)
        if self._steps[index] + frames:
            if not frames:
                self.cut(index)
            self._renew(index)
        self.skip(index, row)

    def cut(self, index: int) -> None:
        """Records that a failure has ended the trajectory with a frame of an earlier batch."""
        self._cut.append(int(self.ids[index]))

    def pop_cut(self) -> tuple[int, ...]:
        """Returns the ids of trajectories that :meth:`cut` has recorded since the last call.

        Their last frames were delivered before the failure, so they are not marked as truncated.
        """
        cut, self._cut = tuple(self._cut), []
        return cut

    def restart(self, index: int) -> None:
        """Begins a new trajectory, after the environment was reset between two batches."""
        self._renew(index)

    def restart_all(self, mask: Mask | None) -> None:
        """Begins new trajectories in all environments, or where ``mask`` is True."""
        for index in range(len(self.ids)) if mask is None else np.flatnonzero(mask):
            self._renew(int(index))

    def finish(self, steps: int) -> None:
        """Writes the missing ids and counts of a batch of which ``steps`` rows were filled."""
        for index, began in enumerate(self._began):
            self._write(index, steps)
            self._steps[index] += steps - began
            self._began[index] = 0
        if self._traj_ids is not None:
            self._traj_ids[steps:] = NO_TRAJECTORY
        self.abandon()

    def abandon(self) -> None:
        """Gives up the arrays of the batch."""
        self._traj_ids = self._counts = None
        self._starts = []

    def number(self, done: Array, skipped: Array) -> Array:
        """Returns the trajectory ids of a whole batch.

        Args:
            done: True where a step ended an episode, ``(steps, num_envs)``.
            skipped: True where a step is not experience, ``(steps, num_envs)``.
        """
        ids = np.empty(done.shape, dtype=np.int64)
        self.begin(StepArrays({TRAJ_IDS: ids}, {}), [])
        for row, index in np.argwhere(done | skipped):
            end = self.break_off if skipped[row, index] else self.end
            end(int(index), int(row))
        self.finish(len(ids))
        return ids

    def state_dict(self) -> dict[str, Any]:
        """Returns the positions of all environments in their episodes, between two batches."""
        return {
            "next_id": self.next_id,
            "stride": self.stride,
            "ids": list(self.ids),
            "steps": list(self._steps),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned."""
        self.next_id, self.stride = state["next_id"], state["stride"]
        self.ids, self._steps = list(state["ids"]), list(state["steps"])

    def load(self, next_id: int, stride: int | None = None) -> None:
        """Begins new trajectories in all environments, with ids from ``next_id`` on.

        ``stride`` is the new difference between consecutive ids; None leaves it unchanged.
        """
        self.next_id = next_id
        self.stride = self.stride if stride is None else stride
        for index in range(len(self.ids)):
            self._renew(index)

    def _renew(self, index: int) -> None:
        self.ids[index] = self.next_id
        self._steps[index] = 0
        self.next_id += self.stride

    def _write(self, index: int, stop: int) -> None:
        began = self._began[index]
        if self._traj_ids is not None:
            self._traj_ids[began:stop, index] = self.ids[index]
        if not self.counts_ahead:
            self._count(index, began, stop)

    def _count_ahead(self, index: int) -> None:
        """Numbers the episode's steps up to the limit, if the policy reads the count."""
        if self.counts_ahead and self._counts is not None and self.limit is not None:
            stop = min(self.cutoff(index) + 1, len(self._counts[0]))
            self._count(index, self._began[index], stop)

    def _count(self, index: int, start: int, stop: int) -> None:
        """Numbers the steps of the environment's episode in these rows."""
        if self._counts is None or start >= stop:
            return
        before, after = self._counts
        first = self._steps[index]
        numbers = np.arange(first, first + stop - start)
        before[start:stop, index] = numbers
        after[start:stop, index] = numbers + 1

    def _start(self, index: int, row: int) -> None:
        """Makes ``row`` the first row of an episode."""
        self._began[index] = row
        self._count_ahead(index)
        for start in self._starts:
            start.write(index, row)


def discard_step(
    view: Any, episodes: EpisodeTracker, row: int, envs: Sequence[int], groups: Sequence[str] = ()
) -> None:
    """Discards the steps of some environments in ``row``, and ends their episodes before it.

    Args:
        view: the arrays of the environments, or their tensors.
        episodes: tracker of the environments' episodes.
        row: the row.
        envs: numbers of the environments in ``view``.
        groups: names of the groups of agents that have flags of their own.
    """
    envs = list(envs)
    if row:
        _cut_open(view.arrays, row - 1, envs, groups)
    for index in envs:
        episodes.break_off(view.first + index, row)
    view.arrays[MASK][row, envs] = False
    for key, rows in view.arrays.items():
        if key[0] == "next":
            rows[row, envs] = 0


def end_open(view: Any, episodes: EpisodeTracker, row: int, envs: Sequence[int]) -> None:
    """Ends the episodes of some environments that go on after ``row``, which they can't."""
    found = _cut_open(view.arrays, row, list(envs), ())
    episodes.end_all([view.first + index for index in found], row)


def _cut_open(
    arrays: Mapping[Key, Any], row: int, envs: list[int], groups: Sequence[str]
) -> list[int]:
    """Cuts off the episodes that go on after ``row``, and returns where."""
    going = arrays[MASK][row] & ~arrays[DONE][row, ..., 0]
    cut = going & False
    cut[envs] = going[envs]
    mark_rows(arrays, row, cut, groups)
    found = cut.tolist()
    return [index for index in envs if found[index]]


class _Ends:
    """Ends of episodes in a chunk of rows.

    Args:
        view: the arrays of the environments.
        episodes: tracker of the environments' episodes.
        start: the first row.
        stop: the row after the last row.
        groups: names of the groups of agents that have flags of their own.
    """

    def __init__(
        self,
        view: StepArrays,
        episodes: EpisodeTracker,
        start: int,
        stop: int,
        groups: Sequence[str] = (),
    ) -> None:
        self._arrays, self._first, self._start = view.arrays, view.first, start
        self._episodes, self._groups = episodes, groups
        self._terminations, self._truncations, self._dones = (
            view.arrays[key][start:stop, ..., 0] for key in (TERMINATED, TRUNCATED, DONE)
        )


class EpisodeEnds(_Ends):
    """Ends of one environment's episodes; its arrays have no dimension for environments."""

    def cutoff(self) -> int:
        """Returns the step of the chunk that brings the current episode to the limit."""
        return self._episodes.cutoff(self._first) - self._start

    def end(self, t: int, terminated: bool, truncated: bool) -> int:
        """Ends the episode with step ``t``; returns the next episode's :meth:`cutoff`."""
        self._terminations[t], self._truncations[t] = terminated, truncated
        self._dones[t] = True
        return self.end_marked(t)

    def end_marked(self, t: int) -> int:
        """Ends the episode with step ``t``, whose flags are written, unless it is at the limit."""
        row = self._start + t
        if t >= self.cutoff():
            mark_rows(self._arrays, row, np.True_, self._groups)
        self._episodes.end(self._first, row)
        return self.cutoff()


class VectorEnds(_Ends):
    """Ends of the episodes of several environments, which step together.

    Args:
        view: the arrays of the environments.
        *args: see above.

    Attributes:
        nearest: the first step of the chunk that may bring an episode to the limit.
    """

    nearest = NEVER

    def __init__(self, view: StepArrays, *args: Any) -> None:
        super().__init__(view, *args)
        self._masks = view.arrays.get(MASK)
        self._limits = np.full(self._dones.shape[1], NEVER)
        self.find_limits()

    def find_limits(self) -> None:
        """Finds the steps that bring the current episodes to the limit."""
        if self._episodes.limit is not None:
            envs = range(self._first, self._first + len(self._limits))
            self._limits[:] = [self._episodes.cutoff(env) - self._start for env in envs]
            self.nearest = int(self._limits.min())

    def late(self, t: int) -> Mask:
        """Returns True for each environment whose episode is at the limit after step ``t``."""
        late: Mask = self._limits <= t
        return late

    def skip(self, t: int, skipped: Mask) -> None:
        """Excludes step ``t`` of environments that only reset themselves from all episodes."""
        if self._masks is not None and skipped.any():
            row = self._start + t
            self._masks[row] &= ~skipped
            for index in skipped.nonzero()[0].tolist():
                self._episodes.skip(self._first + index, row)
            self.find_limits()

    def end(self, t: int, terminated: Mask, truncated: Mask, done: Mask) -> None:
        """Ends episodes with step ``t``.

        Args:
            t: number of the step in the chunk.
            terminated: the environments' own flags.
            truncated: the environments' own flags.
            done: True where an episode ends, also because of the limit.
        """
        row = self._start + t
        self._terminations[t], self._truncations[t], self._dones[t] = terminated, truncated, done
        if t >= self.nearest:
            mark_rows(self._arrays, row, self.late(t) & done, self._groups)
        self._episodes.end_all([self._first + i for i in done.nonzero()[0].tolist()], row)
        self.find_limits()


class BatchEpisodeTracker(EpisodeTracker):
    """Record of the environments' trajectories that numbers a batch as a whole.

    Only :meth:`number` and :meth:`write` write ids, and steps are counted elsewhere.

    Args:
        num_envs: number of environments.
    """

    ids: Array

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs, None)
        self.ids = np.arange(num_envs)
        # Environments whose first step in the batch failed.
        self._broken: list[int] = []

    @override
    def end_all(self, indices: Iterable[int], row: int) -> None:
        pass

    @override
    def break_off(self, index: int, row: int) -> None:
        if not row:
            # The episode's last frame has been delivered.
            self._broken.append(index)
            self.cut(index)

    @override
    def number(self, done: Mask, skipped: Mask | None = None) -> Array:
        ids = np.empty(done.shape, dtype=np.int64)
        self.write(ids, done, skipped)
        return ids

    def write(self, ids: Array, done: Mask, skipped: Mask | None = None) -> None:
        """Writes the trajectory ids of a batch; in the order of the rows, each end takes the next.

        Args:
            ids: array to write to, ``(steps, num_envs)``.
            done: True where a step ended an episode, ``(steps, num_envs)``.
            skipped: True where a step is not experience; None if all steps are.
        """
        ends = done if skipped is None else done & ~skipped
        if self._broken:
            ends[0, self._broken] = True
            self._broken = []
        current, start = self.ids, 0
        for row in np.flatnonzero(ends.any(1)).tolist():
            ids[start : row + 1] = current
            envs = ends[row].nonzero()[0]
            stop = self.next_id + len(envs) * self.stride
            current[envs] = range(self.next_id, stop, self.stride)
            self.next_id, start = stop, row + 1
        ids[start:] = current
        if skipped is not None:
            ids[skipped] = NO_TRAJECTORY

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ids": self.ids.tolist()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.ids = np.array(state["ids"], np.int64)
