"""Replaces known modules with plain functions, and tells which modules leave inputs alone.

A call of an ``nn.Module`` looks for hooks, and a layer looks up its parameters by name. For small
networks, these lookups cost as much as the arithmetic. They can be done before the loop, but must
be repeated after a user has added a hook or replaced a parameter, which :class:`ModuleWatch`
notices between two batches. The operations are the same, so the results are identical to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import is_
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

from trawl.foreign.torch import ENTRIES, HOOKS, has_compiled_call, has_global_hook

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
_TABLES = (*ENTRIES, *HOOKS)


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
        or has_compiled_call(module)
        or any(getattr(module, name, None) for name in HOOKS)
        or has_global_hook()
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


class ModuleWatch:
    """Notices changes of a module on which a plan depends.

    These are the attributes, parameters, hooks and classes of the module and of all modules in it.
    The values of tensors may change.

    Args:
        module: the module, or any other callable, which never changes.
    """

    def __init__(self, module: Any) -> None:
        self._parts = list(module.modules()) if isinstance(module, nn.Module) else []
        # The values of a dictionary follow its changes.
        self._tables: list[Iterable[Any]] = [
            table.values() if isinstance(table, dict) else table
            for part in self._parts
            for table in _tables(part)
        ]
        self._kinds: set[type[nn.Module]] = set(map(type, self._parts))
        self._found = self._now()

    def _now(self) -> list[Any]:
        found = [has_global_hook(), *chain.from_iterable(self._tables)]
        found += map(type, self._parts)
        for kind in self._kinds:
            # A script has a method of this name only in its instances.
            found += (getattr(kind, "forward", None), kind.__call__)
        return found

    @property
    def has_changed(self) -> bool:
        """True if the module is no longer what it was when this object was made."""
        now = self._now()
        return len(now) != len(self._found) or not all(map(is_, now, self._found))


def _tables(part: nn.Module) -> Iterable[dict[Any, Any] | list[Any]]:
    """Yields the attributes of a module, apart from its children, and what is in its tables."""
    own = vars(part)
    yield own
    # Other modules may have data in dictionaries and lists.
    known = own if isinstance(part, TensorDictModuleBase) else _TABLES
    for name in known:
        if isinstance(table := own.get(name), (dict, list)):
            yield table


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
