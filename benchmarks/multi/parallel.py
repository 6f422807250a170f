"""Two environments in two processes, stepped together: Trawl's, its peers' and a hand-written one.

Each `open_...` returns two functions: one steps all environments once, the other ends them.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import peers
import work
from harness import tidy

Make = Callable[[], gymnasium.Env[Any, Any]]
Opened = tuple[Callable[[], Any], Callable[[], Any]]
CHUNK = 50


class Stepping:
    """Environments in processes of their own, stepped as quickly as they can."""

    def __init__(self, open_envs: Callable[[], Opened]) -> None:
        self._step, self._end = open_envs()
        self.facts: dict[str, float] = {}
        self.layout: dict[str, str] = {}

    def turn(self, seconds: float) -> dict[str, float]:
        """Steps per second, each of all environments."""
        tidy()
        steps = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            for _ in range(CHUNK):
                self._step()
            steps += CHUNK
        return {"steps": steps / elapsed}

    def close(self) -> None:
        self._end()


class Schedule:
    """The speed of groups of `work.WaitingPendulum` if nothing but waiting takes time.

    Args:
        count: number of environments.
        groups: number of groups, for which `work.SlowPolicy` acts in turn.
    """

    def __init__(self, count: int, groups: int) -> None:
        self._count, self._groups = count, groups
        self._random = np.random.default_rng(0)
        self.facts: dict[str, float] = {}
        self.layout: dict[str, str] = {}

    def turn(self, seconds: float) -> dict[str, float]:
        """Frames per second."""
        steps, each, now = 2_000, self._count // self._groups, 0.0
        ready = [0.0] * self._groups
        for _ in range(steps):
            for group in range(self._groups):
                now = max(now, ready[group]) + work.POLICY_SECONDS / self._groups
                ready[group] = now + work.waiting_seconds(self._random, each).max()
        return {"speed": steps * self._count / now}

    def close(self) -> None:
        pass


def open_trawl(make: Make, count: int, **options: Any) -> Opened:
    """Trawl's."""
    from trawl.envs import ParallelEnv

    return _tensordicts(ParallelEnv(count, make, **options))


def open_torchrl(make: Make, count: int, **options: Any) -> Opened:
    """TorchRL's, around its wrapper of a Gymnasium environment."""
    warnings.simplefilter("ignore")
    from torchrl.envs import ParallelEnv

    wrapped = _Wrapped(make)
    return _tensordicts(ParallelEnv(count, wrapped, **options))


class _Wrapped:
    """A function that can be pickled."""

    def __init__(self, make: Make) -> None:
        self._make = make

    def __call__(self) -> Any:
        return peers.torchrl_single(self._make)


def _tensordicts(env: Any) -> Opened:
    action = env.full_action_spec["action"].rand()
    state = env.reset()

    def step() -> None:
        nonlocal state
        state["action"] = action
        _, state = env.step_and_maybe_reset(state)

    return step, env.close


def open_stable_baselines3(make: Make, count: int) -> Opened:
    """Its `SubprocVecEnv`, with its defaults."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([make] * count)
    env.reset()
    action = _zeros(make, count)
    return lambda: env.step(action), env.close


def open_stable_baselines3_batched(make: Make, count: int, each: int) -> Opened:
    """Its `SubprocVecEnv`, batched by hand: a `DummyVecEnv` of `each` environments in each process.

    As there, actions and results are sent through a `multiprocessing.Pipe`, and stacked.
    """
    context = multiprocessing.get_context("forkserver")
    ends, processes = [], []
    for _ in range(count // each):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve_batch, args=(make, each, theirs), daemon=True)
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    actions = np.split(_zeros(make, count), count // each)

    def step() -> tuple[NDArray[Any], ...]:
        for end, action in zip(ends, actions, strict=True):
            end.send(action)
        observations, rewards, dones, _ = zip(*[end.recv() for end in ends], strict=True)
        return np.concatenate(observations), np.concatenate(rewards), np.concatenate(dones)

    def close() -> None:
        for process in processes:
            process.terminate()
            process.join()

    return step, close


def _serve_batch(make: Make, each: int, end: Any) -> None:
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = DummyVecEnv([make] * each)
    env.reset()
    while True:
        end.send(env.step(end.recv()))


def open_gymnasium(make: Make, count: int) -> Opened:
    """Gymnasium's `AsyncVectorEnv`, whose observations are in shared memory."""
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    env = gymnasium.vector.AsyncVectorEnv([make] * count, copy=False, autoreset_mode=mode)
    env.reset()
    action = _zeros(make, count)
    return lambda: env.step(action), env.close


def _zeros(make: Make, count: int) -> NDArray[Any]:
    space = make().action_space
    assert space.shape is not None
    return np.zeros((count, *space.shape), space.dtype)


def open_hand(make: Make, count: int, each: int = 1) -> Opened:
    """The limit: everything in shared arrays, and one byte through a pipe each way."""
    numbers = np.frombuffer(mmap.mmap(-1, 64 * count), np.float32).reshape(count, 16)
    context = multiprocessing.get_context("fork")
    asks, answers, processes = [], [], []
    for rows in np.split(numbers, range(each, count, each)):
        (asked, ask), (answer, answered) = os.pipe(), os.pipe()
        process = context.Process(target=_serve, args=(make, rows, asked, answered), daemon=True)
        process.start()
        asks.append(ask)
        answers.append(answer)
        processes.append(process)

    def step() -> None:
        numbers[:, 0] = 0.0  # the action
        for ask in asks:
            os.write(ask, b"+")
        for answer in answers:
            os.read(answer, 1)

    def end() -> None:
        for process in processes:
            process.terminate()
            process.join()

    return step, end


def _serve(make: Make, rows: NDArray[np.float32], asked: int, answered: int) -> None:
    """A row: the action, the reward, two flags, the next observation, and what to go on from."""
    envs = [make() for _ in rows]
    space = envs[0].action_space
    number = isinstance(space, gymnasium.spaces.Discrete)
    size = int(np.prod(envs[0].observation_space.shape or ()))
    first, last = 4 + size, 4 + 2 * size
    for env, row in zip(envs, rows, strict=True):
        row[first:last] = env.reset()[0]
    while os.read(asked, 1):
        for env, row in zip(envs, rows, strict=True):
            action = int(row[0]) if number else row[:1]
            observation, row[1], row[2], row[3], _ = env.step(action)
            row[4:first] = observation
            row[first:last] = env.reset()[0] if row[2] or row[3] else observation
        os.write(answered, b"+")
