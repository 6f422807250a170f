"""The number of frames that a collector collects, and divides into batches."""

from __future__ import annotations

import math

from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.trajectory_batcher import TrajectoryBatcher


class FrameBudget:
    """The part of a collector that counts frames.

    Attributes:
        requested_frames_per_batch: number of frames in each batch.
        most_frames: in a worker, the number of frames that the driver still takes.
    """

    config: CollectorConfig
    closed: bool
    requested_frames_per_batch: int
    _whole: TrajectoryBatcher | None
    _frames = 0
    most_frames = math.inf

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
        if total > 0 and total % requested and not (by_step or self._is_exact):
            batches = math.ceil(total / requested)
            warn(
                f"total_frames={total} is not a multiple of the {requested} frames in a batch: "
                f"{batches * requested} frames will be collected, in {batches} batches (if rows "
                f"are masked, up to {total + requested - 1} frames, in more batches)"
            )
        random = self.config.init_random_frames
        if random and random % requested and not by_step:
            warn(
                f"init_random_frames={random} is not a multiple of the {requested} frames in a "
                f"batch: {math.ceil(random / requested) * requested} frames will be random"
            )
