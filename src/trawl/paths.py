"""Access to attributes by a dotted path, such as ``"policy.module[0].weight"``."""

from __future__ import annotations

import ast
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

_STEP = re.compile(r"\.?([A-Za-z_]\w*)|\[([^\]]+)\]")


class Distant(ABC):
    """Object that stands for another one in a process of its own, where paths go on."""

    @abstractmethod
    def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls ``function(there, *arguments)`` where the other object is, and returns the result.

        Raises:
            WorkerError: if the call raised an exception; it is also an instance of that
                exception's type.
            TypeError: if the result can't be sent.
        """


def get_path(root: Any, path: str) -> Any:
    """Returns the object at ``path`` under ``root``; if it is in another process, a copy.

    Raises:
        ValueError: if the path is malformed.
        AttributeError, KeyError, IndexError: if there is nothing at the path.
    """
    found, rest = _follow(root, path)
    return found.apply(get_path, rest) if rest else found


def get_local(root: Any, path: str) -> Any:
    """Returns the object at ``path`` under ``root``, which must be in this process.

    Raises:
        ValueError: if the path is malformed, or leads to another process.
        AttributeError, KeyError, IndexError: if there is nothing at the path.
    """
    found, rest = _follow(root, path)
    if rest:
        raise ValueError(
            f"{path!r} is in another process, where {found!r} is: its environment must be in the "
            "process of its collector, as in a SerialEnv or in a worker"
        )
    return found


def call_path(root: Any, path: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls the object at ``path``, and returns the result.

    If the object is not callable, the object itself is returned.

    Raises:
        ValueError: if there are arguments, but the object is not callable.
    """
    found, rest = _follow(root, path)
    if rest:
        return found.apply(call_path, rest, args, kwargs)
    if callable(found):
        return found(*args, **kwargs)
    if args or kwargs:
        raise ValueError(
            f"{path!r} is {type(found).__name__}, which can't be called with arguments"
        )
    return found


def call_each(
    root: Any, path: str, calls: Sequence[tuple[Sequence[Any], dict[str, Any]]]
) -> list[Any]:
    """Calls the object at ``path`` once for each pair of arguments, and returns the results.

    Raises:
        AttributeError: if the object is not callable.
    """
    found, rest = _follow(root, path)
    if rest:
        results: list[Any] = found.apply(call_each, rest, calls)
        return results
    if not callable(found):
        raise AttributeError(f"{path!r} is {type(found).__name__}, which can't be called")
    return [found(*args, **kwargs) for args, kwargs in calls]


def first_name(path: str) -> str:
    """Returns the name with which a path begins.

    Raises:
        TypeError: if the path is not a string.
    """
    return re.split(r"[.\[]", _checked(path), maxsplit=1)[0]


def _follow(root: Any, path: str) -> tuple[Any, str]:
    """Follows a path, at most to a :class:`Distant` object.

    Returns:
        The object, and the path under it that remains, which is empty unless it is distant.
    """
    _checked(path)
    position, steps = 0, []
    while position < len(path):
        match = _STEP.match(path, position)
        if match is None:
            raise ValueError(f"path {path!r} is malformed at {path[position:]!r}")
        steps.append(match)
        position = match.end()
    found = root
    for step in steps:
        if isinstance(found, Distant):
            return found, path[step.start() :].lstrip(".")
        name, index = step.groups()
        found = getattr(found, name) if name else found[ast.literal_eval(index)]
    return found, ""


def _checked(path: Any) -> str:
    if not isinstance(path, str):
        raise TypeError(f"a path must be text, such as 'env.unwrapped', but it is {path!r}")
    return path
