"""The number of frames that a collector collects, and divides into batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

from typing_extensions import Self

from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.trajectory_batcher import TrajectoryBatcher

#: Entry of a state with a collector's progress.
PROGRESS = "collector_progress"


@dataclass
class FrameCounts:
    """Counts of the frames and trajectories of a collector.

    All counts grow, and states keep them, except for ``trajectory_pending_frames``.

    Attributes:
        stepped_frames: number of frames that were collected.
        trajectory_completed_frames: number of frames of trajectories that have ended.
        completed_trajectories: number of trajectories that have ended.
        replay_written_frames: number of frames that were written to the replay buffer.
        trajectory_pending_frames: number of frames of the trajectories that go on.
    """

    stepped_frames: int = 0
    trajectory_completed_frames: int = 0
    completed_trajectories: int = 0
    replay_written_frames: int = 0
    trajectory_pending_frames: int = 0

    @classmethod
    def total(cls, parts: Iterable[FrameCounts]) -> Self:
        """Returns the sum of the progress of several workers."""
        return cls(*map(sum, zip(*map(astuple, parts), strict=True)))

    def since(self, before: FrameCounts) -> FrameCounts:
        """Returns what was counted since an earlier time, with the frames that are pending now."""
        counts = (now - then for now, then in zip(astuple(self), astuple(before), strict=True))
        pending = self.trajectory_pending_frames
        return replace(FrameCounts(*counts), trajectory_pending_frames=pending)

    def add(self, other: FrameCounts) -> None:
        """Adds what was counted since, which :meth:`since` returned."""
        self.load(asdict(FrameCounts.total([self, other])))
        self.trajectory_pending_frames = other.trajectory_pending_frames

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores the counts of a state; no frames are pending then."""
        for name in asdict(self):
            setattr(self, name, int(state.get(name, 0)))
        self.trajectory_pending_frames = 0


def progress_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the entry of a collector's state with its progress.

    Older states, and those of TorchRL 0.14, have the number of frames alone.
    """
    found: Mapping[str, Any] = state.get(PROGRESS, {"stepped_frames": state["frames"]})
    return found


class FrameBudget:
    """The part of a collector that counts frames.

    Attributes:
        requested_frames_per_batch: number of frames in each batch.
        most_frames: in a worker, the number of frames that the driver still takes.
    """

    config: CollectorConfig
    closed: bool
    _progress: FrameCounts
    requested_frames_per_batch: int
    _whole: TrajectoryBatcher | None
    _frames = 0
    most_frames = math.inf

    @property
    def progress(self) -> FrameCounts:
        """The counts of frames and trajectories that ``stats()`` has; a copy."""
        return replace(self._counts(), **({"trajectory_pending_frames": 0} if self.closed else {}))

    def _counts(self) -> FrameCounts:
        return self._progress

    def _load_progress(self, state: Mapping[str, Any]) -> None:
        """Restores the progress of a state, except for what workers count."""
        self._progress = FrameCounts()
        loaded = FrameCounts()
        loaded.load(progress_of(state))
        self._progress = loaded.since(self._counts())

    def __len__(self) -> int:
        if self.config.endless:
            raise TypeError("an endless collector (total_frames=-1) has no length")
        if self._whole is not None and self.config.replay_buffer is None:
            raise TypeError(
                "with trajs_per_batch, the number of batches depends on the lengths of trajectories"
            )
        return math.ceil(self.config.total_frames / self.requested_frames_per_batch)

    def _has_budget(self, more: int = 0) -> bool:
        """Returns True if frames are left to collect after the next ``more`` frames."""
        if self.closed:
            return False
        return self.config.endless or self._frames + more < self.config.total_frames

    @property
    def _is_exact(self) -> bool:
        """True if exactly ``total_frames`` are collected, and not only whole batches."""
        return self.config.exact_frames

    def _left(self) -> float:
        """Returns the number of frames that the next batch may have at most."""
        if self.config.endless or not self._is_exact:
            return self.most_frames
        return min(self.most_frames, self.config.total_frames - self._frames)

    def _set_frames_per_batch(self, environments: int) -> int:
        """Sets ``requested_frames_per_batch``, and returns the frames per environment."""
        wanted = self.config.frames_per_batch
        each = math.ceil(wanted / environments)
        self.requested_frames_per_batch = requested = each * environments
        if requested != wanted:
            warn(
                f"frames_per_batch={wanted} is not a multiple of the number of environments, "
                f"{environments}: each batch will have {requested} frames, {each} from each "
                "environment"
            )
        self._warn_of_remainders()
        return each

    def _warn_of_remainders(self) -> None:
        """Warns if a number of frames is not a multiple of the frames in a batch."""
        requested, total = self.requested_frames_per_batch, self.config.total_frames
        by_step = self.config.adds_steps
        whole = not (self.config.endless or by_step or self._is_exact)
        if whole and total % requested:
            batches = math.ceil(total / requested)
            warn(
                f"total_frames={total} is not a multiple of the {requested} frames in a batch: "
                f"{batches * requested} frames will be collected, in {batches} batches (if rows "
                f"are masked, up to {total + requested - 1} frames, in more batches). To collect "
                f"exactly {total} frames, pass exact_frames=True"
            )
        random = self.config.init_random_frames
        if random and random % requested and not by_step:
            warn(
                f"init_random_frames={random} is not a multiple of the {requested} frames in a "
                f"batch: {math.ceil(random / requested) * requested} frames will be random"
            )
