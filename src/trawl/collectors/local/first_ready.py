"""Collectors whose batches hold the frames of whichever environments are ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict.nn import InteractionType

from trawl.collectors.config import CollectorConfig
from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.pool import Pool
from trawl.envs.gym import GymEnv
from trawl.keys import Key, as_key, show_key
from trawl.rollout.batches import BatchOptions
from trawl.rollout.policy.policy import Policy
from trawl.rollout.ready.loop import ReadyRollout
from trawl.rollout.ready.serving import Batching, ServingOptions
from trawl.supported import POOL_RESET, READY_LAYOUT, check

VERSION: Key = ("policy_version",)


def pool_of(env: Any) -> Pool | None:
    """Returns the pool that an environment consists of; None for all other environments.

    Raises:
        ValueError: if the environment is a batch of several, and one of them is a pool.
    """
    if isinstance(env, GymEnv):
        return env.vector if isinstance(env.vector, Pool) else None
    for part in env.parts if isinstance(env, TensorDictEnv) else ():
        if isinstance(part, GymEnv) and isinstance(part.vector, Pool):
            raise ValueError(part.vector.why_alone)
    return None


def check_pool_options(config: CollectorConfig, env: GymEnv, pool: Pool) -> None:
    """Rejects options that can't be used with a pool, which is in ``env``.

    Raises:
        ValueError: if there are any.
    """
    against = (
        f"{type(pool.env).__name__} with batch_size={pool.ready_envs} and num_envs={pool.num_envs}"
    )
    check(vars(config), env.traits, against)
    divides = pool.num_envs % pool.ready_envs == 0
    if config.reset_at_each_iter and not (pool.can_restart or divides):
        raise POOL_RESET.error(against=against)


def pool_batching(pool: Pool) -> Batching:
    """Returns the sizes of the batches for which the policy acts, which the pool determines."""
    return Batching(1, pool.num_envs, 0.0, pool.ready_envs)


def new_ready_rollout(
    env: Any,
    policy: Policy,
    options: BatchOptions,
    exploration: InteractionType,
    serving: ServingOptions,
    version: Callable[[], int],
) -> ReadyRollout:
    """Returns the inner loop for environments that step each at its own pace.

    Args:
        env: the environments.
        policy: the policy.
        options: options of the batches.
        exploration: exploration type of probabilistic policies.
        serving: options for acting in environments that are ready.
        version: function that returns the policy's current version.

    Raises:
        ValueError: if the data of the environments has no fixed layout.
    """
    if not env.fixed_layout:
        raise READY_LAYOUT.error(why=f"{env.name} has {_shapes(env)}")
    return ReadyRollout(env, policy, options, exploration, serving, version)


def _shapes(env: Any) -> str:
    """Returns the dtypes and shapes of what an environment shows, as text for an error message."""
    axes = len(env.batch_size)
    return ", ".join(
        f"{show_key(as_key(key))} ({leaf.dtype}, shape {tuple(leaf.shape[axes:])})"
        for spec in (env.full_observation_spec, env.full_action_spec, env.full_reward_spec)
        for key, leaf in spec.items(True, True)
    )
