"""Plans, which call a TensorDict policy directly on tensors.

Most policies are a chain of TensorDictModules around ordinary modules. The keys that the chain
reads and writes are known before it runs, so the loop can pass tensors directly to the inner
modules, without TensorDicts. :func:`make_plan` makes a plan only if the results are certain to be
the same; otherwise it raises :class:`NotPlannable` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn

from trawl.foreign.tensordict import overrides_calls
from trawl.keys import Key, as_key, show_key
from trawl.rollout.policy.modules import is_special, unroll
from trawl.rollout.policy.sampling import Sampling, is_known_sampler, sampling

Values = dict[Key, Any]
Operation = Callable[[Values], None]


@dataclass(frozen=True)
class Plan:
    """Policy in the form of a function of tensors.

    Attributes:
        reads: keys of the arguments of ``call``.
        writes: keys of the results of ``call``.
        call: function that takes a tensor for each key in ``reads``, and returns a sequence with a
            tensor for each key in ``writes``. If ``writes`` has only one key, it returns the
            tensor itself.
        samplings: the samplings in ``call``.
    """

    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    call: Callable[..., Any]
    samplings: tuple[Sampling, ...] = ()

    def outputs(self, *inputs: Tensor) -> Sequence[Any]:
        """Returns the results of ``call`` as a sequence, also if there is only one."""
        found: Any = self.call(*inputs)
        return (found,) if len(self.writes) == 1 else found


class NotPlannable(Exception):
    """Raised with the reason why a policy can't be called on tensors directly."""


def make_plan(
    module: Any,
    exploration: InteractionType,
    unrolled: bool = True,
    alone: bool = False,
    varies: bool = False,
) -> Plan:
    """Returns the plan of a policy.

    Args:
        module: the policy.
        exploration: exploration type of probabilistic modules.
        unrolled: True to replace inner modules with the functions that they currently run. If
            False, the plan calls the modules, and stays valid when they change.
        alone: True if no other thread draws random numbers.
        varies: True if calls have batches of different sizes.

    Raises:
        NotPlannable: if the policy needs a TensorDict; the message says why.
    """
    steps = list(_steps(module))
    if len(steps) == 1 and isinstance(steps[0], TensorDictModule):
        single = _single(steps[0], unrolled)
        if single is not None:
            return single
    operations: list[Operation] = []
    samplings: list[Sampling] = []
    reads: list[Key] = []
    writes: list[Key] = []
    for step in steps:
        for key in map(as_key, step.in_keys):
            if key not in writes and key not in reads:
                reads.append(key)
        if isinstance(step, ProbabilisticTensorDictModule):
            drawn = sampling(step, exploration, alone)
            if isinstance(drawn, str):
                raise NotPlannable(drawn)
            if unrolled:
                samplings.append(drawn)
            if varies:
                drawn.why_objects = "the sizes of the policy's batches vary"
            drawn.renew(alone, objects=varies or not unrolled)
            operations.append(_draw(drawn))
        else:
            operations.append(_operation(step, unrolled))
        writes += [key for key in _out_keys(step) if key not in writes]
    if not writes:
        raise NotPlannable("the policy has no out_keys")
    call = _chain(operations, reads, writes)
    return Plan(tuple(reads), tuple(writes), call, tuple(samplings))


def _chain(operations: list[Operation], reads: list[Key], writes: list[Key]) -> Callable[..., Any]:
    only = writes[0] if len(writes) == 1 else None

    def call(*inputs: Tensor) -> Any:
        values = dict(zip(reads, inputs, strict=True))
        for operation in operations:
            operation(values)
        return [values[key] for key in writes] if only is None else values[only]

    return call


def _steps(module: Any) -> Iterable[Any]:
    """Yields the modules that run one after the other; sequences are replaced by their members."""
    if isinstance(module, nn.Module) and (is_special(module) or _overrides(module)):
        raise NotPlannable(f"{type(module).__name__} has hooks, or methods of its own")
    forward = getattr(type(module), "forward", None)
    if forward in (TensorDictSequential.forward, ProbabilisticTensorDictSequential.forward):
        if (
            module.partial_tolerant
            or _setting(module, "select_before_return")
            or module.inplace is not None
        ):
            raise NotPlannable(f"{type(module).__name__} selects or separates its output")
        children = module.module
        for child in children.values() if isinstance(children, nn.ModuleDict) else children:
            yield from _steps(child)
    elif forward is TensorDictModule.forward or is_known_sampler(module):
        yield module
    elif isinstance(module, nn.Module):
        raise NotPlannable(f"{type(module).__name__} defines its own forward")
    else:
        raise NotPlannable(f"{type(module).__name__} takes a TensorDict")


