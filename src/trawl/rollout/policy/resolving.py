"""Turns a policy of any kind into a function of a TensorDict."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from trawl.envs.agents.groups import groups_of
from trawl.envs.frame_stack import FrameStack
from trawl.foreign.torch import is_compiled
from trawl.keys import as_key, show_keys
from trawl.rollout.policy.random_policy import RandomPolicy
from trawl.rollout.writers.trial import trial


def resolve(policy: Any, env: Any, trust: bool, frame_stack: FrameStack | None = None) -> Any:
    """Returns a function of a TensorDict for a policy, by the rules of TorchRL's collectors.

    A ``TensorDictModule``, a :class:`RandomPolicy`, a compiled module, a client of an inference
    server of TorchRL, and a callable whose only
    parameter is a TensorDict (by its annotation, or by the name ``tensordict`` or ``td``) are
    returned unchanged. Any other module or function is wrapped: the names of its parameters
    must be observation keys, and its results are the action, followed by ``output1``,
    ``output2``, …

    Args:
        policy: the user's policy.
        env: the environment, for its observation and action keys.
        trust: True to return any callable unchanged.
        frame_stack: the stacks that observations become; None if they are not stacked.

    Raises:
        TypeError: if the policy can't be called, has only one of ``in_keys`` and ``out_keys``, or
            has a required parameter that is not an observation key.
        RuntimeError: if the policy has ``in_keys`` and ``out_keys``, but is not a
            ``TensorDictModuleBase``.
    """
    if not callable(policy):
        raise TypeError(f"policy must be callable, but it is {type(policy).__name__}: {policy!r}")
    refuse_class(policy)
    if trust or isinstance(policy, (TensorDictModuleBase, RandomPolicy)) or is_compiled(policy):
        return policy
    if _is_client(policy):
        return policy
    has_keys = hasattr(policy, "in_keys"), hasattr(policy, "out_keys")
    if all(has_keys):
        raise RuntimeError(
            f"policy {name_of(policy)} has in_keys and out_keys, but is not a "
            "TensorDictModuleBase: derive its class from tensordict.nn.TensorDictModuleBase"
        )
    if any(has_keys):
        raise TypeError(f"policy {name_of(policy)} must have both in_keys and out_keys, or neither")
    if _takes_tensordict(policy):
        return policy
    return _wrap(policy, env, frame_stack)


def refuse_class(policy: Any) -> None:
    """Raises a ``TypeError`` if a policy is a class instead of an object."""
    if isinstance(policy, type):
        arguments = "" if issubclass(policy, RandomPolicy) else "..."
        raise TypeError(
            f"policy must be an object, but it is the class {policy.__name__}: pass an instance, "
            f"{policy.__name__}({arguments})"
        )


def name_of(policy: Any) -> str:
    """Returns the name of a policy, for messages."""
    return getattr(policy, "__name__", None) or type(policy).__name__


def _is_client(policy: Any) -> bool:
    """Returns True for a client of an inference server of TorchRL."""
    return type(policy).__module__.startswith("torchrl.") and hasattr(policy, "submit")


def _parameters(policy: Any) -> list[inspect.Parameter]:
    target = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the signature of policy {name_of(policy)} can't be read: {error}"
        ) from error
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter for parameter in found if parameter.kind not in variadic]


def _takes_tensordict(policy: Any) -> bool:
    parameters = _parameters(policy)
    if len(parameters) != 1:
        return False
    (parameter,) = parameters
    if parameter.name in ("tensordict", "td"):
        return True
    target = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        hint = get_type_hints(target).get(parameter.name)
    except Exception:  # an annotation that can't be evaluated here is used unevaluated
        hint = parameter.annotation
    if isinstance(hint, str):
        return hint.split(".")[-1] in ("TensorDict", "TensorDictBase")
    return isinstance(hint, type) and issubclass(hint, TensorDictBase)


def _wrap(policy: Any, env: Any, frame_stack: FrameStack | None) -> TensorDictModule:
    observations = {str(key) for key in env.observation_spec.keys()}  # noqa: SIM118
    parameters = _parameters(policy)
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    unknown = [name for name in required if name not in observations]
    if unknown or not parameters:
        raise TypeError(
            f"Failed to wrap the policy {name_of(policy)}: its parameters {required} must be "
            f"observation keys of the environment, which are {sorted(observations)}. Rename "
            "them, or use tensordict.nn.TensorDictModule(policy, in_keys=[...], "
            "out_keys=[...]), or set trust_policy=True for a function of a TensorDict."
        )
    names = [p.name for p in parameters if p.name in observations]
    out_keys = list(env.action_keys)
    with trial(policy):
        sample = env.observation_spec.rand()
        if frame_stack is not None:
            sample = frame_stack.repeated(sample, groups_of(env))
        more = _extra_outputs(policy, sample, names, out_keys)
    out_keys += [f"output{i + 1}" for i in range(more)]
    if names == [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY][: len(names)]:
        return TensorDictModule(policy, in_keys=names, out_keys=out_keys)
    # If the inputs were passed by position, they would reach the wrong parameters.
    by_name = {name: name for name in names}
    return TensorDictModule(policy, in_keys=by_name, out_keys=out_keys, out_to_in_map=True)


def _extra_outputs(
    policy: Any, sample: TensorDictBase, in_keys: list[str], actions: list[Any]
) -> int:
    """Calls the policy, and returns the number of values that it returns besides the actions."""
    device = (
        next((p.device for p in policy.parameters()), None)
        if isinstance(policy, nn.Module)
        else None
    )
    # Indexing unwraps non-tensor data, as a TensorDictModule does.
    inputs = {key: sample[key] for key in in_keys}
    if device is not None:
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    with torch.no_grad():
        outputs = policy(**inputs)
    count = len(outputs) if isinstance(outputs, tuple) else 1
    if count < len(actions):
        raise TypeError(
            f"policy {name_of(policy)} returned {count} value(s), but the environment takes "
            f"{len(actions)} actions: {show_keys({as_key(key) for key in actions})}"
        )
    return count - len(actions)
