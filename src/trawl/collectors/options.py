"""Declares options, each with its default, its check, and tags for collectors with workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from inspect import getattr_static, isfunction
from typing import Any, Final

from trawl.checks import check_bool, check_number, did_you_mean
from trawl.envs.arguments import argument_names
from trawl.envs.gym import GymEnv

#: Function that checks the value of an option. It is called with the option's name and the given
#: value, and returns the value, possibly converted.
Check = Callable[[str, Any], Any]

# Tags of an option, which determine how collectors with workers treat the option.
DRIVER: Final = "only the driver acts on it; workers' collectors don't get it"
EACH: Final = "each worker applies it by itself, so collector_kwargs may differ between workers"
LIST: Final = "it may be a list, with an entry for each worker"
WHOLE: Final = "it concerns all workers together, so collector_kwargs can't have it"


def option(default: Any, check: Check | None = None, *tags: str) -> Any:
    """Declares an option as a field of a dataclass, which has to call :func:`validate`.

    Args:
        default: default value of the option.
        check: function that checks a given value, and may convert it.
        *tags: tags of the option: any of :data:`DRIVER`, :data:`EACH`, :data:`LIST` and
            :data:`WHOLE`.
    """
    return field(default=default, metadata={"check": check, "tags": tags})


def validate(options: Any) -> None:
    """Checks and converts each option of a dataclass.

    Raises:
        TypeError: for a value of the wrong type. For example, an option of type bool doesn't
            accept a string, because a string that isn't empty would count as True.
        ValueError: for a value that is out of range.
    """
    for one in fields(options):
        value = getattr(options, one.name)
        if one.type in ("bool", "bool | None"):
            check_bool(one.name, value)
        check = one.metadata.get("check")
        if check is not None:
            checked = check(one.name, value)
            if checked is not value:
                object.__setattr__(options, one.name, checked)


def tagged(cls: Any, tag: str) -> frozenset[str]:
    """Returns the names of a dataclass's options that have a tag."""
    return frozenset(one.name for one in fields(cls) if tag in one.metadata.get("tags", ()))


# Names that other libraries have for the number of environments.
_COUNTS = {"n_envs", "n_env", "nenvs", "number_of_envs", "num_environments"}


def unknown_options(kind: str, unknown: Sequence[str], known: Iterable[str]) -> TypeError:
    """Returns the error for options that a collector doesn't have.

    Args:
        kind: name of the collector's class.
        unknown: names of the options.
        known: names of the options that the collector has.
    """
    hint = did_you_mean(unknown, known)
    if set(unknown) & set(argument_names(GymEnv)):
        hint = ". Arguments of the environment are passed in create_env_kwargs"
    elif not _COUNTS.isdisjoint(unknown):
        hint = (
            ". To step several environments, pass a list of ids or of functions that make them, "
            "such as ['CartPole-v1'] * 4, or a ParallelEnv, which steps them in processes"
        )
    return TypeError(f"{kind} got unknown arguments: {', '.join(unknown)}{hint}")


# --- checks of one value


def check_callable(name: str, value: Any) -> Any:
    """Returns the value; raises a ``TypeError`` if it is neither None nor callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, but it is {type(value).__name__}: {value!r}")
    return value


def check_switch(name: str, value: Any) -> Any:
    """Returns the value, which must be None, a bool or a mapping of keyword arguments."""
    if value is not None and not isinstance(value, (bool, Mapping)):
        raise TypeError(
            f"{name} must be a bool or a mapping of keyword arguments, but it is "
            f"{type(value).__name__}: {value!r}"
        )
    return value


def at_least(least: int) -> Check:
    """Returns a check that accepts None, and integers that are at least ``least``."""
    return lambda name, value: None if value is None else check_number(name, value, least)


def one_of(*choices: Any) -> Check:
    """Returns a check that accepts only the given values."""

    def check(name: str, value: Any) -> Any:
        if value in choices and not isinstance(value, bool):
            return value
        shown = [repr(choice) for choice in choices if choice is not None]
        raise ValueError(
            f"{name} must be {', '.join(shown[:-1])} or {shown[-1]}, but it is {value!r}"
        )

    return check


def switch_or(options: type[Any]) -> Check:
    """Returns a check that accepts a bool, or an instance of a class; True becomes an instance."""

    def check(name: str, value: Any) -> Any:
        if value is None or value is False:
            return False
        if value is True:
            return options()
        if not isinstance(value, options):
            raise TypeError(
                f"{name} must be True, False or a {options.__name__}, but it is {value!r}"
            )
        return value

    return check


def check_instance(name: str, value: Any, method: str) -> Any:
    """Returns the value; raises a ``TypeError`` if it is a class instead of an instance.

    However, a class is accepted if ``method`` can be called without an instance.
    """
    if isinstance(value, type) and isfunction(getattr_static(value, method, None)):
        raise TypeError(
            f"{name} must be an object, but it is the class {value.__name__}: pass an instance, "
            f"{name}={value.__name__}(...)"
        )
    return value
