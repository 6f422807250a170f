"""The cases: the same work for Trawl, its peers and the hand-written loop, and Trawl's goals."""

from __future__ import annotations

from typing import Any

import agents
import hand
import jax_envs
import peers
import stochastic
import tensors
import work
from frameworks import others
from harness import HAND, TRAWL, Case, Contender, Source

FRAMES = 1000
ENVS = 8
STEPS = FRAMES // ENVS
POOL_STEPS = 128
IMAGE_FRAMES = 256
# The seeds of untrained weights that happen to balance a pole well (to the limit of 500 steps) and
# badly (about 17 steps): how often episodes end decides how much their resets weigh.
BALANCING, FALLING = 4, 9

NO_IDS = "track_traj_ids=False: fewer keys than the others deliver"


def frame1() -> Case:
    return _small(1)


def frames16() -> Case:
    return _small(16)


def _small(frames: int) -> Case:
    """Batches as small as off-policy programs ask for."""
    net, policy = work.mlp(3, 1), work.acting(work.mlp(3, 1))

    def by_hand() -> Source:
        return hand.single(work.pendulum(), hand.only(net), frames, blocks=0)

    def torchrl() -> Source:
        return peers.torchrl(peers.torchrl_single(work.pendulum), policy, frames)

    return Case(
        "frame1" if frames == 1 else f"frames{frames}",
        f"1 Pendulum, MLP 2x64, {frames} frame{'s' * (frames > 1)} in a batch",
        (
            Contender(TRAWL, lambda: peers.trawl(work.pendulum, policy, frames)),
            Contender(HAND, by_hand, note="a new TensorDict for each batch"),
            Contender("TorchRL", torchrl, 2.0, "trust_policy=True"),
        ),
    )


def pendulum() -> Case:
    net, policy = work.mlp(3, 1), work.acting(work.mlp(3, 1))
    return Case(
        "pendulum",
        "1 Pendulum, MLP 2x64",
        (
            Contender(TRAWL, lambda: peers.trawl(work.pendulum, policy, FRAMES)),
            Contender(HAND, lambda: hand.single(work.pendulum(), hand.only(net), FRAMES), 0.95),
            Contender("TorchRL", lambda: _torchrl(policy), 5.0, "trust_policy=True"),
            Contender("TorchRL, no ids", lambda: _torchrl(policy, ids=False), note=NO_IDS),
            *others(work.pendulum, net, 1, FRAMES),
        ),
    )


def _torchrl(policy: object, ids: bool = True) -> Source:
    env = peers.torchrl_single(work.pendulum)
    return peers.torchrl(env, policy, FRAMES, track_traj_ids=ids)


def batch8() -> Case:
    make, net = work.pendulum, work.mlp(3, 1)
    policy, act = work.acting(net), hand.only(net)

    def serial(use_buffers: bool) -> Source:
        return peers.torchrl(peers.torchrl_serial(make, ENVS, use_buffers), policy, FRAMES)

    def vector() -> Source:
        return peers.torchrl(peers.torchrl_vector(make, ENVS), policy, FRAMES)

    return Case(
        "batch8",
        f"{ENVS} Pendulums in one batch, MLP 2x64",
        (
            Contender(TRAWL, lambda: peers.trawl([make] * ENVS, policy, FRAMES)),
            Contender(
                HAND,
                lambda: hand.vector(peers.sync_vector(make, ENVS, copy=False), act, STEPS),
                0.95,
                "gymnasium SyncVectorEnv, SAME_STEP",
            ),
            Contender(
                "hand-written list loop",
                lambda: hand.several([make() for _ in range(ENVS)], act, STEPS),
                note="no vector environment: a loop over a list",
            ),
            Contender("TorchRL", lambda: serial(True), 8.0, "SerialEnv, trust_policy=True"),
            Contender(
                "TorchRL, no buffers",
                lambda: serial(False),
                note="SerialEnv(use_buffers=False), trust_policy=True",
            ),
            Contender("TorchRL, SyncVectorEnv", vector, note="gymnasium's, in a GymWrapper"),
            Contender(
                "Stable-Baselines3",
                lambda: peers.stable_baselines3(make, ENVS, STEPS),
                note="TD3.collect_rollouts, DummyVecEnv",
            ),
            Contender(
                "Tianshou",
                lambda: peers.tianshou(make, net, ENVS, STEPS),
                note="Collector, DummyVectorEnv",
            ),
            *others(make, net, ENVS, FRAMES),
        ),
    )


