"""Stages, which frames pass on their way from the environment to a batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
from typing_extensions import override

from trawl.envs.frame_stack import is_feature
from trawl.keys import Key, show_keys
from trawl.rollout.batches import BatchOptions, StepFn
from trawl.rollout.episodes import EpisodeStart, Follow
from trawl.rollout.layout import FramePool, Leaf, zeros
from trawl.rollout.normalization import Normalization
from trawl.rollout.policy.leaves import PolicyLeaves
from trawl.supported import STAGE_LOOSE

#: Arrays or tensors.
Rows = TypeVar("Rows")
#: Arrays, tensors, or arrays in which a row is the frame of one environment, in the order of
#: arrival.
RowKind = Literal["arrays", "tensors", "arrival"]
#: The batch as steppers write it.
View = TypeVar("View")

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class StageSetup(Generic[Rows]):
    """Everything that the stages of a collector are made from.

    Attributes:
        options: options of the batches.
        kind: kind of the rows.
        observed: layout of the observations, by key.
        features: the observations among which an option chooses that names no keys.
        rewards: layout of the rewards, by key.
        groups: keys of the groups of agents.
        batch: batch size of the environments.
        next_rows: the entries that a step passes on to the next step, ``(num_envs, *leaf)``, by
            key. The next batch begins with them.
        masked: True if some rows of a batch hold no frame.
        home: device of the entries.
        at_once: True if code can read a tensor without waiting for a device.
        loose: keys of the observations and rewards whose layout is not fixed, so that no stage can
            read them.
    """

    options: BatchOptions
    kind: RowKind
    observed: Mapping[Key, Leaf]
    features: Mapping[Key, Leaf]
    rewards: Mapping[Key, Leaf]
    groups: Collection[str]
    batch: tuple[int, ...]
    next_rows: Mapping[Key, Rows]
    masked: bool
    home: torch.device = _CPU
    at_once: bool = True
    loose: Collection[Key] = ()

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return math.prod(self.batch)

    def zeros(self, leaf: Leaf) -> Any:
        """Returns zeros with a row for each environment."""
        size = (self.num_envs, *leaf.shape)
        if self.kind == "tensors":
            return torch.zeros(size, dtype=leaf.dtype, device=self.home)
        return zeros(size, leaf.dtype)

    def check_fixed(self, option: str, keys: Collection[Key] | None) -> None:
        """Raises a ``ValueError`` if an option is for observations whose layout is not fixed.

        Args:
            option: name of the option.
            keys: the keys that it names; None for all observations of fixed layout.
        """
        found = {key for key in self.loose if (key[0] != "next" if keys is None else key in keys)}
        if found and (keys is not None or not any(map(is_feature, self.observed))):
            raise STAGE_LOOSE.error(option, against=show_keys(found))

    @property
    def envs_per_row(self) -> int:
        """Number of environments of which a row of a batch has frames."""
        return 1 if self.kind == "arrival" else self.num_envs


class Stage(Generic[Rows, View]):
    """Something that is done to all frames, such as normalising or stacking observations.

    The stages of a collector form a chain. The stepper writes into the memory of the first stage,
    which writes into that of the next one, and so on. The last stage writes into the batch. A stage
    that has no memory of its own lets the one before it write into the memory of the one after it.
    By default, frames stay as they are.

    Args:
        setup: what the stage is made from.

    Attributes:
        keys: keys of the observations that the stage changes.
        more_leaves: layout of further entries of a batch, by key.
        pools: layout of the memory for frames that a batch refers to, by key.
        starts: objects that are called when an episode begins in the batch.
        passed_on: rows that are passed on to the next step instead of those of the environment,
            by key.
        normalization: statistics with which the stage normalises frames; None if it doesn't.

    Examples:
        A column in every batch. The table of stages in ``staged_rows.py`` gets the line
        ``Filled: {}``.

        >>> class Filled(Stage):
        ...     more_leaves = {("filled",): Leaf((1,), torch.int64)}
        ...
        ...     def finish(self, block, filled):
        ...         block.flat(("filled",))[:filled] = filled

        A column that is measured in each step. Where frames come in order of arrival, ``record`` is
        called instead of what ``bind`` returns.

        >>> from time import perf_counter
        >>> class Taken(Stage):
        ...     more_leaves = {("taken",): Leaf((1,), torch.float64)}
        ...
        ...     def begin(self, block, view):
        ...         self._taken = block.flat(("taken",))
        ...         return view
        ...
        ...     def bind(self, step, view, part, start, stop):
        ...         rows = self._taken[start:stop, part]
        ...
        ...         def step_and_note(t):
        ...             step(t)
        ...             rows[t] = perf_counter()
        ...
        ...         return step_and_note
        ...
        ...     def record(self, envs, start):
        ...         self._taken[start : start + len(envs)] = perf_counter()
    """

    keys: Sequence[Key] = ()
    more_leaves: Mapping[Key, Leaf] = {}
    pools: Mapping[Key, FramePool] = {}
    starts: Sequence[EpisodeStart] = ()
    passed_on: Mapping[Key, Rows] = {}
    normalization: Normalization | None = None

    def __init__(self, setup: StageSetup[Rows]) -> None:
        pass

    @classmethod
    def is_needed(cls, options: BatchOptions) -> bool:
        """Returns True if frames pass the stage under these options."""
        return True

    @classmethod
    def reads(cls, setup: StageSetup[Any]) -> Collection[Key]:
        """Returns the keys of the observations and the rewards that the stage reads or changes.

        Where frames have no fixed layout, the rows have only these, and the flags of episodes.

        Raises:
            KeyError, ValueError: if there is no such entry, or the stage can't read it.
        """
        return ()

    # --- layout

    def readable(self, leaves: Mapping[Key, Leaf]) -> Mapping[Key, Leaf]:
        """Returns the layout of entries as the policy reads them."""
        return leaves

    def in_batch(self, leaves: Mapping[Key, Leaf]) -> Mapping[Key, Leaf]:
        """Returns the layout of entries as a batch has them."""
        return leaves

    def check_policy(self, leaves: PolicyLeaves) -> None:
        """Raises a ``ValueError`` if a policy writes what the stage writes."""

    def source(self, source: Any) -> Any:
        """Returns an object that takes steps of tensors, and changes their results.

        Args:
            source: the environment, or an object that takes its steps.
        """
        return source

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

    def abandon(self) -> None:
        """Gives up the memory of a batch that a failure has ended."""

    # --- a batch in order of arrival: a row holds the frame of one environment

    def renew_within(self, filled: int) -> float:
        """Brings the stage up to date within a batch.

        Args:
            filled: number of rows that are filled.

        Returns:
            The number of rows to fill at most before the next call.
        """
        return math.inf

    def record(self, envs: Rows, start: int) -> None:
        """Notes that environments have taken a step, whose frames follow from row ``start`` on.

        Their first rows still have the observations with which the step began.
        """

    def pass_on(self, envs: Rows, start: int) -> None:
        """Passes on the observations after these steps, which are in the first rows now."""

    def begin_episodes(self, envs: Rows) -> None:
        """Begins episodes of environments, whose observations are in the first rows."""


class StageChain(Stage[Any, Any]):
    """Stages that frames pass one after the other, as one stage.

    Args:
        stages: the stages, in the order in which frames pass.

    Attributes:
        stages: see above.
    """

    def __init__(self, stages: Sequence[Stage[Any, Any]] = ()) -> None:
        self.stages = list(stages)
        self.keys = [key for stage in stages for key in stage.keys]
        self.starts = [start for stage in stages for start in stage.starts]
        self.more_leaves = _merged(stage.more_leaves for stage in stages)
        self.pools = _merged(stage.pools for stage in stages)
        self.passed_on = _merged(stage.passed_on for stage in stages)
        found = (stage.normalization for stage in stages)
        self.normalization = next((one for one in found if one is not None), None)

    @override
    def readable(self, leaves: Mapping[Key, Leaf]) -> Mapping[Key, Leaf]:
        for stage in self.stages:
            leaves = stage.readable(leaves)
        return leaves

    @override
    def in_batch(self, leaves: Mapping[Key, Leaf]) -> Mapping[Key, Leaf]:
        for stage in self.stages:
            leaves = stage.in_batch(leaves)
        return leaves

    @override
    def check_policy(self, leaves: PolicyLeaves) -> None:
        for stage in self.stages:
            stage.check_policy(leaves)

    @override
    def source(self, source: Any) -> Any:
        for stage in self.stages:
            source = stage.source(source)
        return source

    @override
    def first_rows(self, rows: Mapping[Key, Any]) -> Mapping[Key, Any]:
        for stage in reversed(self.stages):
            rows = stage.first_rows(rows)
        return rows

    @override
    def restart(self, mask: Any) -> None:
        for stage in self.stages:
            stage.restart(mask)

    @override
    def first_read(self, key: Key) -> Any:
        found = (stage.first_read(key) for stage in reversed(self.stages))
        return next((one for one in found if one is not None), None)

    @override
    def saved_rows(self) -> dict[str, Any]:
        return _merged(stage.saved_rows() for stage in self.stages)

    @override
    def renew(self, most_frames: float, in_groups: bool) -> Any:
        mask = None
        for stage in self.stages:
            if mask is not None:
                stage.restart(mask)
            found = stage.renew(most_frames, in_groups)
            mask = mask if found is None else found
        return mask

    @override
    def begin(self, block: Any, view: Any) -> Any:
        for stage in reversed(self.stages):
            view = stage.begin(block, view)
        return view

    @override
    def bind(self, step: StepFn, view: Any, part: slice, start: int, stop: int) -> StepFn:
        for stage in self.stages:
            step = stage.bind(step, view, part, start, stop)
        return step

    @override
    def followers(self, start: int, stop: int) -> list[Follow]:
        return [one for stage in self.stages for one in stage.followers(start, stop)]

    @override
    def finish(self, block: Any, filled: int) -> None:
        for stage in self.stages:
            stage.finish(block, filled)

    @override
    def abandon(self) -> None:
        for stage in self.stages:
            stage.abandon()

    @override
    def renew_within(self, filled: int) -> float:
        within = math.inf
        for stage in self.stages:
            within = min(within, stage.renew_within(filled))
        return within

    @override
    def record(self, envs: Any, start: int) -> None:
        for stage in self.stages:
            stage.record(envs, start)

    @override
    def pass_on(self, envs: Any, start: int) -> None:
        for stage in self.stages:
            stage.pass_on(envs, start)

    @override
    def begin_episodes(self, envs: Any) -> None:
        for stage in self.stages:
            stage.begin_episodes(envs)


def _merged(found: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    return {key: value for one in found for key, value in one.items()}
