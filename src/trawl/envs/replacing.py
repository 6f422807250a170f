"""Check of an environment that was made anew."""

from __future__ import annotations

from typing import Any


def check_replacement(env: Any, fresh: Any, kind: type[Any]) -> None:
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
