"""The number of frames that a collector collects, and divides into batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from operator import add, attrgetter, sub
from typing import Any

from typing_extensions import Self

from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.driver.lifetime import Lifetime

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
        return cls(*map(sum, zip(*map(_values, parts), strict=True)))

    def since(self, before: FrameCounts) -> FrameCounts:
        """Returns what was counted since an earlier time, with the frames that are pending now."""
        found = FrameCounts(*map(sub, _values(self), _values(before)))
        found.trajectory_pending_frames = self.trajectory_pending_frames
        return found

    def add(self, other: FrameCounts) -> None:
        """Adds what was counted since, which :meth:`since` returned."""
        for name, count in zip(_NAMES, map(add, _values(self), _values(other)), strict=True):
            setattr(self, name, count)
        self.trajectory_pending_frames = other.trajectory_pending_frames

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores the counts of a state; no frames are pending then."""
        for name in _NAMES:
            setattr(self, name, int(state.get(name, 0)))
        self.trajectory_pending_frames = 0


_NAMES = tuple(field.name for field in fields(FrameCounts))
# Several times as quick as ``astuple``, which copies each number. Batches of workers are counted.
_values = attrgetter(*_NAMES)


def progress_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the entry of a collector's state with its progress.

    Older states, and those of TorchRL 0.14, have the number of frames alone.
    """
    found: Mapping[str, Any] = state.get(PROGRESS, {"stepped_frames": state["frames"]})
    return found


class FrameBudget:
    """The frames that a collector has delivered, and those that are left.

    Args:
        config: options of the collector.
        lifetime: the time in which the collector is open.

    Attributes:
        frames: number of frames delivered so far.
        batches: number of batches delivered so far.
        requested: number of frames in each batch.
        exact: True if exactly ``total_frames`` are collected, and not only whole batches.
        at_once: number of batches that are collected at the same time.
        most: in a worker, the number of frames that the driver still takes.
        own: what this process counts.
        of_workers: function that returns what each worker counts.
    """

    def __init__(self, config: CollectorConfig, lifetime: Lifetime) -> None:
        self._config, self._lifetime = config, lifetime
        self.frames = self.batches = 0
        self.requested = config.frames_per_batch
        self.exact = config.exact_frames
        self.at_once = 1
        self.most = math.inf
        self.own = FrameCounts()
        self.of_workers: Callable[[], Iterable[FrameCounts]] = tuple

    # --- progress

    def count(self, frames: int, batches: int = 1) -> None:
        """Counts frames and batches that are delivered, or written to the replay buffer."""
        self.frames += frames
        self.batches += batches

    @property
    def counts(self) -> FrameCounts:
        """The counts of frames and trajectories; a copy."""
        found = FrameCounts.total([self.own, *self.of_workers()])
        return replace(found, trajectory_pending_frames=0) if self._lifetime.closed else found

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries of a state that this object has."""
        return {"frames": self.frames, "iter": self.batches, PROGRESS: asdict(self.counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the entries that :meth:`state_dict` returned, except for what workers count."""
        self.frames, self.batches = int(state["frames"]), int(state["iter"])
        self.own = FrameCounts()
        loaded = FrameCounts()
        loaded.load(progress_of(state))
        self.own = loaded.since(FrameCounts.total(self.of_workers()))

    def stats(self) -> dict[str, Any]:
        """Returns this part of the collector's ``stats()``."""
        return {
            "frames": self.frames,
            "batches": self.batches,
            "requested_frames_per_batch": self.requested,
            **asdict(self.counts),
        }

    def limits(self) -> dict[str, Any]:
        """Returns the entries of ``stats()`` about the limit on frames, if there is one."""
        if self._config.endless:
            return {}
        return {"total_frames": self._config.total_frames, "completed": self.is_complete}

    # --- what is left

    @property
    def is_complete(self) -> bool:
        """True if ``total_frames`` have been delivered."""
        return not (self._config.endless or self.frames < self._config.total_frames)

    def has_more(self, after: int = 0) -> bool:
        """Returns True if frames are left to collect after the next ``after`` frames."""
        if self._lifetime.closed:
            return False
        return self._config.endless or self.frames + after < self._config.total_frames

    def left(self) -> float:
        """Returns the number of frames that the next batch may have at most."""
        if self._config.endless or not self.exact:
            return self.most
        return min(self.most, self._config.total_frames - self.frames)

    # --- batches

    @property
    def frames_at_once(self) -> int:
        """Number of frames in all batches that are collected at the same time."""
        return self.requested * self.at_once

    def count_batches(self) -> int:
        """Returns the number of batches that are delivered in all.

        Raises:
            TypeError: if it isn't known.
        """
        if self._config.endless:
            raise TypeError("an endless collector (total_frames=-1) has no length")
        if self._config.whole_trajectories and self._config.replay_buffer is None:
            raise TypeError(
                "with trajs_per_batch, the number of batches depends on the lengths of trajectories"
            )
        return math.ceil(self._config.total_frames / self.requested)

    def divide(self, environments: int) -> int:
        """Sets :attr:`requested`, and returns the frames of each environment in a batch."""
        wanted = self._config.frames_per_batch
        each = math.ceil(wanted / environments)
        self.requested = requested = each * environments
        if requested != wanted:
            warn(
                f"frames_per_batch={wanted} is not a multiple of the number of environments, "
                f"{environments}: each batch will have {requested} frames, {each} from each "
                "environment"
            )
        self.warn_of_remainders()
        return each

    def warn_of_remainders(self) -> None:
        """Warns if a number of frames is not a multiple of the frames in a batch."""
        config, requested = self._config, self.requested
        total, by_step = config.total_frames, config.adds_steps
        whole = not (config.endless or by_step or self.exact)
        if whole and total % requested:
            batches = math.ceil(total / requested)
            warn(
                f"total_frames={total} is not a multiple of the {requested} frames in a batch: "
                f"{batches * requested} frames will be collected, in {batches} batches (if rows "
                f"are masked, up to {total + requested - 1} frames, in more batches). To collect "
                f"exactly {total} frames, pass exact_frames=True"
            )
        random = config.init_random_frames
        if random and random % requested and not by_step:
            warn(
                f"init_random_frames={random} is not a multiple of the {requested} frames in a "
                f"batch: {math.ceil(random / requested) * requested} frames will be random"
            )
