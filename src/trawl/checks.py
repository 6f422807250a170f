"""Argument checks that several parts of the library share."""

from __future__ import annotations

import math
import operator
import os
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Real
from typing import Any


def check_bool(name: str, value: Any) -> None:
    """Raises a ``TypeError`` for a string where True or False is expected.

    Every string except the empty one would count as True.
    """
    if isinstance(value, str):
        raise TypeError(f"{name} must be True or False, but it is the string {value!r}")


def check_number(name: str, value: Any, least: float = -math.inf) -> int:
    """Checks that a value is an integer of at least ``least``, and returns it as an int.

    Raises:
        TypeError: if the value is not an integer.
        ValueError: if the value is too small.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, but it is {type(value).__name__}: {value!r}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, but it is {number}")
    return number


def check_frames(name: str, value: Any, least: float = -math.inf) -> int:
    """Checks a number of frames like :func:`check_number`, but accepts ``1e6``, too."""
    whole = isinstance(value, float) and value.is_integer()
    return check_number(name, int(value) if whole else value, least)


def check_seconds(name: str, value: Any) -> float:
    """Returns a number of seconds as a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, but it is {value!r}")
    return float(value)


def seconds_above_zero(name: str, value: Any) -> Any:
    """Returns the value, which must be None or a number of seconds above 0."""
    if value is not None and not check_seconds(name, value) > 0:
        raise ValueError(f"{name} must be a number of seconds above 0, but it is {value!r}")
    return value


def did_you_mean(unknown: Iterable[str], known: Iterable[str], count: int = 2) -> str:
    """Returns a suggestion of similar names for an error message; empty if no name is similar.

    Args:
        unknown: the unknown names.
        known: the known names.
        count: largest number of suggestions for each unknown name.
    """
    by_lower = {name.lower(): name for name in sorted(known)}
    close = [get_close_matches(name.lower(), by_lower, count) for name in unknown]
    found = [by_lower[name] for names in close for name in names]
    return f"; did you mean {' or '.join(found)}?" if found else ""


def is_portable() -> bool:
    """True if only what all systems have may be used: outside Linux, or if the user asks for it."""
    return sys.platform != "linux" or os.environ.get("TRAWL_PORTABLE") == "1"


def require_linux(what: str) -> None:
    """Raises an error on other systems than Linux, which lack what workers need.

    Args:
        what: what can't be used there, as the beginning of a sentence.
    """
    if sys.platform != "linux":
        raise RuntimeError(
            f"{what} can't be used on {sys.platform}, because they need Linux: use a Collector "
            "with one environment or a list of environments, or start_method='inline'"
        )
