"""Autoreset modes of vector environments, and the effects of Gymnasium's wrappers on resets.

The modes are described at https://farama.org/Vector-Autoreset-Mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.wrappers import vector as wrappers

from trawl.envs.source import Source

# Gymnasium's wrappers, grouped by their effect. Stateless wrappers transform each value separately,
# so it makes no difference whether sub-environments are reset one at a time or all together.
_STATELESS = frozenset(
    {
        wrappers.ClipAction,
        wrappers.ClipReward,
        wrappers.DictInfoToList,
        wrappers.DtypeObservation,
        wrappers.FilterObservation,
        wrappers.FlattenObservation,
        wrappers.GrayscaleObservation,
        wrappers.RescaleAction,
        wrappers.RescaleObservation,
        wrappers.ReshapeObservation,
        wrappers.ResizeObservation,
    }
)
_ACTIONS = (wrappers.ClipAction, wrappers.RescaleAction, wrappers.TransformAction)
_REWARDS = (wrappers.ClipReward, wrappers.TransformReward)
_STATISTICS = (wrappers.NormalizeReward, wrappers.RecordEpisodeStatistics)
_MODES = ", ".join(repr(mode.value) for mode in AutoresetMode)


def autoreset_mode(env: Any, given: AutoresetMode | str | None = None) -> AutoresetMode:
    """Returns the autoreset mode of a vector environment.

    Args:
        env: the vector environment.
        given: the mode stated by the user; it takes precedence over the environment's own mode.

    Raises:
        ValueError: if neither the user nor the environment states a mode, if the mode is invalid,
            or if the user's mode contradicts the mode of one of Gymnasium's own environments.
    """
    declared = _declared(env)
    if given is not None:
        mode = _as_mode(given, "autoreset_mode")
        if is_plain(env) and mode is not declared:
            raise ValueError(
                f"autoreset_mode={mode.value!r} contradicts {env!r}, which was made with "
                f"autoreset_mode={declared.value!r}; leave the argument out"
            )
        return mode
    if declared is None:
        raise ValueError(
            f"{env!r} doesn't state when it resets its sub-environments: its metadata has no "
            "'autoreset_mode'. State it with GymEnv(env, autoreset_mode=...): 'SameStep' if the "
            "step that ends an episode returns the first observation of the next one (and the "
            "last one in info['final_obs']), 'NextStep' if the step after the end is spent on "
            "the reset, 'Disabled' if only reset(options={'reset_mask': ...}) resets a "
            "sub-environment"
        )
    return _as_mode(declared, f"metadata['autoreset_mode'] of {env!r}")


def _declared(env: Any) -> Any:
    """Returns the mode that the environment, or its outermost wrapper with metadata, declares."""
    base, metadata = getattr(env, "unwrapped", env), getattr(env, "metadata", None)
    if metadata is getattr(base, "metadata", None):
        # Some classes write their mode into metadata that they share with other classes
        # (AtariVectorEnv writes into the metadata of VectorEnv), so the environment's attribute
        # takes precedence.
        own = getattr(base, "autoreset_mode", None)
        if own is not None or metadata is VectorEnv.metadata:
            return own
    return (metadata or {}).get("autoreset_mode")


def _as_mode(value: Any, name: str) -> AutoresetMode:
    try:
        return AutoresetMode(value)
    except ValueError:
        raise ValueError(f"{name} must be one of {_MODES}, but it is {value!r}") from None


def wrappers_of(env: Any) -> Iterator[Any]:
    """Yields the wrappers around a vector environment, outermost first."""
    while isinstance(env, VectorWrapper):
        yield env
        env = env.env


def is_plain(env: Any) -> bool:
    """Returns True for Gymnasium's own vector environments with at most stateless wrappers.

    In any mode, these environments can reset a sub-environment on demand, and the time of the
    reset makes no difference. A subclass, a custom worker function or any other wrapper may rely
    on resets that happen according to the environment's mode.
    """
    base = getattr(env, "unwrapped", env)
    around = list(wrappers_of(env))
    if type(base) is AsyncVectorEnv:
        if base.worker is not None:
            return False
    elif type(base) is not SyncVectorEnv:
        return False
    # If the environment doesn't copy its observations, a wrapper that transforms them in place
    # would transform some of them twice.
    return not around or (base.copy and all(type(wrapper) in _STATELESS for wrapper in around))


def is_restartable(env: Any) -> bool:
    """Returns True if any sub-environment can be restarted, although they reset by themselves."""
    base = getattr(env, "unwrapped", env)
    if isinstance(base, Source):
        return base.can_restart and all(type(one) in _STATELESS for one in wrappers_of(env))
    # Without shared memory, AsyncVectorEnv resets once more after a partial reset.
    return is_plain(env) and not resets_twice(env)


def resets_twice(env: Any) -> bool:
    """Returns True if the environment still autoresets in the step after an explicit reset.

    Without shared memory, the processes of an ``AsyncVectorEnv`` don't register an explicit reset.
    """
    base = env.unwrapped
    return isinstance(base, AsyncVectorEnv) and not base.shared_memory


def shows_observations(env: Any) -> bool:
    """Returns True if the wrappers pass on the environment's observations unchanged."""
    known = {*_ACTIONS, *_REWARDS, *_STATISTICS, wrappers.DictInfoToList}
    return all(type(wrapper) in known for wrapper in wrappers_of(env))


def keeps_zero_rewards(env: Any) -> bool:
    """Returns True if the wrappers leave rewards of zero unchanged."""
    known = {
        *_STATELESS,
        *_ACTIONS,
        *_STATISTICS,
        wrappers.NormalizeObservation,
    }
    known -= {*_REWARDS}
    return all(type(wrapper) in known for wrapper in wrappers_of(env))


def forgetful_wrapper(env: Any) -> str | None:
    """Returns the name of a wrapper that loses all statistics in a partial reset, or None."""
    ours = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
    for wrapper in wrappers_of(env):
        # RecordEpisodeStatistics reads the reset mask from the options, but only after Gymnasium's
        # own environments have removed the mask from them.
        if isinstance(wrapper, wrappers.NormalizeReward) or (
            ours and isinstance(wrapper, wrappers.RecordEpisodeStatistics)
        ):
            return type(wrapper).__name__
    return None
