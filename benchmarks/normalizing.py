"""The cases of normalised observations: here, by hand, and by Gymnasium's wrapper."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

import hand
import peers
import tensors
import work
from cases import ENVS, FRAMES, STEPS
from harness import HAND, TRAWL, Case, Contender, Source

WITHOUT = "without normalisation"
WRAPPER = "gymnasium's NormalizeObservation"


def source(env: Any, policy: Any = None, frames: int = FRAMES, **options: Any) -> Source:
    """Batches of a collector, by default of some Pendulums."""
    from trawl.collectors import Collector

    policy = policy or work.acting(work.mlp(3, 1))
    collector = Collector(env, policy, frames_per_batch=frames, total_frames=-1, **options)
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


class TensorStatistics:
    """Running mean and variance in float64, brought up to date whenever the count has doubled.

    As in Trawl, each frame counts once, and a batch begins with the statistics of all frames before
    it.
    """

    def __init__(self, width: int) -> None:
        self.count, self.due = 0, 0
        self.mean = torch.zeros(width, dtype=torch.float64)
        self.squares = torch.zeros(width, dtype=torch.float64)
        self.shift, self.scale = torch.zeros(width), torch.ones(width)

    def add(self, rows: Tensor) -> None:
        """Adds observations, some at a time, so that they stay in the cache."""
        for part in rows.split(2048):
            values, size = part.double(), len(part)
            mean = values.mean(0)
            values -= mean
            apart, count = mean - self.mean, self.count + size
            self.squares += values.mul_(values).sum(0)
            self.squares += apart * apart * (self.count * size / count)
            self.mean += apart * (size / count)
            self.count = count

    def load(self) -> None:
        """Normalises with the newest statistics from now on."""
        self.shift.copy_(self.mean)
        self.scale.copy_(1.0 / torch.sqrt(self.squares / self.count + 1e-8))
        self.due = 2 * self.count

    def normalize(self, values: Tensor, out: Tensor) -> Tensor:
        """Writes normalised observations, and returns them."""
        return torch.sub(values, self.shift, out=out).mul_(self.scale).clamp_(-10, 10)


def hand_drift(act: Any) -> Source:
    """The loop of `tensors.hand_drift`, in which each observation is normalised once."""
    env = tensors.Drift()
    count, width, steps = tensors.COUNT, tensors.WIDTH, tensors.STEPS
    shapes: dict[Any, tuple[int, ...]] = {
        "observation": (width,),
        ("next", "observation"): (width,),
    }
    shapes |= {"action": (tensors.ACTIONS,), ("next", "reward"): (1,)}
    memory = tensors.empty((steps, count), shapes)
    batch = tensors.deliver(memory, (count, steps))
    rows = {key: value.unbind(0) for key, value in memory.items()}
    flat = {k: v[..., 0].unbind(0) for k, v in memory.items() if v.ndim == 3 and v.shape[-1] == 1}
    ids, raw = torch.arange(count), env.reset()[0]
    total, statistics = count, TensorStatistics(width)
    seen = statistics.normalize(raw, torch.empty(count, width))
    while True:
        with torch.no_grad():
            for t in range(steps):
                rows["observation"][t].copy_(seen)
                statistics.add(raw)
                action = act(seen)
                rows["action"][t].copy_(action)
                raw, reward, terminated, truncated, info = env.step(action)
                statistics.normalize(raw, seen)
                after = rows["next", "observation"][t].copy_(seen)
                flat["next", "reward"][t].copy_(reward)
                flat["next", "terminated"][t].copy_(terminated)
                flat["next", "truncated"][t].copy_(truncated)
                done = torch.logical_or(terminated, truncated, out=flat["next", "done"][t])
                rows["collector", "traj_ids"][t].copy_(ids)
                ended = done.nonzero().squeeze(-1)
                # True last observations.
                last = info["final_obs"][ended]
                after[ended] = statistics.normalize(last, last)
                ids[ended] = torch.arange(total, total + len(ended))
                total += len(ended)
                if statistics.count >= statistics.due:
                    statistics.load()
        statistics.load()
        yield count * steps, batch


def normalize_tensors() -> Case:
    net = work.mlp(tensors.WIDTH, tensors.ACTIONS)
    policy, frames = work.acting(net), tensors.COUNT * tensors.STEPS
    return Case(
        "normalize_tensors",
        f"{tensors.COUNT:,} environments of {tensors.WIDTH} floats as torch tensors, observations "
        "normalised, MLP 2x64",
        (
            Contender(
                TRAWL,
                lambda: source(tensors.Drift(), policy, frames, normalize_observations=True),
            ),
            Contender(
                WITHOUT,
                lambda: source(tensors.Drift(), policy, frames),
                note="the same environments",
            ),
            Contender(HAND, lambda: hand_drift(net), 0.9, "the same statistics in torch"),
        ),
    )


CASES = {"normalize_pendulum": normalize_pendulum, "normalize_tensors": normalize_tensors}
