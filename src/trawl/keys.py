"""TensorDict keys as tuples of strings, and the keys of common entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Key = tuple[str, ...]

#: Names of the flags that mark the end of an episode.
DONE_KEYS = ("done", "terminated", "truncated")
#: Name of the mask of the environments that a partial reset resets, in TorchRL's protocol.
RESET_MASK = "_reset"

ENV_INDEX: Key = ("env_index",)
TRAJ_IDS: Key = ("collector", "traj_ids")
MASK: Key = ("collector", "mask")
STEP_COUNT: Key = ("step_count",)
IS_INIT: Key = ("is_init",)
REWARD: Key = ("next", "reward")
#: Name of the environment's own reward in a batch with normalised rewards.
RAW_REWARD = "raw_reward"
DONE: Key = ("next", "done")
TERMINATED: Key = ("next", "terminated")
TRUNCATED: Key = ("next", "truncated")

#: Trajectory id of rows that belong to no trajectory.
NO_TRAJECTORY = -1


def as_key(key: str | Sequence[Any]) -> Key:
    """Flattens a key: ``"a"`` becomes ``("a",)``, and ``("a", ("b",))`` becomes ``("a", "b")``."""
    if isinstance(key, str):
        return (key,)
    return tuple(part for item in key for part in as_key(item))


def given_key(name: str, key: Any) -> Key:
    """Returns the key that an argument names, flattened.

    Raises:
        TypeError: if the key is neither a string nor a tuple of strings.
    """
    parts = key if isinstance(key, (tuple, list)) else (key,)
    if not parts or not all(isinstance(part, (str, tuple)) for part in parts):
        raise TypeError(f"{name} must be a string or a tuple of strings, but it is {key!r}")
    return as_key(key)


def distinct_keys(keys: str | Sequence[Any]) -> tuple[Key, ...]:
    """Returns the keys of an option without duplicates; a string is a single key.

    Raises:
        TypeError: if they are neither a string nor a list of keys.
    """
    if not isinstance(keys, (str, Sequence)):
        raise TypeError(f"keys must be a list of keys, but it is {keys!r}")
    named = (keys,) if isinstance(keys, str) else keys
    return tuple(dict.fromkeys(given_key("a key", key) for key in named))


def show_key(key: Key) -> str:
    """Returns the key as a user would write it; a key of one part is written as a string."""
    return repr(key[0] if len(key) == 1 else key)


def show_keys(keys: Sequence[Key] | set[Key]) -> str:
    """Returns several keys, sorted, as text for an error message."""
    return "[" + ", ".join(show_key(key) for key in sorted(keys)) + "]"


def nested(entries: Mapping[Key, Any]) -> dict[str, Any]:
    """Returns the entries as nested dicts: ``{("a", "b"): 1}`` becomes ``{"a": {"b": 1}}``."""
    outer: dict[str, Any] = {}
    for key, value in entries.items():
        place = outer
        for part in key[:-1]:
            place = place.setdefault(part, {})
        place[key[-1]] = value
    return outer


def end_keys(keys: Iterable[Key], names: Sequence[str] = ("done",)) -> list[Key]:
    """Returns the keys of the flags that end an episode.

    They are the environment's own flags. If it has none, they are those of all groups of agents:
    an agent with flags of its own may be done long before the episode ends.

    Args:
        keys: keys of all entries of the TensorDict under ``"next"``.
        names: names of the flags.
    """
    found = [key for key in keys if key[-1] in names]
    return [key for key in found if len(key) == 1] or found


def next_of(key: Key) -> Key:
    """Returns the key of the same entry after the step, under ``"next"``."""
    return ("next", *key)
