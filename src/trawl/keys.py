"""TensorDict keys in one form: a tuple of strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Key = tuple[str, ...]


def as_key(key: str | Sequence[Any]) -> Key:
    """``"a"`` and ``("a", ("b",))`` as ``("a",)`` and ``("a", "b")``."""
    if isinstance(key, str):
        return (key,)
    return tuple(part for item in key for part in as_key(item))


def show_key(key: Key) -> str:
    """The key as a user would write it: a lone string without its tuple."""
    return repr(key[0] if len(key) == 1 else key)


def show_keys(keys: Sequence[Key] | set[Key]) -> str:
    """Several keys, sorted, for an error message."""
    return "[" + ", ".join(show_key(key) for key in sorted(keys)) + "]"


def nested(entries: Mapping[Key, Any]) -> dict[str, Any]:
    """The entries as dicts in dicts: ``{("a", "b"): 1}`` as ``{"a": {"b": 1}}``."""
    outer: dict[str, Any] = {}
    for key, value in entries.items():
        place = outer
        for part in key[:-1]:
            place = place.setdefault(part, {})
        place[key[-1]] = value
    return outer


def next_of(key: Key) -> Key:
    """The key of the same entry after the step."""
    return ("next", *key)
