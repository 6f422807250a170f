"""The case of normalised observations: what they cost, here and by Gymnasium's wrapper."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

import hand
import peers
import work
from cases import ENVS, FRAMES, STEPS
from harness import HAND, TRAWL, Case, Contender, Source

WITHOUT = "without normalisation"
WRAPPER = "gymnasium's NormalizeObservation"


def source(env: Any, **options: Any) -> Source:
    """Batches of a collector of some Pendulums."""
    from trawl.collectors import Collector

    policy = work.acting(work.mlp(3, 1))
    collector = Collector(env, policy, frames_per_batch=FRAMES, total_frames=-1, **options)
    try:
        for batch in collector:
            yield batch.numel(), batch
    finally:
        collector.shutdown()


def vector() -> Any:
    """8 Pendulums that gymnasium steps one after the other."""
    return peers.sync_vector(work.pendulum, ENVS, copy=False)


def wrapped() -> Source:
    """The same by gymnasium's wrapper, which takes only vectors that spend a step on a reset."""
    env = gymnasium.vector.SyncVectorEnv([work.pendulum] * ENVS, copy=False)
    for _, batch in source(gymnasium.wrappers.vector.NormalizeObservation(env)):
        # The mask, which the others lack.
        yield int(batch["collector", "mask"].sum()), None


class Normalized:
    """The same, normalised by hand with running moments of each step, as in many trainers."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.num_envs = env.num_envs
        shape = env.single_observation_space.shape
        self.count, self.mean, self.var = 1e-4, np.zeros(shape), np.ones(shape)

    def _normalized(self, observation: Any) -> Any:
        mean, var, size = observation.mean(0), observation.var(0), len(observation)
        apart, count = mean - self.mean, self.count + size
        squares = self.var * self.count + var * size
        squares += np.square(apart) * (self.count * size / count)
        self.mean = self.mean + apart * (size / count)
        self.var, self.count = squares / count, count
        normalized = (observation - self.mean) / np.sqrt(self.var + 1e-8)
        return np.clip(normalized, -10, 10).astype(np.float32)

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return self._normalized(observation), info

    def step(self, actions: Any) -> Any:
        observation, *results = self.env.step(actions)
        return self._normalized(observation), *results


def normalize_pendulum() -> Case:
    act = hand.only(work.mlp(3, 1))
    return Case(
        "normalize_pendulum",
        f"{ENVS} Pendulums in one vector, observations normalised, MLP 2x64",
        (
            Contender(TRAWL, lambda: source(vector(), normalize_observations=True)),
            Contender(WITHOUT, lambda: source(vector()), 0.9, "the same vector"),
            Contender(WRAPPER, wrapped, 1.1, "in Trawl; AutoresetMode.NEXT_STEP"),
            Contender(
                HAND,
                lambda: hand.vector(Normalized(vector()), act, STEPS),
                1.0,
                "moments of each step in numpy; last observations stay raw",
            ),
        ),
    )


CASES = {"normalize_pendulum": normalize_pendulum}
