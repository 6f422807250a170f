"""Recorded functions, which repeat the tensor operations of a call without its Python code.

A distribution object checks its arguments, broadcasts them, and looks up its methods. For small
policies, this takes longer than the arithmetic. :func:`record` calls a function once, records its
operations on tensors, and returns a function that repeats these operations. The operations are the
same, so the results are identical to the bit.

Only functions whose operations depend on nothing but the shapes, strides, dtypes and devices of
their arguments can be recorded. The recorder refuses functions that read the values of tensors,
and compares the recorded function with the original for two sets of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

Function = Callable[..., tuple[Tensor, ...]]

# Functions whose results depend only on a tensor's description, and not on its values.
_DESCRIPTIONS = frozenset(
    {
        *("shape", "size", "dim", "ndim", "numel", "nelement", "__len__", "stride", "layout"),
        *("dtype", "itemsize", "element_size", "device", "requires_grad", "names", "has_names"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "is_sparse"),
        *("is_cpu", "is_cuda", "is_meta", "is_nested", "is_quantized"),
    }
)
# Functions whose results differ from call to call. Further functions of this kind are found when
# the recorded function is compared with the original.
_RANDOM = frozenset(
    {
        *("normal", "normal_", "randn", "randn_like", "rand", "rand_like", "uniform_"),
        *("multinomial", "bernoulli", "bernoulli_", "binomial", "geometric_", "poisson"),
        *("exponential_", "cauchy_", "log_normal_", "_standard_gamma"),
    }
)
# Functions that return uninitialised memory.
_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
# Largest number that is added to the elements of arguments for the second comparison.
_NOISE = 0.1


class NotRecordable(Exception):
    """Raised with the reason why a function can't be recorded."""


@dataclass
class _Call:
    """A recorded call.

    Attributes:
        function: the function.
        args: positional arguments, with a :class:`_Variable` in place of each variable tensor.
        kwargs: keyword arguments, in the same form.
        results: the variable of each result; None for a result that is not a new tensor.
        single: True if the function returns a tensor; False if it returns a sequence of tensors.
        target: variable that the call changes in place, or None.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[int | None]
    single: bool
    target: int | None

    @property
    def is_random(self) -> bool:
        """True if the call advances the state of a random generator."""
        return _name(self.function) in _RANDOM

    @property
    def reads(self) -> set[int]:
        """Numbers of the variables that the call reads."""
        return {one.number for one in _flat((self.args, self.kwargs)) if type(one) is _Variable}


@dataclass(frozen=True)
class _Variable:
    """A tensor whose values differ between calls of the recorded function."""

    number: int


class _Recorder(TorchFunctionMode):
    """Records the calls of torch functions that depend on the arguments or are random."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        # All variable tensors, which must stay alive so that no other tensor gets their memory.
        self._tensors: list[Tensor] = list(arguments)
        self._numbers = {id(tensor): i for i, tensor in enumerate(arguments)}
        self._arguments = len(arguments)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        variable = any(self.number(one) is not None for one in _flat((args, kwargs)))
        # The variables are looked up before the call, which may change tensors in place.
        given = self._replaced(args), self._replaced(kwargs)
        result = func(*args, **kwargs)
        name = _name(func)
        found = [result] if isinstance(result, Tensor) else result
        if isinstance(found, (tuple, list)) and found and all(_is_tensor(one) for one in found):
            if variable or name in _RANDOM or name in _EMPTY:
                self._add(func, given, list(found), isinstance(result, Tensor), args)
        elif variable and name not in _DESCRIPTIONS:
            raise NotRecordable(f"it calls {name}, which uses a tensor's values")
        return result

    def _add(
        self, func: Any, given: tuple[Any, Any], found: list[Tensor], single: bool, args: Any
    ) -> None:
        name = _name(func)
        target = None
        if name.endswith("_") and not name.endswith("__"):
            target = self.number(args[0])
            if target is None or target < self._arguments:
                raise NotRecordable(f"it changes a tensor in place with {name}")
        if "out" in given[1]:
            raise NotRecordable(f"it passes out= to {name}")
        results: list[int | None] = []
        for tensor in found:
            # A view of the whole input, as broadcast_tensors may return it, is the input itself.
            number = self.number(tensor)
            results.append(None if number is not None else len(self._tensors))
            if number is None:
                number = len(self._tensors)
                self._tensors.append(tensor)
            self._numbers[id(tensor)] = number
            self._tensors.append(tensor)
        self.calls.append(_Call(func, *given, results, single, target))

    def number(self, value: Any) -> int | None:
        """Returns the number of a variable tensor; None for any other value."""
        if not isinstance(value, Tensor):
            return None
        known = self._numbers.get(id(value))
        if known is None and value.numel():
            for number, tensor in enumerate(self._tensors):
                if _is_same(value, tensor):
                    return self._numbers.get(id(tensor), number)
        return known

    def _replaced(self, value: Any) -> Any:
        number = self.number(value)
        if number is not None:
            return _Variable(number)
        if isinstance(value, Tensor):
            # A tensor that the user passed to the function may change later.
            return value.clone()
        if type(value) in (tuple, list):
            return type(value)(map(self._replaced, value))
        if type(value) is dict:
            return {key: self._replaced(one) for key, one in value.items()}
        return value


