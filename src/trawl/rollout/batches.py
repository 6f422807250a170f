"""Options of batches, and functions that fill their rows: what all parts of the loop know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trawl.envs.frame_stack import FrameStack
from trawl.rollout.normalization import NormalizeOptions
from trawl.rollout.restarts import EnvRestarts

#: Function of the number of a row, which acts there.
ActFn = Callable[[int], None]
#: Function of the number of a row, which steps the environments there.
StepFn = Callable[[int], None]


class NoFixedLayout(Exception):
    """Raised with the reason why a batch can't have a fixed layout."""


@dataclass(frozen=True)
class BatchOptions:
    """Options of the batches that a writer fills.

    Attributes:
        steps: number of rows in a batch.
        limit: number of steps after which an episode is cut off; None for no limit.
        track_traj_ids: True if frames have the id of their trajectory.
        compact: True if observations are left out of ``"next"``.
        recycle: True if the memory of batches that are no longer in use is reused.
        is_init: True if frames have the flag ``is_init``, which marks the first frame of an
            episode; None to add the flag only if the policy reads it.
        restarts: record of failures, if environments that fail are rebuilt; None to raise errors
            instead.
        frame_stack: stacks of observations; None if observations are not stacked.
        normalize: what is normalised.
    """

    steps: int
    limit: int | None = None
    track_traj_ids: bool = True
    compact: bool = False
    recycle: bool = True
    is_init: bool | None = None
    restarts: EnvRestarts | None = None
    frame_stack: FrameStack | None = None
    normalize: NormalizeOptions = field(default_factory=NormalizeOptions)

    @property
    def truncates(self) -> bool:
        """True if episodes may be cut off that the environment itself would continue."""
        return self.limit is not None or self.restarts is not None

    def marks_starts(self, read: bool) -> bool:
        """Returns True if frames have the flag ``is_init``.

        Args:
            read: True if the policy reads the flag.
        """
        return read if self.is_init is None else self.is_init
