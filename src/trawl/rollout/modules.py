"""Replaces known modules with plain functions, and tells which modules leave inputs alone.

A call of an ``nn.Module`` looks for hooks, and a layer looks up its parameters by name. For small
networks, these lookups cost as much as the arithmetic. They can be done before the loop, but must
be repeated for each batch, because a user may add a hook or replace a parameter between two
batches. The operations are the same, so the results are identical to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn
from torch.nn.functional import linear
from torch.nn.modules.module import _has_any_global_hook

Function = Callable[..., Any]

# Modules of these packages only compute, and do not keep their inputs.
_STOCK = ("torch.nn.", "tensordict.nn.")
_SEQUENCES = (TensorDictSequential, ProbabilisticTensorDictSequential)
#: Packages whose distributions only compute, and do not keep their arguments.
DISTRIBUTIONS = ("torch.distributions.", "tensordict.nn.")

_SIMPLE: dict[type[nn.Module], Function] = {
    nn.Tanh: torch.tanh,
    nn.Sigmoid: torch.sigmoid,
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def unroll(module: Any) -> Function:
    """Returns a function that is equivalent to a call of ``module``.

    Args:
        module: a callable; anything but an ordinary module is returned unchanged.
    """
    if not isinstance(module, nn.Module) or is_special(module):
        return module  # type: ignore[no-any-return]
    kind = type(module)
    if isinstance(module, nn.Sequential) and kind is nn.Sequential:
        return _chain([unroll(child) for child in module])
    if isinstance(module, nn.Linear) and kind is nn.Linear:
        return _linear(module)
    if isinstance(module, NormalParamExtractor) and kind is NormalParamExtractor:
        return _normal_parameters(module)
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if kind is nn.ReLU and not module.inplace:
        return torch.relu
    return module.forward


def is_special(module: nn.Module) -> bool:
    """Returns True if a call of the module does more than call its ``forward``."""
    return (
        type(module).__call__ is not nn.Module.__call__
        or "forward" in vars(module)
        or isinstance(module, torch.jit.ScriptModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        or any(getattr(module, name, None) for name in _HOOKS)
        or _has_any_global_hook()
    )


def _chain(functions: list[Function]) -> Function:
    if len(functions) == 1:
        return functions[0]

    def run(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return run


def _linear(layer: nn.Linear) -> Function:
    weight, bias = layer.weight, layer.bias
    return lambda value: linear(value, weight, bias)


def _normal_parameters(extractor: NormalParamExtractor) -> Function:
    positive, least = unroll(extractor.scale_mapping), extractor.scale_lb

    def split(tensor: Any, *others: Any) -> Any:
        loc, scale = tensor.chunk(2, -1)
        return (loc, positive(scale).clamp_min(least), *others)

    return split


def leaves_inputs_alone(module: Any) -> bool:
    """Returns True if a policy is certain neither to change nor to keep its input tensors.

    Only known code can be trusted. A check after the call would miss some changes, because numpy,
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
        return isinstance(made_by, type) and made_by.__module__.startswith(DISTRIBUTIONS)
    # A plain function is not among the checked modules, and may do anything.
    return kind in _SEQUENCES or (kind is TensorDictModule and isinstance(part.module, nn.Module))
