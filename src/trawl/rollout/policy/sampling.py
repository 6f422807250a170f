"""Samples of probabilistic modules, drawn without distribution objects where possible.

The tensor operations of a call with distribution objects are recorded. Operations whose inputs
never change are done once; the others become the lines of a generated function. A function that
reads the values of tensors, changes its arguments, or gives other results than its recording is not
recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
)
from torch import Tensor
from torch.distributions import Distribution
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from trawl.errors import add_note
from trawl.foreign.tensordict import drawing, draws_specially
from trawl.foreign.torch import SAMPLERS, validates
from trawl.keys import as_key
from trawl.rollout.policy.exploration import exploring
from trawl.rollout.policy.modules import DISTRIBUTIONS

# Only distributions of these packages are recorded. Others may depend on more than their arguments.
_TORCHRL = "torchrl.modules."
_PACKAGES = (*DISTRIBUTIONS, _TORCHRL)

# Maximum number of elements of a tensor among a distribution's fixed arguments.
_MOST_NUMBERS = 1024

# Maximum number of recorded functions per module, whose fixed arguments may change again and again.
_MOST_RECORDED = 16

# Recorded functions by module and circumstances, or the reason why there is none. They outlast
# plans, which are made anew for each binding.
_recorded: WeakKeyDictionary[ProbabilisticTensorDictModule, dict[Any, Function | NotRecordable]]
_recorded = WeakKeyDictionary()


class Sampling:
    """Draws the samples of a probabilistic module, and their log-probabilities.

    The first call uses distribution objects, which check their arguments. Further calls repeat the
    recorded operations of such a call, without checks. To check the arguments once per chunk,
    :meth:`renew` is called for each binding.

    Args:
        module: the module.
        exploration: exploration type of the module.
        alone: True if no other thread draws random numbers. Only then a call can be recorded.

    Attributes:
        in_keys: keys of the distribution's parameters.
        out_keys: keys of the sample and, if the module returns it, of its log-probability.
        draw: function that returns the sample and its log-probability for the parameters.
        why_objects: reason why all calls use distribution objects, or None if they don't. It is
            settled by the first call; a policy sets what held in its last binding before.
    """

    def __init__(
        self, module: ProbabilisticTensorDictModule, exploration: InteractionType, alone: bool
    ) -> None:
        self._module, self._exploration = module, exploration
        self._stock = _has_stock_forward(module)
        self._draw_from = drawing(module)
        self._class = module.distribution_class
        self._names = [key[-1] if isinstance(key, tuple) else key for key in module.dist_keys]
        self.in_keys = [as_key(key) for key in module.in_keys]
        self.out_keys = [as_key(module.dist_sample_keys[0])]
        if module.return_log_prob:
            self.out_keys.append(as_key(module.log_prob_key))
        self.why_objects: str | None = None
        self.renew(alone)

    def renew(self, alone: bool, objects: bool = False) -> None:
        """Begins a binding, in which the first call checks its arguments again.

        Args:
            alone: True if no other thread draws random numbers.
            objects: True to use distribution objects in all calls.
        """
        # A thread may also have random generators of its own, which a recording would advance.
        self._alone = alone and threading.current_thread() is threading.main_thread()
        self._fixed = dict(self._module.distribution_kwargs)
        self.draw: Callable[..., Sequence[Tensor]] = self.draw_objects if objects else self._first

    def _first(self, *parameters: Tensor) -> Sequence[Tensor]:
        results = self.draw_objects(*parameters)
        found = self._recorded(parameters)
        if isinstance(found, NotRecordable):
            self.why_objects = str(found)
            self.draw = self.draw_objects
        else:
            self.why_objects = None
            self.draw = found
        return results

    def draw_objects(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """Draws with distribution objects."""
        return self._sample(parameters, self._fixed)

    def _sample(self, parameters: Sequence[Tensor], fixed: dict[str, Any]) -> tuple[Tensor, ...]:
        if not self._stock:
            return self._call_module(parameters)
        dist = self._distribution(parameters, fixed)
        if self._exploration is InteractionType.RANDOM:
            # Without autograd, `sample` and `rsample` draw the same values. The module itself
            # prefers `rsample`.
            sample = dist.rsample() if dist.has_rsample else dist.sample()
        else:
            sample = self._draw_from(dist, self._exploration)
        return (sample, dist.log_prob(sample)) if len(self.out_keys) > 1 else (sample,)

    def _call_module(self, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Calls a module that computes samples or log-probabilities in a way of its own."""
        values = TensorDict({}, [])
        for key, value in zip(self.in_keys, parameters, strict=True):
            values.set(key, value)
        with exploring(self._exploration):
            results = self._module(values)
        return tuple(results.get(key) for key in self.out_keys)

    def check(self, parameters: Sequence[Tensor]) -> None:
        """Checks the parameters of many calls at once, if calls were drawn without objects.

        Raises:
            ValueError: the error that the distribution raises for invalid parameters.
        """
        if self.draw in (self._first, self.draw_objects):
            return
        try:
            self._distribution(parameters, self._fixed)
        except ValueError:
            # The error of the first wrong row is easier to read than that of all rows.
            for t, row in enumerate(zip(*parameters, strict=True)):
                try:
                    self._distribution(row, self._fixed)
                except ValueError as error:
                    add_note(error, f"found when the batch was finished, in its step {t}")
                    raise error from None
            raise

    def _distribution(self, parameters: Sequence[Tensor], fixed: dict[str, Any]) -> Any:
        return self._class(**dict(zip(self._names, parameters, strict=True)), **fixed)

    # --- recorded functions

    def _recorded(self, parameters: Sequence[Tensor]) -> Function | NotRecordable:
        try:
            circumstances = self._circumstances(parameters)
        except NotRecordable as why:
            return why
        known = _recorded.setdefault(self._module, {})
        if circumstances not in known and not self._alone:
            return NotRecordable("another thread may draw random numbers")
        if circumstances not in known:
            if len(known) >= _MOST_RECORDED:
                known.clear()
            try:
                known[circumstances] = self._record(parameters)
            except NotRecordable as why:
                known[circumstances] = why
        return known[circumstances]

    def _circumstances(self, parameters: Sequence[Tensor]) -> Any:
        """Returns all that the operations may depend on, apart from the values of parameters."""
        if not self._class.__module__.startswith(_PACKAGES):
            raise NotRecordable(f"{self._class.__name__} is not one of the known distributions")
        fixed = tuple((name, _identity(name, value)) for name, value in self._fixed.items())
        described = tuple((p.shape, p.stride(), p.dtype, p.device) for p in parameters)
        return self._class, self._exploration, len(self.out_keys), fixed, described

    def _record(self, parameters: Sequence[Tensor]) -> Function:
        fixed = {**self._fixed}
        if "validate_args" in fixed:
            fixed["validate_args"] = False
        try:
            with _unchecked():
                return record(lambda *given: self._sample(given, fixed), parameters)
        except NotRecordable:
            raise
        except Exception as error:
            raise NotRecordable(f"it raises {type(error).__name__} while it is recorded") from error