def record(function: Function, arguments: Sequence[Tensor]) -> Function:
    """Returns a function that repeats the tensor operations of ``function``.

    The state of the random generators is the same afterwards. Meanwhile, no other thread may draw
    random numbers.

    Args:
        function: function of tensors that returns a tuple of tensors.
        arguments: examples of the arguments. The returned function is valid for arguments with the
            same shapes, strides, dtypes and devices.

    Raises:
        NotRecordable: if the returned function might differ from ``function``.
    """
    devices = {argument.device for argument in arguments} | {torch.device("cpu")}
    before = _random_states(devices)
    try:
        with _Recorder(arguments) as recorder:
            results = function(*arguments)
        outputs = [recorder.number(result) for result in results]
        if any(number is None for number in outputs):
            raise NotRecordable("a result does not depend on the arguments")
        recorded = _compiled(recorder.calls, len(arguments), outputs)
        _compare(function, recorded, arguments, before)
        _compare(function, recorded, [_changed(argument) for argument in arguments], before)
    finally:
        _set_random_states(before)
    return recorded


def _compare(
    function: Function,
    recorded: Function,
    given: Sequence[Tensor],
    before: dict[torch.device, Tensor],
) -> None:
    """Raises :class:`NotRecordable` if two functions return different results."""
    ends = []
    for one in (function, recorded):
        _set_random_states(before)
        ends.append((one(*given), _random_states(before)))
    (expected, state), (found, other) = ends
    same = all(
        a.dtype == b.dtype and torch.allclose(a, b, 0.0, 0.0, equal_nan=True)
        for a, b in zip(expected, found, strict=True)
    ) and all(torch.equal(state[device], other[device]) for device in before)
    if not same:
        raise NotRecordable("its results differ from the recorded ones")


def _changed(argument: Tensor) -> Tensor:
    """Returns a tensor with slightly larger values, and with the same shape and strides."""
    if not argument.is_floating_point():
        return argument
    # Along a dimension that a tensor was expanded by, all elements are the same element.
    strides = argument.stride()
    first = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    given = argument[first]
    noise = _NOISE * torch.rand(given.shape, dtype=given.dtype, device=given.device)
    changed = torch.empty_strided(
        given.shape, strides, dtype=given.dtype, device=given.device
    ).copy_(given + noise)
    return changed.expand(argument.shape)


def _compiled(calls: Sequence[_Call], arguments: int, outputs: Sequence[int | None]) -> Function:
    """Returns a Python function that makes the calls, without those that have no effect."""
    needed = {number for number in outputs if number is not None}
    kept: list[_Call] = []
    for call in reversed(calls):
        made = {number for number in (*call.results, call.target) if number is not None}
        if call.is_random or needed & made:
            kept.append(call)
            needed |= call.reads
    constants: dict[str, Any] = {}

    def constant(value: Any) -> str:
        name = f"c{len(constants)}"
        constants[name] = value
        return name

    def text(value: Any) -> str:
        if type(value) is _Variable:
            return f"v{value.number}"
        if type(value) in (tuple, list) and any(type(one) is _Variable for one in _flat(value)):
            inner = "".join(f"{text(one)}, " for one in value)
            return f"({inner})" if type(value) is tuple else f"[{inner}]"
        return constant(value)

    lines = [f"def recorded({', '.join(f'v{i}' for i in range(arguments))}):"]
    for call in reversed(kept):
        parts = [text(one) for one in call.args]
        parts += [f"{name}={text(one)}" for name, one in call.kwargs.items()]
        made_by = f"{constant(call.function)}({', '.join(parts)})"
        if call.single:
            (number,) = call.results
            lines.append(f"    v{number} = {made_by}" if number is not None else f"    {made_by}")
        else:
            lines.append(f"    results = {made_by}")
            lines += [
                f"    v{number} = results[{i}]"
                for i, number in enumerate(call.results)
                if number in needed
            ]
    lines.append(f"    return ({''.join(f'v{number}, ' for number in outputs)})")
    exec("\n".join(lines), constants)
    function: Function = constants["recorded"]
    return function


def _name(function: Any) -> str:
    """Returns the name of a function, or of the attribute that a getter reads."""
    name: str = getattr(function, "__name__", "")
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors are the same elements of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _flat(value: Any) -> Iterator[Any]:
    """Yields the members of nested sequences and mappings."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        yield from _flat(list(value.values()))
    else:
        yield value


def _random_states(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    return {
        device: torch.get_rng_state()
        if device.type == "cpu"
        else torch.get_device_module(device).get_rng_state(device)
        for device in devices
    }


def _set_random_states(states: dict[torch.device, Tensor]) -> None:
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
