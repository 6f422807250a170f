"""Rewards and flags as an environment's step returns them, checked.

What is no number or no flag is refused: None would count as False, ``"False"`` as True, and
numpy takes ``"5"`` for a number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: numpy's False, of which there is only one.
NO = np.False_


class Outcome(NamedTuple):
    """What a step of a vector environment returns beside observations: one row for each."""

    reward: Array
    terminated: Array
    truncated: Array


def flag_of(value: Any, name: str, env: object) -> bool:
    """``terminated`` or ``truncated`` as a bool.

    Args:
        value: what the environment returned: a bool, or 0 or 1 in any form.
        name: name of the flag.
        env: the environment, for the error.

    Raises:
        TypeError: if it is anything else.
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
    """The reward as a float.

    Raises:
        TypeError: if it is no number.
        ValueError: if it is an array of several numbers.
    """
    if value is not None and not isinstance(value, (str, bytes)):
        array = np.asarray(value)
        if array.dtype.kind in "biuf" and array.size != 1:
            raise ValueError(
                f"step of {env!r} returned a reward of shape {array.shape}, but the reward must "
                f"be a single number: {value!r}"
            )
        try:
            return float(array.item())
        except (TypeError, ValueError):
            pass
    raise TypeError(
        f"step of {env!r} returned reward={value!r}, but the reward must be a number, not "
        f"{type(value).__name__}"
    )


class OutcomeCheck:
    """Checks what a vector environment's step returns, at little cost where nothing changes.

    Args:
        env: the environment, for errors.
        num_envs: rows expected.
    """

    def __init__(self, env: object, num_envs: int) -> None:
        self._env = env
        self._shape = (num_envs,)
        # The dtypes of arrays that were found to be right.
        self._reward: Any = None
        self._terminated: Any = None
        self._truncated: Any = None

    def __call__(self, reward: Any, terminated: Any, truncated: Any) -> Outcome:
        """The three as arrays.

        Raises:
            TypeError: if a value is no number, or no flag.
            ValueError: if there is not one for each sub-environment.
        """
        try:
            if (
                reward.dtype is self._reward
                and terminated.dtype is self._terminated
                and truncated.dtype is self._truncated
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
                f"step of {self._env!r} returned {name} of shape {array.shape}, but there must "
                f"be one value for each sub-environment, {self._shape}: {values!r}"
            )
        return array
