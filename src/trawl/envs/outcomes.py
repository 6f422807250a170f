"""Checks of the rewards and flags that an environment's step returns.

Values that are not numbers or flags are rejected. Without the checks, None would count as False
and ``"False"`` as True, and numpy would convert ``"5"`` to a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Wrapper
from gymnasium.vector import VectorWrapper

from trawl.memory import Array

#: Description of the result of Gymnasium's reset, for error messages.
RESET_GIVES = (
    "reset must return (observation, info), with an observation from the observation space, and "
    "take the arguments seed and options"
)
_STEP_GIVES = "(observation, reward, terminated, truncated, info)"
_OLD = "older versions of Gym have another API"
#: What a step must do, for notes about one that may return other values.
MUST_RETURN = f"must return {_STEP_GIVES}; {_OLD}"

#: numpy's False, a singleton that can be compared by identity.
NO = np.False_


class Outcome(NamedTuple):
    """Reward and flags of a vector environment's step, with a row for each sub-environment."""

    reward: Array
    terminated: Array
    truncated: Array


def step_results(found: Any, env: object) -> Any:
    """Returns the five results of an environment's step.

    Args:
        found: object that the step returned.
        env: the environment, for error messages.

    Raises:
        TypeError: if ``found`` is not a tuple.
        ValueError: if it doesn't have five values.
    """
    if isinstance(found, (tuple, list)) and len(found) == 5:
        return found
    raise wrong_step(found, env)


def wrong_step(found: Any, env: object) -> Exception:
    """Returns the error for a step that doesn't return five values."""
    return _wrong(found, "step", env, _STEP_GIVES)


def reset_results(found: Any, env: object) -> Any:
    """Returns the observation and the info that an environment's reset returned.

    Args:
        found: object that the reset returned.
        env: the environment, for error messages.

    Raises:
        TypeError: if ``found`` is not a tuple.
        ValueError: if it doesn't have two values.
    """
    if isinstance(found, (tuple, list)) and len(found) == 2:
        return found
    raise _wrong(found, "reset", env, "(observation, info)")


def _wrong(found: Any, method: str, env: object, wanted: str) -> Exception:
    """Returns the error for a method that doesn't return the values that are wanted."""
    must = f"it must return {wanted}; {_OLD}"
    if isinstance(found, (tuple, list)):
        return ValueError(f"{method} of {env!r} returned {len(found)} values, but {must}")
    return TypeError(f"{method} of {env!r} returned {type(found).__name__}, but {must}")


def checked_info(info: Any, method: str, env: object) -> Any:
    """Returns the info of a reset or a step, from which entries are to be read.

    Args:
        info: the info.
        method: ``"reset"`` or ``"step"``.
        env: the environment, for the error message.

    Raises:
        TypeError: if the info is neither a dict nor a list of dicts.
    """
    if not isinstance(info, (Mapping, list, tuple)):
        raise TypeError(
            f"{method} of {env!r} returned {info!r} as its info, but an info must be a dict: "
            "return {} if it has no entries"
        )
    return info


def flag_of(value: Any, name: str, env: object) -> bool:
    """Returns ``terminated`` or ``truncated`` as a bool.

    Args:
        value: value from the environment: a bool, or 0 or 1 in any form.
        name: name of the flag.
        env: the environment, for error messages.

    Raises:
        TypeError: if ``value`` is anything else.
    """
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    array = np.asarray(value)
    if array.size == 1 and array.dtype.kind in "biuf" and array.item() in (0, 1):
        return bool(array.item())
    raise TypeError(
        f"step of {env!r} returned {name}={value!r}, but it must be True or False, not "
        f"{type(value).__name__}"
    )


def reward_of(value: Any, env: object) -> float:
    """Returns the reward as a float.

    Raises:
        TypeError: if the reward is not a number.
        ValueError: if the reward is an array of several numbers.
    """
    if value is not None and not isinstance(value, (str, bytes)):
        array = np.asarray(value)
        if array.dtype.kind in "biuf" and array.size != 1:
            raise ValueError(
                f"step of {env!r} returned a reward of shape {array.shape}, but the reward must "
                f"be a single number: {value!r}. For a reward of several components, state "
                f"reward_space = gymnasium.spaces.Box(-numpy.inf, numpy.inf, {array.shape}) in the "
                "environment, and in a wrapper with a step of its own"
            )
        try:
            return float(array.item())
        except (TypeError, ValueError):
            pass
    raise TypeError(
        f"step of {env!r} returned reward={value!r}, but the reward must be a number, not "
        f"{type(value).__name__}"
    )


class _ComponentRows:
    """Rows of rewards of several components, which accept nothing else.

    Args:
        rows: the rows.
        env: the environment.
    """

    def __init__(self, rows: Array, env: Any) -> None:
        self._rows, self._env = rows, env

    def __setitem__(self, row: int, value: Any) -> None:
        self._rows[row] = rewards_of(value, self._env.reward_shape, self._env)


def checked_rewards(rows: Array, env: Any) -> Any:
    """Returns rows to which only rewards of one environment can be assigned.

    Args:
        rows: rows of rewards, ``(steps, *leaf)``.
        env: the environment, a :class:`~trawl.envs.GymEnv`.
    """
    # Unlike an array, a memoryview accepts only numbers, and assigning to it is faster.
    return _ComponentRows(rows, env) if env.reward_shape else rows[:, 0].data


