"""Parts of a collector: its methods that are theirs, and theirs that don't keep it alive."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakMethod

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


def weak(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wraps a method so that it doesn't keep its object, such as a collector, alive.

    The wrapped method raises a ``ReferenceError`` once the object is gone.
    """
    reference = WeakMethod(method)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        alive = reference()
        if alive is None:
            raise ReferenceError("the object that this method belongs to no longer exists")
        return alive(*args, **kwargs)

    return call
