"""Contestants that learn from each batch as long as it takes to collect one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

import work
from harness import Source, layout_of, tidy
from multi.collecting import Loops, Prepare, frames_of

MINIBATCH = 64
TIMED = 5


class Learner:
    """PPO on Pendulum: clipped steps on random minibatches of a batch, for a given time.

    Args:
        policy: module whose weights are trained; it returns the mean of a Gaussian.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy, self._critic = policy, work.mlp(3, 1, seed=1)
        parameters = [*policy.parameters(), *self._critic.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=1e-4)

    def learn(self, observation: Tensor, action: Tensor, reward: Tensor, seconds: float) -> None:
        """Takes steps until the time is up."""
        start = time.perf_counter()
        with torch.no_grad():
            before = self._log_prob(observation, action)
            gain = reward - self._critic(observation)
        while time.perf_counter() - start < seconds:
            rows = torch.randint(len(observation), (MINIBATCH,))
            ratio = (self._log_prob(observation[rows], action[rows]) - before[rows]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.min(ratio * gain[rows], clipped * gain[rows]).mean()
            loss = loss + (self._critic(observation[rows]) - reward[rows]).square().mean()
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()

    def _log_prob(self, observation: Tensor, action: Tensor) -> Tensor:
        return torch.distributions.Normal(self._policy(observation), 1.0).log_prob(action)


class CollectingAndLearning:
    """A collector, and a learner that updates the policy after each batch.

    Args:
        prepare: makes the call that constructs the collector.
        net: the network of its policy.
    """

    def __init__(self, prepare: Prepare, net: nn.Module) -> None:
        self._collector = prepare()()
        self._batches = iter(self._collector)
        self._learner = Learner(net)
        self.layout = layout_of(next(self._batches))
        self._seconds = timed(lambda: next(self._batches))
        self.facts = {"learning": 1e3 * self._seconds}

    def turn(self, seconds: float) -> dict[str, float]:
        """Frames per second of collecting and learning together."""
        tidy()
        self._step()
        frames, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            frames += self._step()
        return {"speed": frames / elapsed}

    def _step(self) -> int:
        batch = next(self._batches)
        flat = batch.reshape(-1)
        self._learner.learn(
            flat["observation"], flat["action"], flat["next", "reward"], self._seconds
        )
        self._collector.update_policy_weights_()
        return frames_of(batch)

    def close(self) -> None:
        self._collector.shutdown()


class SideBySideAndLearning(Loops):
    """Hand-written loops, each of which makes a batch while this process learns.

    Args:
        loop: makes one loop.
        count: number of loops.
        frames: frames in a batch of all loops together.
    """

    def __init__(self, loop: Callable[[], Source], count: int, frames: int) -> None:
        super().__init__(_make_batches, loop, count)
        self._frames, self._learner = frames, Learner(work.mlp(3, 1))
        self._data = torch.randn(frames, 3), torch.randn(frames, 1), torch.randn(frames, 1)
        self._seconds = timed(self._collect)
        self.facts = {"learning": 1e3 * self._seconds}

    def turn(self, seconds: float) -> dict[str, float]:
        """Frames per second of collecting and learning together."""
        tidy()
        batches, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            self.send(None)
            self._learner.learn(*self._data, self._seconds)
            self.receive()
            batches += 1
        return {"speed": batches * self._frames / elapsed}

    def _collect(self) -> None:
        self.send(None)
        self.receive()


def _make_batches(source: Source, connection: Connection) -> None:
    while True:
        connection.recv()
        next(source)
        connection.send(None)


def timed(collect: Callable[[], Any]) -> float:
    """Seconds that it takes to collect a batch: the median of a few."""
    times = []
    for _ in range(TIMED):
        start = time.perf_counter()
        collect()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
