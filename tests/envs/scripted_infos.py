"""A scripted environment whose infos are known at every step and reset."""

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from trawl.envs import InfoKey


class Scripted(gymnasium.Env):
    """Observes its episode and step; its infos are functions of both.

    Args:
        length: number of steps of an episode.
        text: True to report text.
    """

    def __init__(self, length=4, text=False):
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Discrete(3)
        self.length, self.text = length, text
        self.episode, self.steps = 0, 0

    def shown(self):
        obs = np.array([self.episode, self.steps, self.length], np.float64)
        info = {
            "count": 100 * self.episode + self.steps,
            "vector": np.array([self.steps, self.episode, 1], np.float32),
            "nested": {"flag": self.steps % 2 == 1, "deep": {"half": self.steps / 2}},
            "action_mask": np.array([1, self.steps % 2, 0], np.int8),
        }
        if self.text:
            info["text"] = f"{self.episode}:{self.steps}"
        if self.steps == 0:
            info["at_reset"] = 7 + self.episode
        elif self.steps == self.length:
            info["at_end"] = 70 + self.episode
        return obs, info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.steps = 0
        return self.shown()

    def step(self, action):
        if not [1, self.steps % 2, 0][action]:
            raise AssertionError(f"action {action} is not allowed in step {self.steps}")
        self.steps += 1
        obs, info = self.shown()
        return obs, 1.0, self.steps == self.length, False, info


class ScriptedJax:
    """The same as pure functions of JAX; an action that is not allowed makes the observation NaN.

    The number of an episode is drawn, because a reset knows nothing else.
    """

    action_space = spaces.Discrete(3)
    length = 4

    def reset(self, key):
        state = {"episode": (key[1] % 1000).astype(int), "steps": 0}
        obs, info = self._shown(state)
        return state, obs, {**info, "at_reset": 7 + state["episode"]}

    def step(self, key, state, action):
        import jax.numpy as jnp

        allowed = jnp.array([True, state["steps"] % 2 == 1, False])[action]
        state = {**state, "steps": state["steps"] + 1}
        obs, info = self._shown(state)
        over = state["steps"] == self.length
        info["at_end"] = jnp.where(over, 70 + state["episode"], 0)
        return state, jnp.where(allowed, obs, jnp.nan), 1.0, over, False, info

    def _shown(self, state):
        import jax.numpy as jnp

        episode, steps = state["episode"], state["steps"]
        obs = jnp.array([episode, steps, self.length], jnp.float32)
        return obs, {
            "count": 100 * episode + steps,
            "vector": jnp.array([steps, episode, 1], jnp.float32),
            "nested": {"flag": steps % 2 == 1, "deep": {"half": steps / 2}},
            "action_mask": jnp.array([1, steps % 2, 0], jnp.int8),
        }


KEYS = [
    "count",
    InfoKey("vector", key="vector"),
    InfoKey(("nested", "flag"), key="flag"),
    InfoKey("nested/deep", key=("task", "deep")),
    "nested/deep/half",
    InfoKey("action_mask", key="action_mask"),
    "at_reset",
    "at_end",
]


def check(rows):
    """Compares infos with the observations in the same rows.

    Args:
        rows: TensorDict with observations and infos, of any batch size.
    """
    obs, info = rows["observation"].double(), rows["info"]
    episode, steps, length = obs.split(1, -1)
    assert (info["count"] == 100 * episode + steps).all()
    assert torch.equal(rows["vector"], torch.cat([steps, episode, steps**0], -1).float())
    assert torch.equal(rows["flag"], steps % 2 == 1)
    assert (info["nested", "deep", "half"] == steps / 2).all()
    assert (rows["task", "deep", "half"] == steps / 2).all()
    assert torch.equal(rows["action_mask"], torch.cat([steps**0, steps % 2, 0 * steps], -1).bool())
    assert (info["at_reset"] == (7 + episode) * (steps == 0)).all()
    assert (info["at_end"] == (70 + episode) * (steps == length)).all()
    assert set(info.keys()) == {"count", "nested", "at_reset", "at_end"}