def is_known_sampler(module: Any) -> bool:
    """Returns True if a module only writes samples, and maybe their log-probabilities."""
    if not isinstance(module, ProbabilisticTensorDictModule):
        return False
    return _has_stock_forward(module) or type(module).__module__.startswith(_TORCHRL)


def _has_stock_forward(module: ProbabilisticTensorDictModule) -> bool:
    return type(module).forward is ProbabilisticTensorDictModule.forward


def sampling(
    module: ProbabilisticTensorDictModule, exploration: InteractionType, alone: bool
) -> Sampling | str:
    """Returns the sampling of a module, or the reason why it samples in a special way."""
    kind, stock, cls = type(module), ProbabilisticTensorDictModule, module.distribution_class
    special = (
        kind.get_dist is not stock.get_dist
        or draws_specially(module)
        or module.num_samples is not None
        or not isinstance(cls, type)
        or issubclass(cls, CompositeDistribution)
        or len(module.dist_sample_keys) != 1
    )
    if special:
        return f"{kind.__name__} samples in a special way"
    return Sampling(module, exploration, alone)


def keep_reasons(before: Sequence[Sampling], now: Sequence[Sampling]) -> None:
    """Makes new samplings tell why objects are used, until their first call settles it."""
    for old, new in zip(before, now, strict=False):
        new.why_objects = new.why_objects or old.why_objects


