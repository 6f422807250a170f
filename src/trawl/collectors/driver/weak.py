"""References to methods that don't keep their objects alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

_P = ParamSpec("_P")
_R = TypeVar("_R")


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
