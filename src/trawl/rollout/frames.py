"""What the loop needs of whatever fills a batch: the two ways share this contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase

from trawl.keys import Key
from trawl.rollout.block import Block
from trawl.rollout.layout import Layout
from trawl.rollout.record import Episodes
from trawl.rollout.restarts import Restarts

ActFn = Callable[[int], None]
StepFn = Callable[[int], None]


@dataclass(frozen=True)
class FrameOptions:
    """What is recorded beside what environment and policy give.

    Attributes:
        steps: rows of a batch.
        limit: steps after which an episode is cut off, or None.
        track_traj_ids: whether frames carry their trajectory's id.
        compact: whether observations are left out of ``"next"``.
        recycle: whether memory of batches that nobody holds is used again.
        is_init: whether frames say that they begin an episode; None if the policy asks for it.
        restarts: builds environments anew that fail; None if errors are raised.
    """

    steps: int
    limit: int | None = None
    track_traj_ids: bool = True
    compact: bool = False
    recycle: bool = True
    is_init: bool | None = None
    restarts: Restarts | None = None


class Frames(Protocol):
    """Fills batches with frames, step by step.

    A batch is begun, bound stretch by stretch to two functions of the row within the stretch
    (the policy's and the environment's part of a step), and finished.

    Attributes:
        env: the environment; it may be replaced by another after a failure.
        lanes: number of environments.
        episodes: where each of them is in its episode.
        doubts: what may be wrong with environment and policy, for the user to be warned of.
    """

    env: Any
    lanes: int
    episodes: Episodes
    doubts: Sequence[str]

    @property
    def layout(self) -> Layout | None:
        """The layout of all batches, if they have one and the same."""

    @property
    def hidden(self) -> set[Key]:
        """Entries of the layout that are not delivered."""

    def begin(self, block: Block | None = None) -> None:
        """Prepares a new batch, in that memory if it is given."""

    def bind(self, start: int, stop: int, random: bool) -> tuple[ActFn | None, StepFn]:
        """The functions for rows ``start`` to ``stop``.

        ``None`` for the policy's part says that its rows are filled already.
        """

    def finish(self, filled: int) -> TensorDictBase | None:
        """The batch, of whose rows the first ``filled`` were stepped.

        None says that it is in the block which was given for it.
        """

    def reset(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        """Begins new trajectories, everywhere or where ``mask`` says."""

    def fake(self) -> TensorDictBase:
        """A batch of zeros with the layout of a real one."""

    def describe(self) -> dict[str, Any]:
        """Which path is in use, and why not a faster one."""


class NotFixed(Exception):
    """Says why a batch can't have a fixed layout."""
