"""Modules that are known to be safe with direct access to the memory of a batch."""

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

# Modules of these packages compute, and keep no inputs.
_STOCK = ("torch.nn.", "tensordict.nn.")
_SEQUENCES = (TensorDictSequential, ProbabilisticTensorDictSequential)
_DISTRIBUTIONS = ("torch.distributions.", "tensordict.nn.")


def leaves_inputs_alone(module: Any) -> bool:
    """Returns True if a policy is certain neither to change nor to keep its input tensors.

    Only known code can be trusted. A check for changes afterwards would miss some, because numpy,
    ``Tensor.data`` and compiled code write without increasing a tensor's version counter.
    """
    return isinstance(module, nn.Module) and all(map(_is_harmless, module.modules()))


def _is_harmless(part: nn.Module) -> bool:
    """Returns True if a module, apart from its children, neither changes nor keeps its inputs."""
    kind = type(part)
    if not kind.__module__.startswith(_STOCK) or is_special(part):
        return False
    if not isinstance(part, TensorDictModuleBase):
        return not getattr(part, "inplace", False)
    if kind is ProbabilisticTensorDictModule:
        made_by = part.distribution_class
        return isinstance(made_by, type) and made_by.__module__.startswith(_DISTRIBUTIONS)
    # A function is not among the modules checked, and may do anything.
    return kind in _SEQUENCES or (kind is TensorDictModule and isinstance(part.module, nn.Module))
