"""Random numbers and an exploration type for one thread alone.

Torch's default generators and tensordict's interaction type belong to the whole process. An
evaluation in a thread must neither draw from the learner's generators nor change how the
learner's policy acts, so :func:`isolated` gives the thread its own generators and its own type.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trawl.envs.generators import draws_privately
from trawl.envs.seeding import derive, stream_seed
from trawl.foreign.torch import SAMPLERS, TorchDispatchMode
from trawl.rollout.policy.exploration import own_type

# Names of operators that draw random numbers and take a generator.
_OPERATORS = (
    *SAMPLERS,
    "bernoulli",
    "bernoulli_",
    "binomial",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal",
    "normal_",
    "poisson",
    "random_",
    "uniform_",
)
# Names of operators that take a generator only in some overloads.
_MAKERS = ("rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm")
# Functions and methods that call these operators.
_DRAWING = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (*_OPERATORS, *_MAKERS)
    if hasattr(owner, name)
)
# Names of Python functions that call drawing functions. All of ``torch.nn.init`` counts, too.
_DRAWING_INSIDE = frozenset(
    {
        "alpha_dropout",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "feature_alpha_dropout",
        "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d_with_indices",
        "gumbel_softmax",
        "multi_head_attention_forward",
        "rrelu",
    }
)
_aten = torch.ops.aten
_DRAWING_OPERATORS = frozenset(getattr(_aten, name) for name in _OPERATORS)
# Operators that take no generator, with the overloads that take one.
_WITH_GENERATOR = {
    _aten.rand.default: _aten.rand.generator,
    _aten.randn.default: _aten.randn.generator,
    _aten.randint.default: _aten.randint.generator,
    _aten.randint.low: _aten.randint.low_generator,
    _aten.randperm.default: _aten.randperm.generator,
}
# Operators whose results are drawn by filling an empty tensor, with the methods that fill it.
_LIKE: dict[Any, Callable[..., Tensor]] = {
    _aten.rand_like: Tensor.uniform_,
    _aten.randn_like: Tensor.normal_,
    _aten.randint_like: Tensor.random_,
}


class PrivateRandom(TorchFunctionMode):
    """Makes torch draw from private generators, in the thread that enters this context.

    The numbers are the same as from the default generators after ``torch.manual_seed``. Functions
    that can't draw random numbers are called unchanged, so a policy is hardly slower in this
    context.

    Args:
        seed: seed of the generators. There is one generator for each device.

    Examples:
        >>> import torch
        >>> from trawl.extras.evaluation.isolation import PrivateRandom
        >>> before = torch.get_rng_state()
        >>> with PrivateRandom(seed=5):
        ...     drawn = torch.randn(3)
        >>> bool((torch.get_rng_state() == before).all())
        True
        >>> with torch.random.fork_rng():
        ...     expected = torch.manual_seed(5) and torch.randn(3)
        >>> torch.equal(drawn, expected)
        True
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._operators = _PrivateOperators(seed)

    def seed(self, seed: int) -> None:
        """Seeds the generators anew."""
        self._operators.seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func``; if it draws random numbers, it does so from a private generator."""
        kwargs = kwargs or {}
        if func in _DRAWING or (isinstance(func, FunctionType) and _draws_inside(func)):
            with self._operators:
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _draws_inside(func: FunctionType) -> bool:
    return func.__module__ == "torch.nn.init" or func.__name__ in _DRAWING_INSIDE


class _PrivateOperators(TorchDispatchMode):
    """Passes private generators to the operators that draw random numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed(seed)

    def seed(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        func = _WITH_GENERATOR.get(func, func)
        fill = _LIKE.get(func.overloadpacket)
        if fill is not None:
            kwargs.pop("generator", None)
            empty = torch.empty_like(args[0], **kwargs)
            # A single bound is the upper bound, in randint_like as well as in random_.
            return fill(empty, *args[1:], generator=self._generator(empty.device))
        takes = func.overloadpacket in _DRAWING_OPERATORS or func in _WITH_GENERATOR.values()
        if takes and kwargs.get("generator") is None:
            kwargs["generator"] = self._generator(_device_of(args, kwargs))
        return func(*args, **kwargs)

    def _generator(self, device: torch.device) -> torch.Generator:
        found = self._generators.get(device)
        if found is None:
            found = torch.Generator(device).manual_seed(self._seed)
            self._generators[device] = found
        return found


def _device_of(args: Any, kwargs: Any) -> torch.device:
    """Returns the device on which an operator draws."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device
    return torch.device(kwargs.get("device") or "cpu")


@contextmanager
def isolated(seed: int) -> Iterator[PrivateRandom]:
    """Context in which this thread has its own random numbers and its own interaction type.

    Args:
        seed: seed of the policy's random numbers, with the same effect as a collector's
            ``set_seed``.

    Yields:
        The source of random numbers, which can be seeded anew.
    """
    private = PrivateRandom(policy_seed(seed))
    token = draws_privately.set(private)
    try:
        with own_type(None), private:
            yield private
    finally:
        draws_privately.reset(token)


@contextmanager
def kept_globals() -> Iterator[None]:
    """Context after which the global generators of numpy and random are as before."""
    before = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(before[0])
        random.setstate(before[1])


def policy_seed(seed: int) -> int:
    """Returns the seed of torch's generator in a collector after ``set_seed(seed)``."""
    return derive(stream_seed(seed), "torch")
