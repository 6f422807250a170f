"""Environments and comparisons for tests of states."""

import io
import random
from contextlib import suppress

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import NonTensorData, NonTensorStack
from torch import Tensor

from trawl.tensordicts import is_lazy


class Walk(gymnasium.Env):
    """Random steps on a line, in episodes of random length."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.normal(size=2)
        return self.place.copy(), {}

    def step(self, action):
        self.place = self.place + self.np_random.normal(size=2) * (action + 1)
        ended = bool(self.np_random.random() < 0.1)
        return self.place.copy(), float(self.place[0]), ended, False, {}


class NotAllowed(Exception):
    """Raised for an action that the mask doesn't allow."""


class Masked(Walk):
    """It allows one or two actions at random, and says so in ``info``."""

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], self.shown()

    def step(self, action):
        if not self.mask[action]:
            raise NotAllowed
        *results, _ = super().step(action)
        return *results, self.shown()

    def shown(self):
        self.mask = np.zeros(3, np.int8)
        self.mask[self.np_random.integers(3, size=2)] = 1
        return {"action_mask": self.mask}


class Drawing(Walk):
    """It draws from the global generators of its process."""

    def step(self, action):
        _, reward, ended, *rest = super().step(action)
        self.place[0] = np.random.normal() + torch.randn(()).item() + random.random()
        return self.place.copy(), reward, ended, *rest


class Fragile(Walk):
    """It fails at random steps."""

    def step(self, action):
        if self.np_random.random() < 0.05:
            raise OSError("it broke")
        return super().step(action)


class Pickled(Walk):
    """It has a set, which only a pickle holds."""

    def reset(self, **kwargs):
        found = super().reset(**kwargs)
        self.seen = set()
        return found

    def step(self, action):
        *results, info = super().step(action)
        self.seen.add(int(action))
        results[1] += len(self.seen)
        return *results, info


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(one, other):
    """Whether two batches are equal, bit by bit, also if they are lazy stacks."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, (NonTensorData, NonTensorStack)):
        return plain(one.tolist()) == plain(other.tolist())
    if is_lazy(one):
        pairs = zip(one.tensordicts, other.tensordicts, strict=True)
        return is_lazy(other) and all(same(*pair) for pair in pairs)
    return (
        one.shape == other.shape
        and set(one.keys()) == set(other.keys())
        and all(same(value, other.get(key)) for key, value in one.items())
    )


def plain(value):
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value if isinstance(value, (str, type(None))) else np.asarray(value).tolist()


def alike(one, other):
    return one is other is None or same(one, other)


def exchanged(state, other, path):
    """Returns a state with one piece of another state."""
    place = state = through_a_file(state)
    for key in path[:-1]:
        place, other = place[key], other[key]
    place[path[-1]] = other[path[-1]]
    return state


def following(collector, count, seed=1):
    """The next batches. Without a seed, a collector draws from the program's own generators."""
    found = []
    for index in range(count):
        if seed is None:
            torch.manual_seed(index), np.random.seed(index), random.seed(index)
        found.append(collector.next())
    return found


def check(make, batches, later=4, seed=1, **options):
    """Compares a collector with one that continues from its state."""
    with make() as collector, make() as other:
        if seed is not None:
            collector.set_seed(seed)
        for _ in range(batches):
            collector.next()
        other.load_state_dict(through_a_file(collector.state_dict()), **options)
        assert other.resumed
        expected, found = (following(one, later, seed) for one in (collector, other))
        assert all(map(alike, expected, found))


def check_piece(make, path, batches=3, later=6):
    """Checks that a collector delivers other batches if a piece of its state is an earlier one."""
    with make() as collector, make() as other:
        collector.set_seed(1)
        before = through_a_file(collector.state_dict())
        for _ in range(batches):
            collector.next()
        state = through_a_file(collector.state_dict())
        expected = following(collector, later)
        other.load_state_dict(state)
        assert all(map(alike, following(other, later), expected))
        other.load_state_dict(exchanged(state, before, path))
        with suppress(NotAllowed):
            assert not all(map(alike, following(other, later), expected))
