"""Assembly of whole trajectories from successive batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase, pad_sequence
from torch import Tensor

from trawl.envs.capture.kinds import from_plain, to_plain
from trawl.keys import DONE_KEYS, MASK, TRAJ_IDS, as_key, end_keys, next_of
from trawl.rollout.cuts import mark_frame
from trawl.tensordicts import of_frames

_Place = tuple[Hashable, int, int]
_EVERYWHERE = torch.ones(1, dtype=torch.bool)


class _Run(NamedTuple):
    """Piece of a trajectory within one batch."""

    place: _Place
    trajectory: int
    start: int
    stop: int
    ended: bool


class _Turns:
    """Holds whole trajectories back until it is the turn of their environments.

    In each round, every environment has one turn. An environment that is first seen during a round
    takes part from the next round on.
    """

    def __init__(self) -> None:
        # The trajectories of each environment that are held back.
        self.waiting: dict[_Place, deque[TensorDictBase]] = {}
        # The environments that have not had their turn in this round.
        self._round: deque[_Place] = deque()

    def see(self, place: _Place) -> None:
        self.waiting.setdefault(place, deque())

    def state(self) -> dict[str, Any]:
        waiting = [[place, _plain(found)] for place, found in self.waiting.items()]
        return {"waiting": waiting, "round": list(self._round)}

    def load(
        self, state: Mapping[str, Any], resumed: Callable[[Any], _Place] | None
    ) -> list[TensorDictBase]:
        """Restores a state; returns the trajectories whose environments have no further turns."""
        waiting = [(p, deque(map(from_plain, found))) for p, found in state.get("waiting", ())]
        if resumed is None:
            return [one for _, found in waiting for one in found]
        self.waiting = {resumed(place): found for place, found in waiting}
        self._round = deque(map(resumed, state.get("round", ())))
        return []

    def pop_due(self) -> Iterator[TensorDictBase]:
        """Removes and yields the trajectories whose turn it is."""
        while self.waiting:
            if not self._round:
                self._round = deque(self.waiting)
            if not self.waiting[self._round[0]]:
                return
            yield self.waiting[self._round.popleft()].popleft()


class TrajectoryAssembler:
    """Assembles whole trajectories from the pieces in successive batches.

    Trajectories are returned in the order in which they end, each one whole and exactly once. A
    trajectory that is interrupted by a reset, or by the death of its worker, is dropped. So is a
    trajectory whose environment failed before the first frame of a batch, unless :meth:`truncate`
    ends it, as collectors with ``trajs_per_batch`` do. If a trajectory continues after the end of
    a batch, its frames are copied, so that they do not keep the batch's memory in use.

    Args:
        workers: number of workers of the collector. The worker that made a trajectory is derived
            from the trajectory id.
        stride: difference between the first trajectory ids of successive workers. The ids of one
            worker differ by multiples of ``workers * stride``.
        in_turn: True to return the next trajectory of each environment in turn. Otherwise, the
            first trajectories that end are the short ones.

    Examples:
        >>> from trawl.collectors import Collector
        >>> from trawl.data.trajectories import TrajectoryAssembler
        >>> assembler = TrajectoryAssembler()
        >>> with Collector("CartPole-v1", frames_per_batch=100) as collector:
        ...     for batch in collector:
        ...         assembler.add(batch)
        ...         if len(assembler) >= 3:
        ...             break
        >>> all(t.get(("next", "done"))[-1] for t in assembler.take(3))
        True
    """

    def __init__(self, workers: int = 1, stride: int = 1, in_turn: bool = False) -> None:
        self._workers = workers
        self._stride = stride
        self._turns = _Turns() if in_turn else None
        # The pieces of each environment's unfinished trajectory, by source, worker and row. None
        # if frames of the trajectory are missing.
        self._pieces: dict[_Place, list[TensorDictBase] | None] = {}
        self._ids: dict[_Place, int] = {}
        self._whole: deque[TensorDictBase] = deque()
        # Number of trajectories at the front of the queue that don't use the memory of batches.
        self._own = 0

    def __len__(self) -> int:
        """Number of whole trajectories that have not been taken yet."""
        return len(self._whole)

    def add(self, batch: TensorDictBase) -> None:
        """Adds a batch of shape ``(*batch_size, time)`` with trajectory ids.

        Raises:
            KeyError: if the batch has no trajectory ids, or no flag that marks the end of a
                trajectory.
            ValueError: if the ids in a row decrease. This happens if the batches come from more
                than ``workers`` workers.
        """
        self.add_parts([(None, batch)])

    def add_parts(self, parts: Iterable[tuple[Hashable, TensorDictBase]]) -> None:
        """Adds batches that were collected at the same time, each with the name of its source.

        Args:
            parts: pairs of a source's name and its batch. Different sources may use the same ids,
                and the ids of a source may come in any order. All trajectories of one environment
                need different ids.

        Raises:
            KeyError: if a batch has no trajectory ids, or no flag that marks the end of a
                trajectory.
        """
        found: list[tuple[int, int, int, _Place, TensorDictBase]] = []
        for order, (source, batch) in enumerate(parts):
            rows = batch.reshape(-1, batch.shape[-1])
            for run in self._runs(source, rows):
                pieces = self._begun(run)
                if pieces is not None:
                    pieces.append(rows[run.place[2], run.start : run.stop])
                if not run.ended:
                    if pieces is not None:
                        pieces[-1] = pieces[-1].clone()
                    continue
                del self._pieces[run.place]
                if pieces is not None:
                    whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
                    found.append((run.stop, order, run.place[2], run.place, whole))
        found.sort(key=lambda end: end[:3])
        self._queue([(place, trajectory) for *_, place, trajectory in found])

    def _queue(self, found: Sequence[tuple[_Place, TensorDictBase]]) -> None:
        """Adds whole trajectories to those that can be taken, or holds them back."""
        if self._turns is None:
            self._whole.extend(trajectory for _, trajectory in found)
            return
        for place, trajectory in found:
            self._turns.waiting[place].append(trajectory)
        self._whole.extend(self._turns.pop_due())

    def truncate(
        self, trajectories: Collection[int], of: Callable[[Any], bool] = lambda source: True
    ) -> None:
        """Ends unfinished trajectories with the last frames that were added.

        These frames are marked as truncated, and the trajectories count as whole. Trajectories of
        which frames are missing are dropped.

        Args:
            trajectories: ids of the trajectories. Ids without an unfinished trajectory are ignored.
            of: function that returns True for the sources whose trajectories are meant.
        """
        found = []
        # Those that end together come in the order of their environments, as in add_parts.
        for place in sorted(self._pieces, key=lambda place: place[1:]):
            if self._ids[place] in trajectories and of(place[0]):
                pieces = self._pieces.pop(place)
                if pieces:
                    last = pieces[-1][-1:].clone()
                    done = leaves_named(last.get("next"), ["done"])
                    mark_frame(last, [next_of(as_key(key)) for key in done], _EVERYWHERE)
                    found.append((place, torch.cat([*pieces[:-1], pieces[-1][:-1], last])))
        self._queue(found)

    def miss(self, batch: TensorDictBase, source: Hashable = None) -> None:
        """Drops the trajectories to which missing frames belong.

        Args:
            batch: the missing frames, of shape ``(*batch_size, time)``. They are not added.
            source: name of the source of the frames.
        """
        for run in self._runs(source, batch.reshape(-1, batch.shape[-1])):
            self._begun(run)
            self._pieces[run.place] = None
            if run.ended:
                del self._pieces[run.place]

    def _runs(self, source: Hashable, rows: TensorDictBase) -> Iterator[_Run]:
        """Yields the pieces of trajectories in frames of shape ``(rows, time)``."""
        ids = of_frames(rows, TRAJ_IDS)
        if ids is None:
            raise KeyError("trajectories can't be told apart without ('collector', 'traj_ids')")
        ids = ids.cpu()
        done = ends(rows).cpu()
        for row in range(rows.shape[0]):
            for start, stop in runs(ids[row]):
                trajectory = int(ids[row, start])
                worker = trajectory // self._stride % self._workers
                place = source, worker, row
                if self._turns is not None:
                    self._turns.see(place)
                yield _Run(place, trajectory, start, stop, bool(done[row, stop - 1]))

    def _begun(self, run: _Run) -> list[TensorDictBase] | None:
        """Returns the list of the trajectory's pieces so far; None if a piece is missing."""
        before = self._ids.get(run.place, -1)
        if run.place[0] is None and run.trajectory < before:
            raise ValueError(
                f"trajectory {run.trajectory} comes after trajectory {before} in row "
                f"{run.place[2]}, but the ids of one environment must increase. For batches from "
                "several workers, pass the number of workers: "
                "TrajectoryAssembler(workers=collector.num_workers)"
            )
        if before != run.trajectory:
            # The previous trajectory did not end, because a reset cut it off.
            self._pieces.pop(run.place, None)
        self._ids[run.place] = run.trajectory
        return self._pieces.setdefault(run.place, [])

    @property
    def held_back(self) -> int:
        """Number of whole trajectories that wait for the turns of their environments."""
        return sum(map(len, self._held_back()))

    def take(self, count: int | None = None) -> list[TensorDictBase]:
        """Removes and returns the first ``count`` whole trajectories; None stands for all."""
        count = len(self._whole) if count is None else min(count, len(self._whole))
        self._own = max(0, self._own - count)
        return [self._whole.popleft() for _ in range(count)]

    def keep(self) -> None:
        """Copies whole trajectories, so that the memory of their batches can be freed."""
        for index in range(self._own, len(self._whole)):
            self._whole[index] = self._whole[index].clone()
        self._own = len(self._whole)
        for waiting in self._held_back():
            # What was held back before the last call was copied then; a second copy is rare.
            waiting.extend([waiting.popleft().clone() for _ in range(len(waiting))])

    def _held_back(self) -> Iterable[deque[TensorDictBase]]:
        return () if self._turns is None else self._turns.waiting.values()

    def state(self) -> dict[str, Any]:
        """Returns copies of all trajectories that have not been taken, as plain data.

        The state has whole trajectories, unfinished ones, and those that wait for the turns of
        their environments.
        """
        unfinished = [
            {"place": place, "trajectory": self._ids[place], "frames": pieces and _plain(pieces)}
            for place, pieces in self._pieces.items()
        ]
        state = {"whole": _plain(self._whole), "unfinished": unfinished}
        return state if self._turns is None else {**state, "turns": self._turns.state()}

    def load(self, state: Mapping[str, Any], resumed: Callable[[Any], _Place] | None) -> None:
        """Restores trajectories from :meth:`state`.

        Args:
            state: the state.
            resumed: function that returns the place where the trajectories of a place in the state
                go on; None if they don't, because new episodes begin.
        """
        # Frames that continue an unfinished trajectory later would lack its beginning.
        self._pieces = dict.fromkeys(self._pieces)
        self._whole = deque(map(from_plain, state.get("whole", ())))
        self._own = len(self._whole)
        if self._turns is not None:
            self._turns = _Turns()
            self._whole.extend(self._turns.load(state.get("turns", {}), resumed))
        if resumed is not None:
            for one in state.get("unfinished", ()):
                place, frames = resumed(one["place"]), one["frames"]
                self._ids[place] = one["trajectory"]
                self._pieces[place] = None if frames is None else list(map(from_plain, frames))


