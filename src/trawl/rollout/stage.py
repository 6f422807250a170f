"""Stages, which frames pass on their way from the environment to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from trawl.keys import Key
from trawl.rollout.batch_writer import StepFn
from trawl.rollout.episodes import EpisodeStart, Follow
from trawl.rollout.layout import FramePool, Leaf
from trawl.rollout.policy_leaves import PolicyLeaves

#: Arrays or tensors.
Rows = TypeVar("Rows")
#: The batch as steppers write it.
View = TypeVar("View")


class Stage(Generic[Rows, View]):
    """Something that is done to all frames, such as normalising or stacking observations.

    The stages of a collector form a chain. The stepper writes into the memory of the first stage,
    which writes into that of the next one, and so on. The last stage writes into the batch. A stage
    that has no memory of its own lets the one before it write into the memory of the one after it.
    By default, frames stay as they are.

    Attributes:
        keys: keys of the observations that the stage changes.
        more_leaves: layout of further entries of a batch, by key.
        pools: layout of the memory for frames that a batch refers to, by key.
        starts: objects that are called when an episode begins in the batch.
    """

    keys: Sequence[Key] = ()
    more_leaves: Mapping[Key, Leaf] = {}
    pools: Mapping[Key, FramePool] = {}
    starts: Sequence[EpisodeStart] = ()

    # --- layout

    def readable(self, leaves: Mapping[Key, Leaf]) -> Mapping[Key, Leaf]:
        """Returns the layout of entries as the policy reads them."""
        return leaves

    def in_batch(self, leaves: Mapping[Key, Leaf]) -> Mapping[Key, Leaf]:
        """Returns the layout of entries as a batch has them."""
        return leaves

    def check_policy(self, leaves: PolicyLeaves) -> None:
        """Raises a ``ValueError`` if a policy writes what the stage writes."""

    # --- between batches

    def first_rows(self, rows: Mapping[Key, Rows]) -> Mapping[Key, Rows]:
        """Returns the rows for the observations with which the next batch begins.

        Args:
            rows: the rows into which the stage writes them.
        """
        return rows

    def restart(self, mask: Rows | None) -> None:
        """Begins episodes in all environments, or where ``mask`` is True, in the first rows."""

    def first_read(self, key: Key) -> Rows | None:
        """Returns a copy of what the policy reads first; None for the first row itself."""
        return None

    def saved_rows(self) -> dict[str, Rows]:
        """Returns the rows to save in a state, by name."""
        return {}

    # --- a batch

    def renew(self, most_frames: float, in_groups: bool) -> Rows | None:
        """Brings the stage up to date before a batch.

        Args:
            most_frames: largest number of frames of the batch to deliver.
            in_groups: True if the rows of a step are not filled all at once.

        Returns:
            A mask of the environments whose first rows have changed; None for no environment.
        """
        return None

    def begin(self, block: Any, view: View) -> View:
        """Begins a batch.

        Args:
            block: memory of the batch.
            view: the memory into which the stage writes.

        Returns:
            The memory into which the stage before this one writes, or the stepper.
        """
        return view

    def bind(self, step: StepFn, view: View, part: slice, start: int, stop: int) -> StepFn:
        """Returns a function that takes a step, and does what follows it.

        Args:
            step: function that takes the step of row ``start + t``.
            view: the memory that :meth:`begin` returned.
            part: the environments that step.
            start: the first row.
            stop: the row after the last row.
        """
        return step

    def followers(self, start: int, stop: int) -> list[Follow]:
        """Returns what to call after each step of tensors, when the next row is written."""
        return []

    def finish(self, block: Any, filled: int) -> None:
        """Ends a batch, of which ``filled`` rows were filled."""
