"""Environments that replace others after a failure."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def made_again(env: Any, kind: type[Any], close: Callable[[], object]) -> Any:
    """Closes an environment, ignoring errors, and returns one that is made in the same way.

    Args:
        env: the environment, with the function that makes it again in ``remake``.
        kind: class that the new environment must have.
        close: function that closes ``env``.

    Raises:
        RuntimeError: if the environment was passed as an object.
        ValueError: if the new environment has other specs, or is the same object as before.
    """
    if env.remake is None:
        raise RuntimeError(
            f"{env!r} was passed as an existing environment, so it can't be made again"
        )
    if not env.is_closed:
        with suppress(Exception):
            close()
    fresh = env.remake()
    _check_replacement(env, fresh, kind)
    return fresh


def _check_replacement(env: Any, fresh: Any, kind: type[Any]) -> None:
    """Compares an environment that was made anew with the one that it replaces.

    Args:
        env: the environment that is replaced.
        fresh: the new environment, which is closed if its specs differ.
        kind: class that the new environment must have.

    Raises:
        ValueError: if the new environment is of another kind, or is the same object as before.
    """
    if not isinstance(fresh, kind):
        raise ValueError(
            f"{env!r} was to be made again, but the function that made it returned {fresh!r}"
        )
    if getattr(fresh.env, "unwrapped", fresh.env) is getattr(env.env, "unwrapped", env.env):
        raise ValueError(
            f"the function that made {env!r} returned the same object again: it must make a "
            "new one each time"
        )
    place = env.device or "cpu"
    for what in ("batch_size", "full_observation_spec", "full_action_spec"):
        mine, other = getattr(env, what), getattr(fresh, what)
        if what != "batch_size":
            mine, other = mine.to(place), other.to(place)
        if mine != other:
            fresh.close(raise_if_closed=False)
            raise ValueError(
                f"{env!r} was made again with {what} {other}, but before it had {mine}"
            )
