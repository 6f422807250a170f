"""Environments by name, with the interface of Brax."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from brax.envs.base import State


class CartpoleBalance:
    """Moves a point; no episode ends by itself."""

    observation_size, action_size = 2, 1

    @property
    def unwrapped(self) -> CartpoleBalance:
        """The environment itself."""
        return self

    def reset(self, rng: Any) -> State:
        """Begins an episode."""
        zero = jnp.zeros(())
        return State(None, jnp.zeros(2), zero, zero, {}, {"rng": rng})

    def step(self, state: State, action: Any) -> State:
        """Moves."""
        return state.replace(obs=state.obs + jnp.array([1.0, 0.0]) + action, reward=action[0])


def load(env_name: str, config: Any = None, config_overrides: Any = None) -> CartpoleBalance:
    """Returns an environment."""
    return {"CartpoleBalance": CartpoleBalance}[env_name]()
