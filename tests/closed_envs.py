"""Environments whose state can't be read: it lies in the frame of a running generator."""

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import EzPickle

ACTIONS = {
    "discrete": spaces.Discrete(3, start=2),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "scalar": spaces.Box(-1, 1, (), np.float64),
    "multi": spaces.MultiDiscrete([2, 3], start=[1, 0]),
    "binary": spaces.MultiBinary(3),
    "dict": spaces.Dict({"a": spaces.Discrete(300), "b": spaces.Box(-1, 1, (1,), np.float32)}),
}


def walk(random, drift):
    """Takes random steps on a line; each action moves them."""
    place = random.normal(size=2) + drift
    while True:
        action = yield place.astype(np.float32)
        place = 0.9 * place + random.normal(size=2) * 0.1 + action


class Closed(gymnasium.Env, EzPickle):
    """Random steps on a line, in episodes of random length.

    Args:
        actions: name of the action space.
        fails_at: numbers of the steps, over all episodes, that raise an error.
    """

    fails_at = ()

    def __init__(self, actions="discrete", fails_at=()):
        EzPickle.__init__(self, actions, fails_at)
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = ACTIONS[actions]
        self.fails_at = tuple(fails_at)
        self.taken = self.episodes = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        # Later episodes are harder.
        self.walk = walk(self.np_random, self.episodes + (options or {}).get("drift", 0))
        return next(self.walk), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.taken += 1
        if self.taken in self.fails_at:
            raise RuntimeError("broken")
        flat = spaces.flatten(self.action_space, action)
        obs = self.walk.send(float(flat @ np.linspace(1, 2, len(flat))))
        ended = bool(self.np_random.random() < 0.04)
        return obs, float(obs[0]), ended, False, {}


class Forgetful(Closed):
    """An environment with chance that its generator doesn't decide."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs + np.float32(np.random.normal()), reward, terminated, truncated, info


class Place:
    """An object that nothing but a pickle can capture, if it is in a list."""

    def __init__(self, value):
        self.value = value


class Pickled(gymnasium.Env):
    """Random steps on a line, with objects in a list."""

    def __init__(self):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.places = [Place(self.np_random.normal(size=2))]
        return self.places[0].value.astype(np.float32), {}

    def step(self, action):
        place = self.places[0]
        place.value = 0.9 * place.value + self.np_random.normal(size=2) + action
        ended = bool(self.np_random.random() < 0.04)
        return place.value.astype(np.float32), float(place.value[0]), ended, False, {}


class Latched(Closed):
    """An environment that goes on where the last episode ended, so that a reset is not a start."""

    def reset(self, *, seed=None, options=None):
        if hasattr(self, "walk"):
            gymnasium.Env.reset(self, seed=seed)
            return self.walk.send(0.0), {}
        return super().reset(seed=seed, options=options)
