"""A scripted environment of JAX.

This module imports JAX only when it makes an environment, so that workers can import it quickly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from trawl.envs import JaxEnv

COUNT = 3
_NUMBER = spaces.Box(-(2**31), 2**31 - 1, (1,), np.int32)
#: Entries of the info: of each step, of a reset, of a last step, and a nested one.
INFOS = {
    "sum": _NUMBER,
    "begun": _NUMBER,
    "ended": _NUMBER,
    "nested": spaces.Dict(half=spaces.Box(-np.inf, np.inf, (2,), np.float32)),
}


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


def scripted(seed: int | None = 0, **options: Any) -> JaxEnv:
    """Returns a batch of scripted environments."""
    return JaxEnv(Scripted(), COUNT, seed=seed, info_keys=INFOS, **options)