def _plain(trajectories: Iterable[TensorDictBase]) -> list[dict[str, Any]]:
    return [to_plain(one.clone()) for one in trajectories]


def join(trajectories: Sequence[TensorDictBase], layout: str) -> TensorDictBase:
    """Joins several trajectories into one TensorDict.

    Args:
        trajectories: at least one trajectory, each of shape ``(time,)``.
        layout: ``"cat"`` concatenates the trajectories to shape ``(frames,)``. ``"padded"`` stacks
            them to shape ``(trajectories, longest)``. Shorter trajectories are padded with zeros,
            and ``("collector", "mask")`` is False in the padding.

    Raises:
        TypeError: if the trajectories can't be padded, for example because an entry has no fixed
            shape.
    """
    if layout == "cat":
        result: TensorDictBase = torch.cat(list(trajectories))
        result.refine_names("time")
        return result
    masked = [
        t.copy().set(MASK, torch.ones(t.shape, dtype=torch.bool, device=t.device))
        for t in trajectories
    ]
    try:
        padded: TensorDictBase = pad_sequence(masked)
    except RuntimeError as error:
        raise TypeError(
            f"trajectories can't be padded: {error}. Entries without a fixed shape can only be "
            "concatenated: use traj_format='cat'"
        ) from error
    return padded.refine_names(None, None)