@contextmanager
def _unchecked() -> Iterator[None]:
    """Context in which distributions don't check their arguments, unless they are told to."""
    before = validates(Distribution)
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def _identity(name: str, value: Any) -> Any:
    """Returns a value that changes if a fixed argument of a distribution changes."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return type(value), value
    if isinstance(value, Tensor) and value.numel() <= _MOST_NUMBERS:
        numbers = tuple(value.flatten().tolist())
        return value.shape, value.stride(), value.dtype, value.device, numbers
    raise NotRecordable(f"{name}={value!r} may change")


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
        *("exponential_", "cauchy_", "log_normal_"),
        *SAMPLERS,
    }
)
# Functions that return uninitialised memory.
_EMPTY = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
# Functions that take three times as long with a number of Python as with a tensor of it.
_ELEMENTWISE = frozenset({"add", "sub", "mul", "div", "clamp", "__rsub__"})
# Dtypes that a number is rounded to before it is used. With others, a number may be more exact.
_EXACT = (torch.float32, torch.float64)
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
                if single and target is None:
                    func, given = self._shorter(func, given, tensor)
                number = len(self._tensors)
                self._tensors.append(tensor)
            self._numbers[id(tensor)] = number
            self._tensors.append(tensor)
        self.calls.append(_Call(func, *given, results, single, target))

    def _shorter(self, func: Any, given: tuple[Any, Any], found: Tensor) -> tuple[Any, Any]:
        """Returns a call with the same result that takes less time."""
        if func is functional.softmax and given[1].get("dtype") is None:
            return Tensor.softmax, (given[0], {"dim": given[1]["dim"]})
        if found.numel() and found.is_contiguous():
            for tensor in self._tensors:
                # Of several views in a row, only the last is needed.
                if _is_view(found, tensor):
                    base = self._replaced(tensor)
                    return Tensor.view, ((base, found.shape), {})
        args, kwargs = given
        variables = [self._tensors[one.number] for one in args if type(one) is _Variable]
        if kwargs or found.dtype not in _EXACT or any(_differ(one, found) for one in variables):
            return func, given
        name, (first, *others) = _name(func), args
        numbers = [type(one) in (int, float) for one in others]
        if name == "pow" and numbers == [True] and others[0] == 2:
            return Tensor.mul, ((first, first), {})
        if name in _ELEMENTWISE and any(numbers):
            others = [
                torch.tensor(one, dtype=found.dtype, device=found.device) if is_number else one
                for one, is_number in zip(others, numbers, strict=True)
            ]
            if name == "__rsub__":
                return Tensor.sub, ((*others, first), {})
            return func, ((first, *others), {})
        return func, given

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
    exec(compile("\n".join(lines), "<operations of a distribution>", "exec"), constants)
    function: Function = constants.pop("recorded")
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
        and _steps(one) == _steps(other)
        and one.dtype == other.dtype
    )


def _differ(one: Tensor, other: Tensor) -> bool:
    """Returns True if the tensors have other dtypes, or one is not on the CPU."""
    return one.dtype != other.dtype or not one.is_cpu or not other.is_cpu


def _steps(tensor: Tensor) -> list[int]:
    """Returns the strides of a tensor, where there is more than one element."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in sizes if size > 1]


def _is_view(one: Tensor, other: Tensor) -> bool:
    """Returns True if two contiguous tensors are the same elements, whatever their shapes."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.numel() == other.numel()
        and one.dtype == other.dtype
        and other.is_contiguous()
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