def rewards_of(value: Any, shape: tuple[int, ...], env: object) -> Array:
    """Returns a reward of several components as an array.

    Args:
        value: the reward.
        shape: its shape, as the environment's ``reward_space`` states it.
        env: the environment, for error messages.

    Raises:
        TypeError: if the components are not numbers.
        ValueError: if the reward has another shape.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"step of {env!r} returned reward={value!r}, but it must have numbers")
    if array.shape != shape:
        raise ValueError(
            f"step of {env!r} returned a reward of shape {array.shape}, but its reward_space says "
            f"{shape}"
        )
    return array


# Wrappers that make other rewards, and don't state their space.
_REWARD_WRAPPERS = {"RewardWrapper", "VectorRewardWrapper", "LinearReward"}
# Packages whose other wrappers pass rewards on.
_PASSING = {"gymnasium", "mo_gymnasium", "trawl"}


def reward_shape_of(env: Any) -> tuple[int, ...]:
    """Returns the shape of an environment's reward, which its ``reward_space`` may state.

    Args:
        env: a Gymnasium environment, single or vector. The ``reward_space`` of a vector
            environment is that of one sub-environment, or of all together.

    Returns:
        ``()`` for a single number.
    """
    layer = env
    while True:
        # Some wrappers pass attributes on, but only the layer that has it knows its reward.
        own = "reward_space" in getattr(layer, "__dict__", ()) or hasattr(
            type(layer), "reward_space"
        )
        shape = getattr(getattr(layer, "reward_space", None), "shape", None) if own else None
        if shape is not None:
            found = tuple(map(int, shape))
            if len(found) > 1 and found[0] == getattr(env, "num_envs", None):
                found = found[1:]
            return () if math.prod(found) == 1 else found
        if not isinstance(layer, (Wrapper, VectorWrapper)) or _may_change_rewards(layer):
            return ()
        layer = layer.env


def _may_change_rewards(wrapper: Any) -> bool:
    """Returns True for a wrapper whose rewards may be others than those that it wraps."""
    kinds = type(wrapper).__mro__
    if any(kind.__name__ in _REWARD_WRAPPERS for kind in kinds):
        return True
    stepping = next(kind for kind in kinds if "step" in vars(kind))
    return stepping.__module__.partition(".")[0] not in _PASSING


class OutcomeCheck:
    """Checks the rewards and flags of a vector environment's steps.

    Once arrays have passed the checks, the values of later arrays of the same dtypes are trusted.

    Args:
        env: the environment, for error messages.
        num_envs: number of sub-environments.
        reward: shape of the reward of one sub-environment.
    """

    def __init__(self, env: object, num_envs: int, reward: tuple[int, ...] = ()) -> None:
        self._env = env
        self._shape = (num_envs,)
        self._reward_shape = (num_envs, *reward)
        # Dtypes of arrays that passed the check.
        self._reward: Any = None
        self._terminated: Any = None
        self._truncated: Any = None

    def __call__(self, reward: Any, terminated: Any, truncated: Any) -> Outcome:
        """Returns the rewards and both kinds of flags as arrays.

        Raises:
            TypeError: if a reward is not a number, or a flag is neither a bool nor 0 or 1.
            ValueError: if there is not one value for each sub-environment.
        """
        shape = self._shape
        try:
            if (
                reward.dtype is self._reward
                and terminated.dtype is self._terminated
                and truncated.dtype is self._truncated
                and reward.shape == self._reward_shape
                and terminated.shape == truncated.shape == shape
            ):
                return Outcome(reward, terminated, truncated)
        except AttributeError:  # a list
            pass
        outcome = Outcome(
            self._rewards(reward),
            self._flags(terminated, "terminated"),
            self._flags(truncated, "truncated"),
        )
        given = (reward, terminated, truncated)
        if all(new is old for new, old in zip(outcome, given, strict=True)):
            self._reward, self._terminated, self._truncated = (part.dtype for part in outcome)
        return outcome

    def _rewards(self, values: Any) -> Array:
        if self._reward_shape != self._shape:
            return rewards_of(values, self._reward_shape, self._env)
        array = self._array(values, "reward")
        if array.dtype.kind in "biuf":
            return array
        return np.array([reward_of(value, self._env) for value in array])

    def _flags(self, values: Any, name: str) -> Array:
        array = self._array(values, name)
        if array.dtype.kind == "b":
            return array
        return np.array([flag_of(value, name, self._env) for value in array])

    def _array(self, values: Any, name: str) -> Array:
        array = np.asarray(values)
        if array.shape != self._shape:
            raise ValueError(
                f"step of {self._env!r} returned {name} of shape {array.shape}, but the shape "
                f"must be {self._shape}, with one value for each sub-environment: {values!r}"
            )
        return array


# --- values of single sub-environments in the info of a vector environment

#: Keys of the last observation in the info: since Gymnasium 1.1, and in earlier versions.
FINAL_OBS = ("final_obs", "final_observation")


def final_sample(info: Any, row: int) -> Any:
    """Returns the last observation of sub-environment ``row`` in ``info``, or None."""
    if isinstance(info, (list, tuple)):
        # DictInfoToList returns one info for each sub-environment.
        return next((info[row][name] for name in FINAL_OBS if name in info[row]), None)
    for name in FINAL_OBS:
        if name in info:
            present = info.get(f"_{name}")
            return row_of(info[name], row) if present is None or present[row] else None
    return None


def row_of(sample: Any, row: int) -> Any:
    """Returns the value of sub-environment ``row`` from an info entry that ``VectorEnv`` merged."""
    if isinstance(sample, dict):
        # For each entry, "_entry" is a mask of the sub-environments that have the entry.
        return {k: row_of(v, row) for k, v in sample.items() if not marks_presence(k, sample)}
    return sample[row]


def marks_presence(key: Any, sample: dict[Any, Any]) -> bool:
    """Returns True if ``key`` is the mask of another entry of ``sample``."""
    return str(key).startswith("_") and str(key)[1:] in sample