def envpool() -> Case:
    return _envpool("envpool", "long episodes", BALANCING, goal=0.90)


def envpool_short() -> Case:
    return _envpool("envpool_short", "short episodes", FALLING, goal=None)


def _envpool(name: str, episodes: str, seed: int, goal: float | None) -> Case:
    net = work.Argmax(work.mlp(4, 2, seed))
    frames = work.POOL_SIZE * POOL_STEPS

    def by_hand() -> Source:
        return hand.pool(work.cartpole_pool(), hand.only(net), POOL_STEPS)

    return Case(
        name,
        f"EnvPool, {work.POOL_SIZE} CartPoles, MLP 2x64, {episodes}",
        (
            Contender(
                TRAWL,
                lambda: peers.trawl(
                    peers.trawl_indexed(work.cartpole_pool), work.acting(net), frames
                ),
            ),
            Contender(HAND, by_hand, goal, "reset steps are masked and not counted"),
        ),
    )


def envpool_ready() -> Case:
    return _envpool_ready("envpool_ready", "long episodes", BALANCING)


def envpool_ready_short() -> Case:
    return _envpool_ready("envpool_ready_short", "short episodes", FALLING)


def _envpool_ready(name: str, episodes: str, seed: int) -> Case:
    net, ready = work.Argmax(work.mlp(4, 2, seed)), work.POOL_SIZE // 2
    frames = work.POOL_SIZE * POOL_STEPS

    def pool() -> Any:
        return work.cartpole_pool(ready)

    return Case(
        name,
        f"EnvPool, {work.POOL_SIZE} CartPoles, the first {ready} ready, MLP 2x64, {episodes}",
        (
            Contender(
                TRAWL,
                lambda: peers.trawl_ready(peers.trawl_indexed(pool), work.acting(net), frames),
            ),
            Contender(HAND, lambda: hand.ready_pool(pool(), hand.only(net), frames), 0.9),
        ),
    )


def images() -> Case:
    net = work.Constant()
    policy = work.acting(net)

    def torchrl() -> Source:
        return peers.torchrl(peers.torchrl_single(work.ImageEnv), policy, IMAGE_FRAMES)

    return Case(
        "images",
        "84x84x4 uint8 frames, constant policy",
        (
            Contender(TRAWL, lambda: peers.trawl(work.ImageEnv, policy, IMAGE_FRAMES)),
            Contender(
                HAND, lambda: hand.single(work.ImageEnv(), hand.only(net), IMAGE_FRAMES), 0.90
            ),
            Contender("TorchRL", torchrl, 3.0, "trust_policy=True"),
        ),
    )


def torchrl_env() -> Case:
    net = work.mlp(3, 1)
    policy = work.acting(net)

    def trawl() -> Source:
        return peers.trawl(peers.torchrl_single(work.pendulum), policy, FRAMES)

    def by_hand() -> Source:
        return hand.torchrl_env(peers.torchrl_single(work.pendulum), net, FRAMES)

    return Case(
        "torchrl_env",
        "1 TorchRL GymEnv Pendulum, MLP 2x64",
        (
            Contender(TRAWL, trawl),
            Contender(HAND, by_hand, note="step_and_maybe_reset, then torch.stack; no ids"),
            Contender("TorchRL", lambda: _torchrl(policy), 1.3, "trust_policy=True"),
        ),
    )


CASES = (
    {
        case.__name__: case
        for case in (
            pendulum,
            frame1,
            frames16,
            batch8,
            envpool,
            envpool_short,
            envpool_ready,
            envpool_ready_short,
            images,
            torchrl_env,
            tensors.tensors,
            tensors.vmas,
            jax_envs.gymnax,
            jax_envs.gymnax_short,
            jax_envs.jumanji,
        )
    }
    | stochastic.CASES
    | agents.CASES
)
