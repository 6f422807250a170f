"""The kinds of environments that a collector takes, as objects and by ids.

Each kind is an :class:`EnvKind`, found by an entry point. Those of Trawl are in ``_OWN``. Other
packages declare theirs in the group ``trawl.sources``; see the page "Your own kind of environment".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from inspect import signature
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from trawl.checks import did_you_mean
from trawl.envs.base import TensorDictEnv
from trawl.registry import Registry

#: Group of the entry points with which packages declare kinds of environments.
GROUP = "trawl.sources"

# In the order in which an object is offered to them.
_OWN = {
    "pettingzoo": "trawl.envs.agents.pettingzoo:PETTINGZOO",
    "vmas": "trawl.extras.vmas:VMAS",
    "tensors": "trawl.envs.torch_vector:TENSORS",
    "gymnasium": "trawl.envs.gym:GYMNASIUM",
    "dm_control": "trawl.envs.gym:DM_CONTROL",
    "envpool": "trawl.envs.gym:ENVPOOL",
    "brax": "trawl.extras.jax.env:BRAX",
    "gymnax": "trawl.extras.jax.env:GYMNAX",
    "jumanji": "trawl.extras.jax.env:JUMANJI",
}
# Factories, which are no environments.
_FUNCTIONS = (type, FunctionType, MethodType, BuiltinFunctionType, partial, str)


def _none(env: Any) -> bool:
    return False


def _silent(env: Any) -> None:
    return None


@dataclass(frozen=True)
class EnvKind:
    """A kind of environments, which an entry point of the group ``trawl.sources`` names.

    The name of the entry point is the prefix of the kind's ids: ``"name:rest"``.

    Attributes:
        adapter: class or function that turns an environment of this kind into one of another kind
            that Trawl takes, such as a :class:`~trawl.envs.Source` or a ``gymnasium.Env``.
        recognises: function that returns True for the environments of this kind; by default, there
            are only ids.
        make: function that makes an environment from the rest of an id, and from keyword arguments;
            None if there are no ids.
        batched: True if ``make`` is called with ``num_envs`` where several environments are needed,
            False if it is called several times. It needs an argument of this name.
        advice: function that returns an error message for an environment that the kind knows, but
            can't adapt; for all others, it returns None.

    Raises:
        TypeError: if the adapter can't be called.

    Examples:
        >>> import gymnasium
        >>> from trawl.envs import EnvKind
        >>> EnvKind(gymnasium.wrappers.FlattenObservation).recognises("an environment")
        False
    """

    adapter: Callable[..., Any]
    recognises: Callable[[Any], bool] = _none
    make: Callable[..., Any] | None = None
    batched: bool = True
    advice: Callable[[Any], str | None] = _silent

    def __post_init__(self) -> None:
        if not callable(self.adapter):
            raise TypeError(
                "the adapter of an EnvKind must be a class or a function, but it is "
                f"{self.adapter!r}"
            )

    @property
    def name(self) -> str:
        """Name of the adapter."""
        return str(getattr(self.adapter, "__name__", self.adapter))

    @property
    def is_adapter(self) -> bool:
        """True if the results of ``make`` have the TensorDict interface."""
        return isinstance(self.adapter, type) and issubclass(self.adapter, TensorDictEnv)

    @property
    def makes_batches(self) -> bool:
        """True if ``make`` takes the number of environments in a batch."""
        return self.make is not None and "num_envs" in signature(self.make).parameters

    def takes(self, option: str) -> bool:
        """Returns True if the adapter has an argument of this name."""
        return option in signature(self.adapter).parameters


KINDS: Registry[EnvKind] = Registry(
    GROUP, _OWN, lambda found: isinstance(found, EnvKind), "an EnvKind"
)


def kind_of(env: Any) -> EnvKind | None:
    """Returns the kind of an environment; None if the object is none that Trawl takes."""
    if isinstance(env, _FUNCTIONS):
        return None
    return KINDS.first(lambda kind: kind if kind.recognises(env) else None)


def advice_on(value: Any) -> str | None:
    """Returns what to do with an object that no kind recognises, if a kind knows it."""
    return KINDS.first(lambda kind: kind.advice(value))


def kind_of_id(env_id: str) -> tuple[EnvKind | None, str]:
    """Returns the kind whose prefix an id has, and the part of the id that is after it.

    Other ids belong to Gymnasium, and the kind is None. Such an id may have a colon, too, after the
    name of a module that registers the environment.

    Raises:
        ImportError: if the kind of another package can't be loaded.

    Examples:
        >>> kind_of_id("Pendulum-v1")
        (None, 'Pendulum-v1')
        >>> kind_of_id("dm_control:cheetah/run")[1]
        'cheetah/run'
    """
    prefix, colon, name = env_id.partition(":")
    if colon:
        kind = KINDS.get(prefix)
        if kind is not None and kind.make is not None:
            return kind, name
    return None, env_id


def is_known(env_id: str) -> bool:
    """Returns True if an id begins with the name of a kind, so that Gymnasium has no such id."""
    return kind_of_id(env_id)[0] is not None


def check_prefix(env_id: str) -> None:
    """Raises an error if an id begins with a name that is neither that of a kind nor a module.

    Raises:
        ValueError: if the name resembles that of a kind, which the message suggests.
        ModuleNotFoundError: otherwise.
    """
    prefix, colon, _ = env_id.partition(":")
    # A module that is loaded may have no spec, such as the main program.
    if not colon or is_known(env_id) or prefix in sys.modules:
        return
    if prefix.isidentifier() and find_spec(prefix) is not None:
        return
    # Some of our own kinds have no ids.
    known = [name for name in KINDS if name not in KINDS.own or is_known(f"{name}:")]
    what = f"{env_id!r} names no library that Trawl knows, and {prefix!r} is not a module"
    hint = did_you_mean([prefix], sorted(known), 1)
    if hint:
        raise ValueError(f"{what}{hint}")
    if prefix.isidentifier():
        raise ModuleNotFoundError(
            f"{what}. Before the colon stands {', '.join(sorted(known))}, or the module that "
            "registers the id after it",
            name=prefix,
        )


def lacks_vectors(env_id: str) -> bool:
    """Returns True if an id names a kind that makes only single environments."""
    kind = kind_of_id(env_id)[0]
    return kind is not None and not kind.makes_batches


def steps_batches(env_id: str) -> bool:
    """Returns True if several environments of an id are best made as one batch."""
    kind = kind_of_id(env_id)[0]
    return kind is not None and kind.batched and kind.makes_batches
