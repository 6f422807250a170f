"""Keys of the entries that make up episodes, for one agent and for groups of agents."""

from __future__ import annotations

from collections.abc import Iterable

from trawl.keys import REWARD, Key


def reward_keys(keys: Iterable[Key]) -> list[Key]:
    """Returns the key of the reward, or the keys of the rewards of groups of agents.

    Args:
        keys: keys of all entries.
    """
    found = _named("reward", keys)
    return [REWARD] if REWARD in found else found


def done_keys(keys: Iterable[Key]) -> list[Key]:
    """Returns the keys of all ``done`` flags; any of them ends the episode.

    Args:
        keys: keys of all entries.
    """
    return _named("done", keys)


def _named(name: str, keys: Iterable[Key]) -> list[Key]:
    return sorted(key for key in keys if key[0] == "next" and key[-1] == name)
