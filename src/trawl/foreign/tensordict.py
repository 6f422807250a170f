"""Private names of tensordict."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, probabilistic

#: TensorDict's constructor without its checks, which take longer than a simple environment's step.
new_tensordict = getattr(TensorDict, "_new_unsafe", TensorDict)

_TYPES = "_interaction_type"
# Methods in which a TensorDictModule calls its module and writes the outputs.
_CALLS = ("_call_module", "_write_to_tensordict")
# Method in which a probabilistic module draws, and its attributes for a generator of its own.
_DRAWS, _GENERATORS = "_dist_sample", ("_generator", "_generator_key")


def types_holder() -> Any:
    """Returns the object in which ``set_interaction_type`` keeps the type of the process.

    The public functions read and write one type for all threads.
    """
    return getattr(probabilistic, _TYPES)


def replace_types_holder(holder: Any) -> None:
    """Makes ``set_interaction_type`` and ``interaction_type`` use another object."""
    setattr(probabilistic, _TYPES, holder)


def overrides_calls(kind: type[Any]) -> bool:
    """Returns True if a class of modules calls its module, or writes outputs, in a way of its own.

    Its ``forward`` may be the usual one, so a comparison of this public method doesn't tell.
    """
    return any(getattr(kind, name) is not getattr(TensorDictModule, name) for name in _CALLS)


def drawing(module: Any) -> Any:
    """Returns the method with which a probabilistic module draws from a distribution.

    A call of the module also makes the distribution, and writes the sample to a TensorDict.
    """
    return getattr(module, _DRAWS, None)


def draws_specially(module: Any) -> bool:
    """Returns True if a probabilistic module draws in a way of its own, or from a generator.

    Its public methods are the usual ones in both cases.
    """
    usual = getattr(ProbabilisticTensorDictModule, _DRAWS, None)
    return getattr(type(module), _DRAWS, None) is not usual or any(
        getattr(module, name, None) is not None for name in _GENERATORS
    )
