"""Errors for misspelt arguments of environments, and for libraries that are missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import SequenceMatcher
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_Self = TypeVar("_Self")
_UNEXPECTED = re.compile(r"unexpected keyword argument '(\w+)'")
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def nearest_first(name: str, known: Iterable[str]) -> list[str]:
    """Returns the known names, the most similar to a name first."""

    def unlike(one: str) -> tuple[float, str]:
        return -SequenceMatcher(None, name.lower(), one.lower()).ratio(), one

    return sorted(set(known), key=unlike)


# Names that other libraries have for the number of episodes of an evaluation.
_EPISODES = {"num_episodes", "n_episodes", "n_eval_episodes", "eval_episodes", "episodes"}


def unknown_argument(what: str, name: str, known: Iterable[str]) -> TypeError:
    """Returns the error for an argument that an environment doesn't have.

    Args:
        what: name of the environment, or of its class.
        name: name of the unknown argument.
        known: names of the known arguments.
    """
    there = nearest_first(name, known)
    has = f": it has {', '.join(there)}" if there else ": it has none"
    if name in _EPISODES and "num_trajectories" in there:
        has = f": the number of episodes is num_trajectories. It{has.removeprefix(': it')}"
    return TypeError(f"{what} has no argument {name!r}{has}")


def argument_names(made: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments of a function or a class.

    If the constructor of a class accepts ``**kwargs``, the arguments of its base classes are added.
    """
    if not isinstance(made, type):
        return _names(signature(made).parameters.values())
    names: list[str] = []
    for kind in made.__mro__:
        if "__init__" not in vars(kind) or kind is object:
            continue
        _, *given = signature(vars(kind)["__init__"]).parameters.values()
        names += _names(given)
        if not any(one.kind is Parameter.VAR_KEYWORD for one in given):
            break
    return names


def _names(parameters: Iterable[Parameter]) -> list[str]:
    return [one.name for one in parameters if one.kind not in _VARIABLE]


@contextmanager
def named_arguments(
    what: str, given: Collection[str], known: Callable[[], Iterable[str]]
) -> Iterator[None]:
    """Replaces a library's error about an unknown argument by one that lists the known arguments.

    Args:
        what: name of the environment that the library makes.
        given: names of the arguments that were given.
        known: function that returns the names of the known arguments; called only for an error.

    Raises:
        TypeError: if an argument is unknown.
    """
    try:
        yield
    except TypeError as error:
        found = _UNEXPECTED.search(str(error))
        # The error of a class without a constructor does not name the argument.
        names = [found[1]] if found else [*given] if "takes no arguments" in str(error) else []
        there = set(known()) if names else set()
        for name in names:
            # The error may be one of a function that the environment calls.
            if name in given and name not in there:
                raise unknown_argument(what, name, there) from error
        raise


@contextmanager
def needed(what: str, title: str, extra: str) -> Iterator[None]:
    """Names the extra that is missing if a library can't be imported.

    Args:
        what: what needs the library.
        title: name of the library.
        extra: name of the extra.

    Raises:
        ImportError: if the library is not installed.
    """
    try:
        yield
    except ImportError as error:
        text = f"{what} needs {title}: pip install 'trawl-rl[{extra}]'"
        raise ImportError(text, name=error.name) from error


def advice_on_id(value: Any, prefix: str) -> str:
    """Returns what to do with an id of a library's environment; empty for other values."""
    if not isinstance(value, str):
        return ""
    return f". To have it made by its id, pass '{prefix}:{value}' to a collector"


def check_mapping(name: str, value: Any) -> dict[str, Any]:
    """Returns a mapping from names to arguments as a dict; an empty dict for None.

    Raises:
        TypeError: if the value is neither a mapping nor None.
    """
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping of arguments by name, but it is {value!r}")
    return dict(value or {})


def lists_arguments(
    init: Callable[Concatenate[_Self, _P], None],
) -> Callable[Concatenate[_Self, _P], None]:
    """Decorates a constructor, so that an error for an unknown argument lists the known ones."""
    _, *names = signature(init).parameters

    @wraps(init)
    def checked(self: _Self, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        for name in kwargs:
            if name not in names:
                raise unknown_argument(type(self).__name__, name, names)
        init(self, *args, **kwargs)

    return checked
