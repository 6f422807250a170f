"""Choice of the batch writer that an environment, a policy and the options need."""

from __future__ import annotations

from typing import Any

from trawl.envs.base import TensorDictEnv
from trawl.envs.specs import NonTensor
from trawl.envs.tensor_env import TensorEnv
from trawl.keys import as_key, show_key
from trawl.rollout.batches import BatchOptions, NoFixedLayout
from trawl.rollout.policy.policy import Policy
from trawl.rollout.writers.arrays import ArrayBatchWriter
from trawl.rollout.writers.batch_writer import BatchWriter
from trawl.rollout.writers.tensordicts import TensorDictBatchWriter
from trawl.rollout.writers.tensors import TensorBatchWriter

_LOOSE = "its spaces have no fixed shape and dtype"


def new_batch_writer(env: Any, policy: Policy, options: BatchOptions) -> BatchWriter:
    """Returns the fastest batch writer that an environment and a policy allow.

    Args:
        env: the environment, with the TensorDict interface.
        policy: the policy.
        options: options of the batches.

    Raises:
        ValueError: if the environment or the policy does not allow an option.
        Exception: an error that a reset of the environment or the first call of the policy raised.
    """
    try:
        if isinstance(env, TensorEnv):
            return TensorBatchWriter(env, policy, options)
        if isinstance(env, TensorDictEnv) and env.fixed_layout:
            return ArrayBatchWriter(env, policy, options)
        why = _why_loose(env)
    except NoFixedLayout as why_not:
        why = str(why_not)
    return TensorDictBatchWriter(env, policy, options, why)


def _why_loose(env: Any) -> str:
    """Returns the reason why the frames of an environment have no fixed layout."""
    if not isinstance(env, TensorDictEnv):
        name = type(env).__name__
        return f"{name} is not a Gymnasium environment: its own step takes and returns TensorDicts"
    if any(isinstance(part, TensorEnv) for part in env.parts):
        return (
            "it is a list of environments whose data are tensors (make one environment of more "
            "sub-environments, for example with num_envs, instead of a list)"
        )
    loose = ", ".join(show_key(as_key(key)) for key in _loose_entries(env))
    return f"{_LOOSE} ({loose})" if loose else _LOOSE


def _loose_entries(env: TensorDictEnv) -> list[Any]:
    """Returns the keys of the observations and actions that have no fixed layout."""
    specs = (env.full_observation_spec, env.full_action_spec)
    return [
        key for one in specs for key, spec in one.items(True, True) if isinstance(spec, NonTensor)
    ]
