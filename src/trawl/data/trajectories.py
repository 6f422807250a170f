"""Whole trajectories out of successive batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import torch
from tensordict import TensorDictBase, pad_sequence
from torch import Tensor

_IDS = ("collector", "traj_ids")
_MASK = ("collector", "mask")


class TrajectoryAssembler:
    """Gathers the pieces of trajectories until they end.

    Trajectories come out in the order in which they end, each once and whole; one that was
    interrupted by a reset, or by the death of its worker, is dropped. What is left of a batch at
    its end is copied, so that the batch's memory is not kept for a few frames.

    Args:
        workers: number of workers of the collector. Ids tell which of them a trajectory is of.

    Example:
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

    def __init__(self, workers: int = 1) -> None:
        self._workers = workers
        # By worker and row: an environment has one trajectory at a time.
        self._pieces: dict[tuple[int, int], list[TensorDictBase]] = {}
        self._ids: dict[tuple[int, int], int] = {}
        self._whole: deque[TensorDictBase] = deque()

    def __len__(self) -> int:
        """Whole trajectories that were not taken yet."""
        return len(self._whole)

    def add(self, batch: TensorDictBase) -> None:
        """Takes a batch of shape ``(*batch_size, time)``, with trajectory ids.

        Raises:
            KeyError: if the batch has no trajectory ids.
            ValueError: if its trajectories are of more workers than was said.
        """
        if batch.get(_IDS, None) is None:
            raise KeyError("trajectories can't be told apart without ('collector', 'traj_ids')")
        lanes = batch.reshape(-1, batch.shape[-1])
        ids: Tensor = lanes.get(_IDS).cpu()
        done: Tensor = lanes.get(("next", "done")).cpu().reshape(*lanes.shape, -1).any(-1)
        ended: list[tuple[int, int, TensorDictBase]] = []
        for lane in range(lanes.shape[0]):
            for start, stop in _runs(ids[lane]):
                trajectory = int(ids[lane, start])
                place = trajectory % self._workers, lane
                whole = self._piece(place, trajectory, lanes[lane, start:stop])
                if done[lane, stop - 1]:
                    ended.append((stop, lane, torch.cat(whole) if len(whole) > 1 else whole[0]))
                    del self._pieces[place]
                else:
                    whole[-1] = whole[-1].clone()
        ended.sort(key=lambda end: end[:2])
        self._whole.extend(trajectory for *_, trajectory in ended)

    def _piece(
        self, place: tuple[int, int], trajectory: int, piece: TensorDictBase
    ) -> list[TensorDictBase]:
        """Adds a piece; the pieces of its trajectory so far."""
        before = self._ids.get(place, -1)
        if trajectory < before:
            raise ValueError(
                f"trajectory {trajectory} comes after trajectory {before} in row {place[1]}, but "
                "the ids of an environment go up: for batches of several workers say how many "
                "there are, TrajectoryAssembler(workers=collector.num_workers)"
            )
        if before != trajectory:
            # Another trajectory began without this one's end: it was cut off by a reset.
            self._pieces.pop(place, None)
        self._ids[place] = trajectory
        pieces = self._pieces.setdefault(place, [])
        pieces.append(piece)
        return pieces

    def take(self, count: int | None = None) -> list[TensorDictBase]:
        """The first ``count`` whole trajectories, or all of them."""
        count = len(self._whole) if count is None else min(count, len(self._whole))
        return [self._whole.popleft() for _ in range(count)]


def join(trajectories: Sequence[TensorDictBase], layout: str) -> TensorDictBase:
    """Several trajectories as one TensorDict.

    Args:
        trajectories: at least one, of shape ``(time,)`` each.
        layout: ``"cat"`` puts one behind the other: ``(frames,)``. ``"padded"`` puts one below
            the other: ``(trajectories, longest)``, with zeros at the end of the shorter ones and
            ``("collector", "mask")`` False there.
    """
    if layout == "cat":
        result: TensorDictBase = torch.cat(list(trajectories))
        result.refine_names("time")
        return result
    masked = [
        t.copy().set(_MASK, torch.ones(t.shape, dtype=torch.bool, device=t.device))
        for t in trajectories
    ]
    padded: TensorDictBase = pad_sequence(masked)
    return padded.refine_names(None, None)


def _runs(ids: Tensor) -> list[tuple[int, int]]:
    """Where equal ids begin and end; steps that belong to no trajectory are left out."""
    cuts = (ids[1:] != ids[:-1]).nonzero().flatten() + 1
    edges = [0, *cuts.tolist(), len(ids)]
    return [(start, stop) for start, stop in pairwise(edges) if ids[start] >= 0]
