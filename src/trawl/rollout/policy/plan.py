"""Plans, which call a TensorDict policy directly on tensors.

Most policies are a chain of TensorDictModules around ordinary modules. The keys that the chain
reads and writes are known before it runs, so the loop can pass tensors directly to the inner
modules, without TensorDicts. :func:`make_plan` makes a plan only if the results are certain to be
the same; otherwise it raises :class:`NotPlannable` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
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

# The key of an output that a module drops.
_DROPPED = ("_",)


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
    code = _Code()
    samplings: list[Sampling] = []
    for step in steps:
        if isinstance(step, ProbabilisticTensorDictModule):
            drawn = sampling(step, exploration, alone)
            if isinstance(drawn, str):
                raise NotPlannable(drawn)
            if unrolled:
                samplings.append(drawn)
            if varies:
                drawn.why_objects = "the sizes of the policy's batches vary"
            drawn.renew(alone, objects=varies or not unrolled)
            code.draw(drawn)
        else:
            code.call(step, unrolled)
    if not code.writes:
        raise NotPlannable("the policy has no out_keys")
    return Plan(tuple(code.reads), tuple(code.writes), code.function(), tuple(samplings))


class _Code:
    """Python code of a function that runs one module after the other, on tensors.

    Attributes:
        reads: keys of the function's arguments.
        writes: keys of its results.
    """

    def __init__(self) -> None:
        self.reads: list[Key] = []
        self.writes: list[Key] = []
        self._lines: list[str] = []
        self._names: dict[Key, str] = {}
        self._globals: dict[str, Any] = {"Tensor": Tensor}

    def draw(self, drawn: Sampling) -> None:
        """Adds a call that draws samples, by the function that draws them then."""
        given = self._read(drawn.in_keys)
        results = self._write(drawn.out_keys)
        self._lines.append(f"[{results}] = {self._global(drawn)}.draw({', '.join(given)})")

    def call(self, module: TensorDictModule, unrolled: bool) -> None:
        """Adds a call of the function within a module."""
        if module.inplace is not True or _setting(module, "get_kwargs"):
            raise NotPlannable(f"{type(module).__name__} has inplace={module.inplace!r}")
        given = self._read([as_key(key) for key in module.in_keys])
        names = _setting(module, "kwargs")
        if names is not None:
            pairs = zip(names, given, strict=True)
            given = [f"**{{{', '.join(f'{name!r}: {one}' for name, one in pairs)}}}"]
        if module.method_kwargs:
            given.append(f"**{self._global(dict(module.method_kwargs))}")
        out_keys = [as_key(key) for key in module.out_keys]
        function = self._global(_function(module, unrolled))
        found, parts = f"{function}({', '.join(given)})", partial(_parts, out_keys=out_keys)
        results = self._write(out_keys)
        if len(out_keys) == 1:
            self._lines += [
                f"{results} = {found}",
                f"if not isinstance({results}, Tensor):",
                f"    [{results}] = {self._global(parts)}({results})",
            ]
        else:
            self._lines += [
                f"out = {found}",
                f"if out.__class__ is not tuple or len(out) != {len(out_keys)}:",
                f"    out = {self._global(parts)}(out)",
                f"[{results}] = out",
            ]

    def function(self) -> Callable[..., Any]:
        """Returns the function, whose only result is not in a tuple."""
        given = ", ".join(self._names[key] for key in self.reads)
        results = ", ".join(self._names[key] for key in self.writes)
        body = "\n    ".join([*self._lines, f"return {results}"])
        code = f"def call({given}):\n    {body}"
        exec(compile(code, "<calls of the policy's modules>", "exec"), self._globals)
        # If its own globals referred to it, only a garbage collection would free the modules.
        found: Callable[..., Any] = self._globals.pop("call")
        return found

    def _read(self, keys: Sequence[Key]) -> list[str]:
        for key in keys:
            if key not in self._names:
                self._names[key] = f"v{len(self._names)}"
                self.reads.append(key)
        return [self._names[key] for key in keys]

    def _write(self, keys: Sequence[Key]) -> str:
        for key in keys:
            self._names.setdefault(key, f"v{len(self._names)}")
            if key != _DROPPED and key not in self.writes:
                self.writes.append(key)
        return ", ".join(self._names[key] for key in keys)

    def _global(self, value: Any) -> str:
        name = f"g{len(self._globals)}"
        self._globals[name] = value
        return name


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


def _single(module: TensorDictModule, unrolled: bool) -> Plan | None:
    """Returns a plan without overhead for a module with one input and one output, or None."""
    if len(module.in_keys) != 1 or len(module.out_keys) != 1 or module.out_keys == ["_"]:
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
        (inner,) = _parts(value, [key])
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


def _parts(outputs: Any, out_keys: list[Key]) -> Sequence[Any]:
    """Returns the outputs of a module in the order of its keys."""
    if isinstance(outputs, (dict, TensorDictBase)):
        named = {as_key(key): value for key, value in outputs.items()}
        return [named[key] for key in out_keys]
    if not isinstance(outputs, tuple):
        outputs = (outputs,)
    if len(outputs) != len(out_keys):
        raise ValueError(
            f"the policy's module returned {len(outputs)} outputs, but its out_keys are "
            f"[{', '.join(map(show_key, out_keys))}]"
        )
    return tuple(outputs)
