"""The cases of environments that may have to be replayed: what it costs to log their actions.

Trawl logs the actions of an environment if its state can't be read. Each case compares a collector
that does this with one that doesn't.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import torch
from gymnasium import wrappers
from gymnasium.envs.classic_control import CartPoleEnv
from torch import Tensor, nn

import peers
import work
from harness import TRAWL, Case, Contender, Source

UNLOGGED = "without a log"
# A log shall cost less than 2 %, but for episodes of a few hundred microseconds: to note where one
# begins takes about 13 of them.
GOAL = 0.98


class ClosedCartPole(CartPoleEnv):
    """A CartPole whose state can't be captured: the cheapest environment that needs a log."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = iter([0])


def closed_cartpole() -> gymnasium.Env[Any, Any]:
    """A closed CartPole in a wrapper that ends long episodes."""
    return wrappers.TimeLimit(ClosedCartPole(), 500)


def sticky_pong() -> gymnasium.Env[Any, Any]:
    """Pong with sticky actions, as preprocessed images."""
    import ale_py

    gymnasium.register_envs(ale_py)
    env = gymnasium.make(
        "ALE/Pong-v5", frameskip=1, repeat_action_probability=0.25, disable_env_checker=True
    )
    return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env), 4)


class Still(nn.Module):
    """A policy that does nothing."""

    def forward(self, observation: Tensor) -> Tensor:
        return torch.zeros(observation.shape[:-3], dtype=torch.int64)


def source(make: Callable[[], Any], policy: Any, frames: int, logs: bool) -> Source:
    """Batches of a collector that logs actions, or does not."""
    env = peers.trawl_indexed(make)
    if not logs:
        env.drop_log()
    yield from peers.trawl(env, policy, frames)


def case(
    name: str,
    title: str,
    make: Callable[[], Any],
    policy: Any,
    frames: int,
    goal: float | None = GOAL,
) -> Case:
    """The case of an environment."""
    return Case(
        name,
        title,
        (
            Contender(TRAWL, lambda: source(make, policy, frames, True)),
            Contender(UNLOGGED, lambda: source(make, policy, frames, False), goal),
        ),
    )


def log_pong() -> Case:
    return case("log_pong", "Pong with sticky actions", sticky_pong, work.acting(Still()), 256)


def log_cartpole() -> Case:
    policy = work.acting(work.Argmax(work.mlp(4, 2, 4)))
    title = "1 closed CartPole, MLP 2x64, long episodes"
    return case("log_cartpole", title, closed_cartpole, policy, 1000)


def log_cartpole_short() -> Case:
    policy = work.acting(work.Argmax(work.mlp(4, 2, 9)))
    title = "1 closed CartPole, MLP 2x64, short episodes"
    return case("log_cartpole_short", title, closed_cartpole, policy, 1000, goal=None)


def log_pool() -> Case:
    policy = work.acting(work.Argmax(work.mlp(4, 2, 4)))
    title = f"EnvPool, {work.POOL_SIZE} CartPoles, MLP 2x64, long episodes"
    return case("log_pool", title, work.cartpole_pool, policy, work.POOL_SIZE * 128)


def log_pool_short() -> Case:
    policy = work.acting(work.Argmax(work.mlp(4, 2, 9)))
    title = f"EnvPool, {work.POOL_SIZE} CartPoles, MLP 2x64, short episodes"
    return case("log_pool_short", title, work.cartpole_pool, policy, work.POOL_SIZE * 128)


CASES = {
    one.__name__: one
    for one in (log_pong, log_cartpole, log_cartpole_short, log_pool, log_pool_short)
}
