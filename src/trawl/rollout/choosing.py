"""Choice of the batch writer that an environment, a policy and the options need."""

from __future__ import annotations

from typing import Any

from trawl.envs.base import TensorDictEnv
from trawl.envs.pettingzoo import PettingZooEnv
from trawl.envs.specs import NonTensor
from trawl.envs.tensor_env import TensorEnv
from trawl.keys import as_key, show_key
from trawl.rollout.array_batch_writer import ArrayBatchWriter
from trawl.rollout.batch_writer import BatchOptions, BatchWriter, NoFixedLayout
from trawl.rollout.policy import Policy
from trawl.rollout.tensor_batch_writer import TensorBatchWriter
from trawl.rollout.tensordict_batch_writer import TensorDictBatchWriter
from trawl.supported import NORMALIZE_LOOSE, RESTART_LOOSE, STACK_LOOSE

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
    if options.frame_stack is not None:
        return _stacked(env, policy, options)
    if not isinstance(env, TensorDictEnv):
        name = type(env).__name__
        why = f"{name} is not a Gymnasium environment: its own step takes and returns TensorDicts"
        _refuse_normalizing(env, options, why)
        return TensorDictBatchWriter(env, policy, options, why)
    if isinstance(env, TensorEnv):
        return _of_tensors(env, policy, options)
    if not env.fixed_layout:
        return _of_loose_frames(env, policy, options)
    try:
        return ArrayBatchWriter(env, policy, options)
    except NoFixedLayout as why_not:
        return _by_tensordict(env, policy, options, str(why_not))


def _stacked(env: Any, policy: Policy, options: BatchOptions) -> BatchWriter:
    """Returns the batch writer that stacks frames.

    Raises:
        ValueError: if the environment or the policy does not allow it.
    """
    why = "it needs an environment of Gymnasium's API with data of fixed shape and dtype"
    try:
        if isinstance(env, TensorEnv):
            return TensorBatchWriter(env, policy, options)
        if isinstance(env, TensorDictEnv):
            if env.fixed_layout:
                return ArrayBatchWriter(env, policy, options)
            why = _why_loose(env)
    except NoFixedLayout as error:
        why = f"it needs a policy whose entries have a fixed layout, but {error}"
    raise STACK_LOOSE.error(against=repr(env), why=why)


def _of_tensors(env: TensorEnv, policy: Policy, options: BatchOptions) -> BatchWriter:
    """Returns the batch writer for an environment whose data are tensors."""
    try:
        return TensorBatchWriter(env, policy, options)
    except NoFixedLayout as why:
        _refuse_restarts(options, str(why))
        return _by_tensordict(env, policy, options, str(why))


def _of_loose_frames(env: TensorDictEnv, policy: Policy, options: BatchOptions) -> BatchWriter:
    """Returns the batch writer for an environment whose frames have no fixed layout."""
    why = _why_loose(env)
    if any(isinstance(part, TensorEnv) for part in env.parts):
        _refuse_restarts(options, why)
    return _by_tensordict(env, policy, options, why)


def _why_loose(env: TensorDictEnv) -> str:
    """Returns the reason why the frames of an environment have no fixed layout."""
    if any(isinstance(part, TensorEnv) for part in env.parts):
        return (
            "it is a list of environments whose data are tensors (make one environment of more "
            "sub-environments, for example with num_envs, instead of a list)"
        )
    if env.reward_keys != ["reward"] and not _loose_entries(env):
        return (
            "its agents have rewards of their own (use a list of environments, or workers, "
            "instead of a ParallelEnv)"
        )
    shape = tuple(env.reward_spec.shape[len(env.batch_size) :])
    if env.reward_keys == ["reward"] and shape != (1,):
        return f"its reward has several components, of shape {shape}"
    loose = ", ".join(show_key(as_key(key)) for key in _loose_entries(env))
    return f"{_LOOSE} ({loose})" if loose else _LOOSE


def _by_tensordict(env: Any, policy: Policy, options: BatchOptions, why: str) -> BatchWriter:
    _refuse_normalizing(env, options, why)
    if any(isinstance(one, PettingZooEnv) for one in env.parts):
        _refuse_restarts(options, why)
    return TensorDictBatchWriter(env, policy, options, why)


def _loose_entries(env: TensorDictEnv) -> list[Any]:
    """Returns the keys of the observations and actions that have no fixed layout."""
    specs = (env.full_observation_spec, env.full_action_spec)
    return [
        key for one in specs for key, spec in one.items(True, True) if isinstance(spec, NonTensor)
    ]


def _refuse_restarts(options: BatchOptions, why: str) -> None:
    if options.restarts is not None:
        raise RESTART_LOOSE.error(why=why)


def _refuse_normalizing(env: Any, options: BatchOptions, why: str) -> None:
    for name, given in vars(options.normalize).items():
        if given is not None:
            raise NORMALIZE_LOOSE.error(f"normalize_{name}", given, against=repr(env), why=why)
