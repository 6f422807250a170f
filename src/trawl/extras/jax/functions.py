"""Environments of gymnax, Brax and Jumanji as pure functions of JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Protocol

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from trawl.foreign.environments import jumanji_inner

# A number of steps that no episode reaches, within int32.
_NEVER = 2**31 - 1


class JaxFunctionalEnv(Protocol):
    """Interface of a single environment that :class:`~trawl.envs.JaxEnv` accepts.

    The methods are pure functions that ``jax.jit`` can compile. A state and an observation are
    pytrees of arrays, whose shapes and dtypes never change. An info is a dict of arrays. The
    attribute ``name`` is optional.

    Attributes:
        action_space: Gymnasium space of the actions.

    Examples:
        >>> import gymnasium
        >>> import jax.numpy as jnp
        >>> from trawl.envs import JaxEnv
        >>> class Countdown:
        ...     action_space = gymnasium.spaces.Discrete(2)
        ...
        ...     def reset(self, key):
        ...         return jnp.float32(3), jnp.full(1, 3.0)
        ...
        ...     def step(self, key, state, action):
        ...         left = state - 1
        ...         return left, jnp.stack([left]), 1.0, left <= 0, False
        >>> JaxEnv(Countdown(), num_envs=2).rollout(5)["observation"].squeeze(-1).tolist()
        [[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]
    """

    action_space: Space[Any]

    def reset(self, key: Any) -> tuple[Any, Any] | tuple[Any, Any, Any]:
        """Returns the first state and observation of an episode and, optionally, an info.

        Args:
            key: random key of JAX.
        """

    def step(
        self, key: Any, state: Any, action: Any
    ) -> tuple[Any, Any, Any, Any, Any] | tuple[Any, Any, Any, Any, Any, Any]:
        """Takes a step.

        Args:
            key: random key of JAX.
            state: state before the step.
            action: sample of ``action_space``.

        Returns:
            The new state, the observation, the reward, the flags ``terminated`` and
            ``truncated`` and, optionally, an info. The reward and the flags are scalars. A step
            never begins a new episode.
        """


@dataclass(frozen=True)
class JaxFunctions:
    """Pure functions of a single environment, as in :class:`JaxFunctionalEnv`.

    Both functions return an info, which may be empty.
    """

    reset: Callable[[Any], tuple[Any, Any, Any]]
    step: Callable[[Any, Any, Any], tuple[Any, Any, Any, Any, Any, Any]]
    action_space: Space[Any]
    name: str


def functions_of(env: Any, params: Any = None) -> JaxFunctions:
    """Returns the functions of an environment.

    Args:
        env: environment of gymnax, Brax or Jumanji, or a :class:`JaxFunctionalEnv`.
        params: parameters of an environment of gymnax; None for its default parameters.

    Raises:
        TypeError: if ``env`` is not an environment of these kinds, or if ``params`` belong to
            another environment.
        ValueError: if ``env`` is already a batch, or begins new episodes by itself; if it has
            several rewards; or if ``params`` are given for another kind than gymnax.
    """
    if is_gymnax(env):
        return _gymnax(env, _checked_params(env, params))
    if params is not None:
        if isinstance(env, tuple) and any(map(is_gymnax, env)):
            raise ValueError(
                "params are given twice: env is a tuple with an environment and its parameters. "
                "Pass the environment alone, or leave params out"
            )
        raise ValueError(f"params are for environments of gymnax, but env is {env!r}")
    _check_single(env)
    if is_jumanji(env):
        return _jumanji(env)
    if is_brax(env):
        return _brax(env)
    if isinstance(env, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        raise TypeError(
            f"env must be written in JAX, but it is an environment of Gymnasium, {env!r}: pass it "
            "to the collector, or to GymEnv"
        )
    if not all(callable(getattr(env, name, None)) for name in ("reset", "step")):
        raise TypeError(
            "env must be an environment of gymnax, Brax or Jumanji, or an object with reset, step "
            f"and action_space, but it is {type(env).__name__}: {env!r}"
        )
    if not isinstance(getattr(env, "action_space", None), Space):
        raise TypeError(
            f"{type(env).__name__}.action_space must be a gymnasium.Space, but it is "
            f"{getattr(env, 'action_space', None)!r}. A wrapper of gymnax has no step_env, and "
            "hides the last observation of an episode: pass the environment without it"
        )
    return _of_protocol(env)


def _of_protocol(env: Any) -> JaxFunctions:
    name = str(getattr(env, "name", type(env).__name__))

    def reset(key: Any) -> tuple[Any, Any, Any]:
        found = env.reset(key)
        state, obs, info = _with_info(found, f"reset of {name}", ("a state", "an observation"))
        return state, obs, info

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
        parts = ("a state", "an observation", "a reward", "terminated", "truncated")
        found = _with_info(env.step(key, state, action), f"step of {name}", parts)
        state, obs, reward, terminated, truncated, info = found
        return state, obs, reward, terminated, truncated, info

    return JaxFunctions(reset, step, env.action_space, name)


def _with_info(found: Any, what: str, parts: Sequence[str]) -> tuple[Any, ...]:
    """Returns the results of a user's function, with an empty info if it returned none."""
    count = len(found) if isinstance(found, (tuple, list)) else None
    if count not in (len(parts), len(parts) + 1):
        got = type(found).__name__ if count is None else f"{count} values"
        raise ValueError(
            f"{what} must return {', '.join(parts)}, and may return an info after them, but it "
            f"returned {got}"
        )
    return tuple(found) if count == len(parts) + 1 else (*found, {})


def _checked_params(env: Any, params: Any) -> Any:
    """Returns the parameters of an environment of gymnax; None for its default parameters."""
    default = env.default_params
    if params is None:
        return default
    if not isinstance(params, type(default)):
        raise TypeError(
            f"params must be the parameters of {env.name}, such as "
            f"env.default_params.replace(...), but it is {type(params).__name__}: {params!r}"
        )
    return params


def is_gymnax(env: object) -> bool:
    """Returns True if ``env`` has the interface of ``gymnax.environments.Environment``."""
    # Looked up in the class: wrappers pass on the names of the environment that they wrap.
    names = ("step_env", "reset_env", "action_space")
    return all(callable(getattr(type(env), name, None)) for name in names)


def is_brax(env: object) -> bool:
    """Returns True if ``env`` has the interface of ``brax.envs.Env``."""
    return all(hasattr(type(env), n) for n in ("reset", "step", "observation_size", "action_size"))


def is_jumanji(env: object) -> bool:
    """Returns True if ``env`` is an environment of Jumanji, or a wrapper of one."""
    return any(
        kind.__module__ == "jumanji.env" and kind.__name__ == "Environment"
        for kind in type(env).__mro__
    )


def is_jax(env: object) -> bool:
    """Returns True if ``env`` is an environment of gymnax, Brax or Jumanji."""
    return not isinstance(env, type) and (is_gymnax(env) or is_jumanji(env) or is_brax(env))


def _check_single(env: Any) -> None:
    """Rejects batches, and environments that hide the last observation of an episode."""
    layer = env
    while layer is not None:
        kind = type(layer).__name__
        if "AutoReset" in kind:
            raise ValueError(
                f"{kind} hides the last observation of an episode: pass the environment without "
                "it (in Brax, brax.envs.create(..., auto_reset=False)), because JaxEnv begins new "
                "episodes"
            )
        if "Vmap" in kind:
            raise ValueError(
                f"{kind} makes a batch of environments: pass a single environment, and the number "
                "of environments as num_envs"
            )
        layer = _inner(layer)


def _inner(layer: Any) -> Any:
    """Returns the environment in a wrapper; None if there is none."""
    # Looked up in the instance: wrappers pass on the names of the environment that they wrap.
    own = getattr(layer, "__dict__", {})
    # Wrappers of Jumanji have a name of their own for it.
    return own["env"] if "env" in own else jumanji_inner(own)


def _gymnax(env: Any, params: Any) -> JaxFunctions:
    endless = None
    if hasattr(params, "max_steps_in_episode"):
        endless = replace(params, max_steps_in_episode=_NEVER)

    def reset(key: Any) -> tuple[Any, Any, Any]:
        obs, state = env.reset_env(key, params)
        return state, obs, {}

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
        # `step` would return the first observation of the next episode instead of the last one.
        obs, following, reward, done, info = env.step_env(key, state, action, params)
        if endless is None:
            return following, obs, reward, done, False, info
        # The same step without a time limit. The compiler removes all but the test for the end.
        terminated = env.step_env(key, state, action, endless)[3]
        return following, obs, reward, done & terminated, done & (terminated == 0), info

    space = _gymnax_space(env.action_space(params))
    return JaxFunctions(reset, step, space, f"gymnax {env.name}")


def _gymnax_space(space: Any) -> Space[Any]:
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    if not hasattr(space, "low"):
        raise ValueError(f"the action space must be a Discrete or a Box, but it is {space!r}")
    shape, dtype = tuple(space.shape), np.dtype(space.dtype)
    low, high = (np.broadcast_to(np.asarray(one, dtype), shape) for one in (space.low, space.high))
    return spaces.Box(low, high, shape, dtype.type)


def _brax(env: Any) -> JaxFunctions:
    def info(state: Any) -> dict[str, Any]:
        return {"metrics": state.metrics, **state.info}

    def reset(key: Any) -> tuple[Any, Any, Any]:
        state = env.reset(key)
        return state, state.obs, info(state)

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
        state = env.step(state, action)
        done = state.done != 0
        truncated = state.info.get("truncation", False) != 0
        ends = done & (truncated == 0), done & truncated
        return state, state.obs, state.reward, *ends, info(state)

    space = spaces.Box(-1, 1, (int(env.action_size),), np.float32)
    return JaxFunctions(reset, step, space, f"brax {type(env.unwrapped).__name__}")


def _jumanji(env: Any) -> JaxFunctions:
    if env.reward_spec.shape != ():
        raise ValueError(
            f"{type(env.unwrapped).__name__} has several rewards, one for each of its agents: wrap "
            "it in jumanji.wrappers.MultiToSingleWrapper"
        )

    def reset(key: Any) -> tuple[Any, Any, Any]:
        state, first = env.reset(key)
        return state, first.observation, first.extras

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any, Any]:
        state, found = env.step(state, action)
        done, terminated = found.last(), found.discount == 0
        ends = done & terminated, done & ~terminated
        return state, found.observation, found.reward, *ends, found.extras

    space = import_module("jumanji.specs").jumanji_specs_to_gym_spaces(env.action_spec)
    return JaxFunctions(reset, step, space, f"jumanji {type(env.unwrapped).__name__}")
