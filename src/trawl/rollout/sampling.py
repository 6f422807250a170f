"""Samples of probabilistic modules, drawn without distribution objects where possible."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
)
from torch import Tensor
from torch.distributions import Distribution

from trawl.errors import add_note
from trawl.keys import as_key
from trawl.rollout.exploration import exploring
from trawl.rollout.modules import DISTRIBUTIONS
from trawl.rollout.recording import Function, NotRecordable, record

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
            sample = getattr(self._module, _DIST_SAMPLE)(dist, self._exploration)
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


_DIST_SAMPLE = "_dist_sample"


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
        or getattr(kind, _DIST_SAMPLE, None) is not getattr(stock, _DIST_SAMPLE, None)
        or module.num_samples is not None
        or getattr(module, "_generator", None) is not None
        or getattr(module, "_generator_key", None) is not None
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
    before = getattr(Distribution, "_validate_args")  # noqa: B009
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