def ends(batch: TensorDictBase) -> Tensor:
    """Returns a bool tensor of the batch's shape, True where a trajectory ends.

    Raises:
        KeyError: if no flag under ``"next"`` marks the end of a trajectory.
    """
    following = batch.get("next")
    if not leaves_named(following, DONE_KEYS):
        raise KeyError("no entry under 'next', such as 'done', marks where trajectories end")
    return flagged(batch, following, DONE_KEYS)


def flagged(batch: TensorDictBase, following: TensorDictBase, names: Sequence[str]) -> Tensor:
    """Returns a bool tensor of the batch's shape, True where a flag with one of these names is set.

    The flags are those of :func:`~trawl.keys.end_keys`.

    Args:
        batch: the batch.
        following: the TensorDict that has the flags.
        names: names of the flags; there must be at least one of them.
    """
    found = end_keys(map(as_key, following.keys(True, True)), names)
    flags = [following.get(key).reshape(*batch.shape, -1).any(-1) for key in found]
    ended: Tensor = torch.stack(flags).any(0)
    return ended


def leaves_named(frames: TensorDictBase, names: Sequence[str]) -> list[Any]:
    """Returns the keys of all entries, at any depth, whose name is among ``names``."""
    return [k for k in frames.keys(True, True) if (k if isinstance(k, str) else k[-1]) in names]


def runs(ids: Tensor) -> list[tuple[int, int]]:
    """Returns the start and stop of each run of equal ids, without runs of negative ids."""
    cuts = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
    edges = [0, *cuts.tolist(), len(ids)]
    return [(start, stop) for start, stop in pairwise(edges) if start < stop and ids[start] >= 0]