def _overrides(module: nn.Module) -> bool:
    """Returns True if a subclass changes how a module is called or its outputs are written."""
    return isinstance(module, TensorDictModule) and overrides_calls(type(module))


def _out_keys(module: Any) -> list[Key]:
    return [key for key in map(as_key, module.out_keys) if key != ("_",)]


def _single(module: TensorDictModule, unrolled: bool) -> Plan | None:
    """Returns a plan without overhead for a module with one input and one output, or None."""
    if len(module.in_keys) != 1 or len(module.out_keys) != 1 or _out_keys(module) == []:
        return None
    if (
        _setting(module, "kwargs") is not None
        or module.method_kwargs
        or _setting(module, "get_kwargs")
    ):
        return None
    if module.inplace is not True:
        return None
    reads, writes = (as_key(module.in_keys[0]),), (as_key(module.out_keys[0]),)
    return Plan(reads, writes, _function(module, unrolled))


def unwrap(value: Any, key: Key) -> Tensor:
    """Returns the tensor in an output that is not a tensor itself.

    A module with a single output key may return a tuple with one element, or a mapping with that
    key. Numbers and arrays become tensors, as they do in a TensorDict.

    Raises:
        TypeError: if the output contains no tensor, array or number.
    """
    inner = value
    if isinstance(value, (tuple, dict, TensorDictBase)):
        inner = dict(_by_key(value, [key])).get(key)
    if isinstance(inner, (bool, int, float, np.ndarray, np.generic)) or _is_numbers(inner):
        inner = torch.as_tensor(inner)
    if not isinstance(inner, Tensor):
        raise TypeError(
            f"policy wrote {show_key(key)} as {type(value).__name__} instead of a tensor"
        )
    return inner


def _is_numbers(value: Any) -> bool:
    """Returns True if a value is a list of numbers, or nested lists of numbers."""
    numbers = (bool, int, float)
    return isinstance(value, list) and all(isinstance(v, numbers) or _is_numbers(v) for v in value)


def _setting(module: Any, name: str) -> Any:
    """Returns a setting of a TensorDictModule that has no public name, or None."""
    return getattr(module, f"_{name}", None)


def _function(module: TensorDictModule, unrolled: bool) -> Callable[..., Any]:
    inner = module.module
    if module.method is None:
        return unroll(inner) if unrolled else inner
    method: Callable[..., Any] = getattr(inner, module.method)
    return method


def _operation(module: Any, unrolled: bool) -> Operation:
    if module.inplace is not True or _setting(module, "get_kwargs"):
        raise NotPlannable(f"{type(module).__name__} has inplace={module.inplace!r}")
    function, fixed = _function(module, unrolled), dict(module.method_kwargs)
    in_keys = [as_key(key) for key in module.in_keys]
    out_keys = [as_key(key) for key in module.out_keys]
    names = _setting(module, "kwargs")

    def operate(values: Values) -> None:
        inputs = [values[key] for key in in_keys]
        if names is None:
            outputs = function(*inputs, **fixed)
        else:
            outputs = function(**dict(zip(names, inputs, strict=True)), **fixed)
        values.update(_by_key(outputs, out_keys))

    return operate


def _by_key(outputs: Any, out_keys: list[Key]) -> Iterable[tuple[Key, Any]]:
    if isinstance(outputs, (dict, TensorDictBase)):
        named = {as_key(key): value for key, value in outputs.items()}
        return [(key, named[key]) for key in out_keys]
    if not isinstance(outputs, tuple):
        outputs = (outputs,)
    if len(outputs) != len(out_keys):
        raise ValueError(
            f"the policy's module returned {len(outputs)} outputs, but its out_keys are "
            f"[{', '.join(map(show_key, out_keys))}]"
        )
    return zip(out_keys, outputs, strict=True)


def _draw(drawn: Sampling) -> Operation:
    in_keys, out_keys = drawn.in_keys, drawn.out_keys

    def operate(values: Values) -> None:
        results = drawn.draw(*[values[key] for key in in_keys])
        values.update(zip(out_keys, results, strict=True))

    return operate
