"""Methods of a collector that are those of one of its parts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def of_part(
    part: str, method: Callable[Concatenate[Any, _P], _R]
) -> Callable[Concatenate[Any, _P], _R]:
    """Makes a method that calls a method of a part.

    Args:
        part: name of the part in the object's ``parts``.
        method: the method, as a function of the part's class. Its signature and its docstring are
            those of the new method.
    """
    name, place = method.__name__, sys._getframe(1).f_locals

    @wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        found: Callable[_P, _R] = getattr(getattr(self.parts, part), name)
        return found(*args, **kwargs)

    # Pickles of the method name its class.
    call.__module__, call.__qualname__ = place["__module__"], f"{place['__qualname__']}.{name}"
    return call
