"""Private names of libraries of environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

# --- Gymnasium

#: Attributes of environments that never change.
CONSTANT = frozenset({"_saved_kwargs", "_cached_spec", "_metadata"})
#: Attribute of a ``SyncVectorEnv`` that is the array into which it writes observations.
OBSERVATIONS = "_observations"
_STATE, _STATISTICS, _GENERATOR = "_state", "_stats_key", "_np_random"


def state_of(env: Any, default: Any) -> Any:
    """Returns what an ``AsyncVectorEnv`` waits for; its ``close`` would wait for a dead process."""
    return getattr(env, _STATE, default)


def statistics_key(wrapper: Any) -> Any:
    """Returns the name under which a ``RecordEpisodeStatistics`` reports, or None."""
    return vars(wrapper).get(_STATISTICS)


def is_seeded(space: Any) -> bool:
    """Returns True if a space has a generator; the public property would make one."""
    return vars(space).get(_GENERATOR) is not None


def unseed(space: Any) -> None:
    """Takes its generator from a space, so that it is as if it had never been seeded."""
    vars(space)[_GENERATOR] = None


# --- ale-py

#: Attributes of Atari environments that never change.
ATARI_CONSTANT = frozenset({"_action_set", "_game_difficulty", "_game_mode"})


# --- EnvPool: its public methods sort and convert, which takes longer than the calls in them


def envpool_method(env: Any, name: str) -> Callable[..., Any] | None:
    """Returns the method that a public method of a pool calls: ``recv``, ``send`` or ``reset``."""
    found: Callable[..., Any] | None = getattr(env, f"_{name}", None)
    return found


def envpool_keys(env: Any, kind: str) -> list[str]:
    """Returns the names of what these methods take (``"action"``) or return (``"state"``)."""
    return list(getattr(env, f"_{kind}_keys", ()))


# --- Brax and Jumanji


def brax_environments(module: Any) -> Mapping[str, Any]:
    """Returns the environments that Brax knows, by name; it has no public list."""
    found: Mapping[str, Any] = module._envs
    return found


def jumanji_inner(attributes: Mapping[str, Any]) -> Any:
    """Returns the environment in a wrapper of Jumanji, given the wrapper's attributes, or None.

    Wrappers pass on the names of the environment that they wrap, so ``unwrapped`` skips wrappers.
    """
    return attributes.get("_env")
