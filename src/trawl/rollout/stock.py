"""Modules that are known well enough to be given the memory of a batch."""

from __future__ import annotations

from typing import Any

from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn

from trawl.rollout.unroll import is_special

# Modules of these packages compute, and keep nothing.
_STOCK = ("torch.nn.", "tensordict.nn.")
_SEQUENCES = (TensorDictSequential, ProbabilisticTensorDictSequential)
_DISTRIBUTIONS = ("torch.distributions.", "tensordict.nn.")


def leaves_inputs_alone(module: Any) -> bool:
    """Whether it is certain that a policy neither changes nor keeps the tensors it is given.

    Only code that is known can be trusted with that. To look for changes afterwards would not be
    exact: numpy, ``Tensor.data`` and compiled code write past a tensor's version counter.
    """
    return isinstance(module, nn.Module) and all(map(_is_harmless, module.modules()))


def _is_harmless(part: nn.Module) -> bool:
    """Whether a module, its children aside, neither changes nor keeps its inputs."""
    kind = type(part)
    if not kind.__module__.startswith(_STOCK) or is_special(part):
        return False
    if not isinstance(part, TensorDictModuleBase):
        return not getattr(part, "inplace", False)
    if kind is ProbabilisticTensorDictModule:
        made_by = part.distribution_class
        return isinstance(made_by, type) and made_by.__module__.startswith(_DISTRIBUTIONS)
    # A function is no child, and may do anything.
    return kind in _SEQUENCES or (kind is TensorDictModule and isinstance(part.module, nn.Module))
