"""The stages of a collector, in the order in which frames pass them.

A new stage is a class in a file of its own and a line in ``_STAGES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trawl.rollout.array_normalizer import ArrayNormalizer
from trawl.rollout.ready_stages import ReadyNormalizer, ReadyStacks
from trawl.rollout.stacks import FrameStacks
from trawl.rollout.stage import Stage, StageChain, StageSetup
from trawl.rollout.tensor_normalizer import TensorNormalizer

_NORMALIZERS: dict[str, type[Stage[Any, Any]]] = {
    "arrays": ArrayNormalizer,
    "tensors": TensorNormalizer,
    "arrival": ReadyNormalizer,
}


def _normalizer(setup: StageSetup[Any]) -> Stage[Any, Any] | None:
    make: Any = _NORMALIZERS[setup.kind]
    return make(setup) if setup.options.normalize else None


def _stacks(setup: StageSetup[Any]) -> Stage[Any, Any] | None:
    if setup.options.frame_stack is None:
        return None
    return ReadyStacks(setup) if setup.kind == "arrival" else FrameStacks(setup)


#: Functions that return a stage, or None if the options don't need it.
_STAGES: list[Callable[[StageSetup[Any]], Stage[Any, Any] | None]] = [_normalizer, _stacks]


def new_chain(setup: StageSetup[Any]) -> StageChain:
    """Returns the stages that the frames of a collector pass.

    Raises:
        KeyError, ValueError: if an observation can't be normalised or stacked.
    """
    stages: list[Stage[Any, Any]] = []
    for make in reversed(_STAGES):
        stage = make(setup)
        if stage is not None:
            # A stage writes into the rows of the stages after it.
            setup = replace(setup, next_rows=stage.first_rows(setup.next_rows))
            stages.insert(0, stage)
    return StageChain(stages)
