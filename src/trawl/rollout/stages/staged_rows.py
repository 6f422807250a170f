"""Rows of batches, and the stages through which frames reach them.

A new stage is a class in a file of its own, and a line in ``_STAGES``. The class says which options
need it, and which entries it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trawl.keys import TRAJ_IDS, Key, show_key
from trawl.rollout.batches import BatchOptions, StepFn
from trawl.rollout.block import Block
from trawl.rollout.checks import check_same_layout
from trawl.rollout.ops import write
from trawl.rollout.stages.frame_normalizer import FrameNormalizer
from trawl.rollout.stages.normalizers import ArrayNormalizer, ReadyNormalizer, TensorNormalizer
from trawl.rollout.stages.ready_stacks import ReadyStacks
from trawl.rollout.stages.stacks import FrameStacks, StackStage
from trawl.rollout.stages.stage import RowKind, Stage, StageChain, StageSetup
from trawl.rollout.steppers.arrays import Stepper

#: The stages, in the order in which frames pass them; for each, its classes for certain kinds of
#: rows, if there are any.
_STAGES: dict[type[Stage[Any, Any]], dict[RowKind, type[Stage[Any, Any]]]] = {
    FrameNormalizer: {
        "arrays": ArrayNormalizer,
        "tensors": TensorNormalizer,
        "arrival": ReadyNormalizer,
    },
    StackStage: {"arrays": FrameStacks, "tensors": FrameStacks, "arrival": ReadyStacks},
}


def stages_for(options: BatchOptions) -> list[type[Stage[Any, Any]]]:
    """Returns the stages that frames pass under these options."""
    return [stage for stage in _STAGES if stage.is_needed(options)]


def keys_read(setup: StageSetup[Any]) -> list[Key]:
    """Returns the keys of all entries that stages read; see :meth:`Stage.reads`."""
    return [key for stage in stages_for(setup.options) for key in stage.reads(setup)]


def _new_chain(setup: StageSetup[Any]) -> StageChain:
    """Returns the stages that the frames of a collector pass."""
    stages: list[Stage[Any, Any]] = []
    for stage in reversed(stages_for(setup.options)):
        stages.insert(0, _STAGES[stage].get(setup.kind, stage)(setup))
        # A stage writes into the rows of the stages after it.
        setup = replace(setup, next_rows=stages[0].first_rows(setup.next_rows))
    return StageChain(stages)


class StagedRows:
    """Rows of the batch that is being filled, and what the next batch begins with.

    Args:
        setup: what the stages are made from.

    Raises:
        KeyError, ValueError: if an observation can't be normalised or stacked.

    Attributes:
        stages: what is done to frames, in the order in which they pass.
        next: the entries that a step passes on to the next step, after a batch's last row, by key.
        more_saved: further rows that a state has, by name.
        view: memory of the batch that the stepper writes.
    """

    more_saved: Mapping[str, Any] = {}
    view: Any

    def __init__(self, setup: StageSetup[Any]) -> None:
        self.stages = _new_chain(setup)
        self.next: dict[Key, Any] = {**setup.next_rows, **self.stages.passed_on}
        self._steps, self._num_envs = setup.options.steps, setup.num_envs
        self._block: Block | None = None

    # --- between batches

    @property
    def first(self) -> dict[Key, Any]:
        """The rows into which the stepper writes what the next batch begins with."""
        return dict(self.stages.first_rows(self.next))

    def first_read(self, key: Key) -> Tensor | None:
        """Returns a copy of what the policy reads first; None if a step doesn't pass it on."""
        found = self.stages.first_read(key)
        if found is not None:
            return torch.as_tensor(found)
        return torch.as_tensor(self.next[key]).clone() if key in self.next else None

    def begin_episodes(self, stepper: Stepper[Any], view: Any, mask: Any, **kwargs: Any) -> None:
        """Begins episodes in all environments, or in those of the mask, in the next batch.

        Args:
            stepper: object that steps the environments.
            view: what it writes, with the rows of :attr:`first`.
            mask: mask of the environments; None for all.
            **kwargs: arguments of the environments' ``reset``.
        """
        stepper.reset(view, mask, **kwargs)
        self.stages.restart(mask)

    def _saved(self) -> dict[str, Tensor]:
        """Returns tensors that share the memory of the entries that a state has, by name."""
        rows = {show_key(key): row for key, row in self.next.items()}
        rows |= {**self.stages.saved_rows(), **self.more_saved}
        return {name: torch.as_tensor(row) for name, row in rows.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Returns what the next batch begins with, by name."""
        return {name: row.clone() for name, row in self._saved().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores a state that :meth:`state_dict` returned.

        Raises:
            ValueError: if it has other entries, or entries of another shape or dtype.
        """
        own = self._saved()
        check_same_layout(own, state)
        for name, row in own.items():
            row.copy_(state[name])

    # --- a batch

    @property
    def block(self) -> Block:
        """Memory of the batch that is being filled."""
        assert self._block is not None
        return self._block

    def begin(self, block: Block, view: Any) -> Any:
        """Begins a batch, after :meth:`~trawl.rollout.stages.stage.Stage.renew`.

        Args:
            block: memory to fill.
            view: the rows of the batch, with :attr:`next` after the last one.

        Returns:
            The memory that the stepper writes.
        """
        self._block, self.view = block, self.stages.begin(block, view)
        return self.view

    def pass_on(self, keys: Collection[Key]) -> None:
        """Writes the first row of the entries that the last step has passed on."""
        arrays, following = self.view.arrays, self.view.next_obs
        for key in keys:
            write(arrays[key][0, ...], following[key])

    def bind(self, step: StepFn, start: int, stop: int) -> StepFn:
        """Returns a function that takes a step in rows ``start`` to ``stop``, and all stages."""
        return self.stages.bind(step, self.view, slice(0, self._num_envs), start, stop)

    def keep(self, keys: Collection[Key], filled: int) -> None:
        """Keeps what the next batch begins with, if the batch ends before its last row."""
        if filled < self._steps:
            arrays, following = self.view.arrays, self.view.next_obs
            for key in keys:
                following[key][...] = arrays[key][filled]

    def abandon(self) -> None:
        """Gives up the batch that was begun last."""
        self._block = self.view = None
        self.stages.abandon()

    def finish(self, filled: int) -> Block:
        """Ends a batch of which ``filled`` rows were filled, and returns its memory."""
        block, self._block, self.view = self.block, None, None
        self.stages.finish(block, filled)
        if filled < self._steps:
            block.clear_from(filled, but=TRAJ_IDS)
        return block
