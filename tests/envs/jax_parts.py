"""A scripted environment of JAX, and the same one on numpy.

This module imports JAX only when it makes an environment, so that workers can import it quickly.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from trawl.envs import GymEnv, JaxEnv

COUNT = 3
_NUMBER = spaces.Box(-(2**31), 2**31 - 1, (1,), np.int32)
#: Entries of the info: of each step, of a reset, of a last step, and a nested one.
INFOS = {
    "sum": _NUMBER,
    "begun": _NUMBER,
    "ended": _NUMBER,
    "nested": spaces.Dict(half=spaces.Box(-np.inf, np.inf, (2,), np.float32)),
}
# More steps and episodes than any test takes.
_LENGTH = 200


def _plan(word: Any, other: Any) -> tuple[Any, Any, Any]:
    """Returns the number of an episode, its length and its kind of end, from its key."""
    return word % 1000, other % 4 + 1, word // 1000 % 3


class Scripted:
    """Environment whose episodes are determined by the random key of their reset.

    The observation has the number of the episode, the steps in it, the last action, and a number
    from the key of the step. The reward is the number of the episode plus that of the step.
    """

    action_space = spaces.Discrete(4)

    def reset(self, key: Any) -> tuple[Any, Any]:
        import jax.numpy as jnp

        number, length, end = _plan(key[1], key[0])
        state = {"number": number, "length": length, "end": end, "step": jnp.uint32(0)}
        info = {"begun": number.astype(int), **self._info(number.astype(int))}
        return state, jnp.stack([number, 0, 0, 0]).astype(jnp.float32), info

    def _info(self, total: Any) -> dict[str, Any]:
        import jax.numpy as jnp

        halves = jnp.stack([total, -total]) / 2
        return {"sum": total, "nested": {"half": halves}, "text": "left out"}

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        import jax.numpy as jnp

        step = state["step"] + 1
        obs = jnp.stack([state["number"], step, action + 1, key[0] % 1000]).astype(jnp.float32)
        over = step >= state["length"]
        terminated, truncated = over & (state["end"] != 1), over & (state["end"] != 0)
        total = (state["number"] + step).astype(int)
        info = {"ended": jnp.where(over, total, 0), **self._info(total)}
        return {**state, "step": step}, obs, total, terminated, truncated, info


class ScriptedNumpy(gymnasium.Env[Any, Any]):
    """The same on numpy, given the keys of all steps and episodes."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(4)

    def begin(self, steps: Any, episodes: Any) -> None:
        """Takes other keys."""
        self.steps, self.episodes = iter(steps), iter(episodes)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        other, word = map(int, next(self.episodes))
        self.number, self.length, self.end = _plan(word, other)
        self.step_number = 0
        info = {"begun": self.number, **self._info()}
        return np.array([self.number, 0, 0, 0], np.float32), info

    def _info(self) -> dict[str, Any]:
        total = self.number + self.step_number
        return {"sum": total, "nested": {"half": np.array([total, -total]) / np.float32(2)}}

    def step(self, action: Any) -> tuple[Any, ...]:
        self.step_number += 1
        drawn = int(next(self.steps)[0]) % 1000
        obs = np.array([self.number, self.step_number, action + 1, drawn], np.float32)
        over = self.step_number >= self.length
        terminated, truncated = over and self.end != 1, over and self.end != 0
        total, info = self.number + self.step_number, self._info()
        if over:
            info["ended"] = total
        return obs, float(total), terminated, truncated, info


def tables(seed: int, count: int) -> Any:
    """Returns the keys of all steps and of all episodes of each environment."""
    import jax

    keys = jax.random.split(jax.random.PRNGKey(seed), (2, count))
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
    return [np.asarray(fold(part, np.arange(_LENGTH, dtype=np.uint32))) for part in keys]


class Twin(SyncVectorEnv):
    """Vector of :class:`ScriptedNumpy` that is seeded as :class:`~trawl.envs.JaxEnv` is."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__([ScriptedNumpy] * COUNT, autoreset_mode=AutoresetMode.SAME_STEP)
        self._take(seed)

    def _take(self, seed: int) -> None:
        for env, steps, episodes in zip(self.envs, *tables(seed, COUNT), strict=True):
            env.unwrapped.begin(steps, episodes)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self._take(seed if isinstance(seed, int) else seed[0])
        return super().reset(options=options)


def twin() -> GymEnv:
    """Returns a vector on numpy with the entries of its info."""
    return GymEnv(Twin(), info_keys=INFOS)


class TwinWithResets(Twin):
    """The same in mode DISABLED, where some environments can be reset."""

    def __init__(self, seed: int = 0) -> None:
        SyncVectorEnv.__init__(self, [ScriptedNumpy] * COUNT, autoreset_mode=AutoresetMode.DISABLED)
        self._take(seed)


def scripted(seed: int | None = 0, **options: Any) -> JaxEnv:
    """Returns a batch of scripted environments."""
    return JaxEnv(Scripted(), COUNT, seed=seed, info_keys=INFOS, **options)
