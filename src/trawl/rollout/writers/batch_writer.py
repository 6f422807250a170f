"""Contract between the loop and the three ways to fill a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from trawl.keys import Key
from trawl.rollout.batches import ActFn, StepFn
from trawl.rollout.block import Block
from trawl.rollout.episode_sums import EpisodeSums
from trawl.rollout.episodes import EpisodeTracker
from trawl.rollout.layout import Layout
from trawl.rollout.normalization import Normalization
from trawl.rollout.policy.policy import Policy


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
