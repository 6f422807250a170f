"""Contract between the loop and the three ways to fill a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from trawl.envs.frame_stack import FrameStack
from trawl.keys import Key
from trawl.rollout.block import Block
from trawl.rollout.episode_sums import EpisodeSums
from trawl.rollout.episodes import EpisodeTracker
from trawl.rollout.layout import Layout
from trawl.rollout.normalization import Normalization, NormalizeOptions
from trawl.rollout.policy.policy import Policy
from trawl.rollout.steppers.restarts import EnvRestarts

ActFn = Callable[[int], None]
StepFn = Callable[[int], None]


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

    def marks_starts(self, policy: Policy) -> bool:
        """Returns True if frames have the flag ``is_init``."""
        return policy.reads_is_init if self.is_init is None else self.is_init


class BatchWriter(Protocol):
    """Fills batches with frames, step by step.

    The loop begins a batch, binds it chunk by chunk, and finishes it. Binding returns two
    functions: one for the policy's part of a step, and one for the environment's part. Both take
    the number of a row in the chunk.

    Attributes:
        env: the environment, which may be replaced after a failure.
        policy: the policy.
        num_envs: number of environments.
        episodes: position of each environment in its episode.
        sums: return and length of each environment's episode so far.
        warnings: warnings to the user about the environment and the policy.
        normalization: statistics with which frames are normalised; None if they are not.
        most_frames: largest number of frames of the next batch to deliver. If the last row holds
            more frames, they are cut off.
    """

    env: Any
    policy: Policy
    num_envs: int
    episodes: EpisodeTracker
    sums: EpisodeSums
    warnings: Sequence[str]
    normalization: Normalization | None = None
    most_frames: float = math.inf

    @property
    def waited(self) -> float:
        """Seconds that the policy's part of the current chunk has waited for environments."""
        return 0.0

    @property
    def in_groups(self) -> bool:
        """True if the policy acts for one group of environments while the others step."""
        return False

    @property
    def layout(self) -> Layout | None:
        """The layout of all batches, or None if it is not fixed."""

    @property
    def hidden(self) -> frozenset[Key]:
        """Keys of entries in the layout that are left out of delivered batches."""

    def begin(self, block: Block | None = None) -> None:
        """Prepares a new batch, in the memory of ``block`` if one is given."""

    def bind(self, start: int, stop: int, random: bool) -> tuple[ActFn | None, StepFn]:
        """Returns the functions for rows ``start`` to ``stop``.

        The policy's function is None if these rows already have actions.
        """

    def finish(self, filled: int) -> TensorDictBase | None:
        """Returns the batch, in which the first ``filled`` rows have frames.

        Returns None if the batch is in the block that was passed to :meth:`begin`.
        """

    def abandon(self) -> None:
        """Gives up the memory of a batch that a failure has ended."""

    def reset(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        """Begins new trajectories in all environments, or where ``mask`` is True."""

    def state_dict(self) -> dict[str, Any]:
        """Returns what the next batch begins with, except the states of the environments.

        The entries are tensors, numbers, lists, and dictionaries of these.
        """
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned.

        Raises:
            ValueError: if it has other entries, or entries of another shape or dtype. Nothing is
                changed then.
        """
        raise NotImplementedError

    def fake(self) -> TensorDictBase:
        """Returns a batch of zeros with the layout of a real one."""

    def describe(self) -> dict[str, Any]:
        """Returns a description of the path in use, with the reason if it is not the fastest."""


class NoFixedLayout(Exception):
    """Raised with the reason why a batch can't have a fixed layout."""
