"""Kinds of policies: how each is recognised, and becomes a function of a TensorDict.

A new kind is a line of ``_KINDS``. If such policies have weights, they must be modules of torch,
because these alone are moved to devices, saved, and sent to workers. How a function of a TensorDict
is called is the same for all kinds (``policy.py``).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

from trawl.envs.agents.groups import groups_of
from trawl.envs.frame_stack import FrameStack
from trawl.foreign.torch import is_compiled
from trawl.keys import as_key, show_keys
from trawl.rollout.checks import name_of
from trawl.rollout.policy.random_policy import RandomPolicy
from trawl.rollout.trial import trial


class PolicyKind(NamedTuple):
    """Kind of policies.

    Attributes:
        accepts: function that returns True for a policy of this kind.
        adapt: function of such a policy, the environment, and the stacks that observations become,
            or None. It returns a function of a TensorDict. None if the policy is one already.
    """

    accepts: Callable[[Any], bool]
    adapt: Callable[[Any, Any, FrameStack | None], Any] | None = None


def resolve(policy: Any, env: Any, trust: bool, frame_stack: FrameStack | None = None) -> Any:
    """Returns a function of a TensorDict for a policy, by the rules of TorchRL's collectors.

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
    refuse_class(policy)
    as_it_is = trust and callable(policy)
    adapt = None if as_it_is else next(one.adapt for one in _KINDS if one.accepts(policy))
    return policy if adapt is None else adapt(policy, env, frame_stack)


def refuse_class(policy: Any) -> None:
    """Raises a ``TypeError`` if a policy is a class instead of an object."""
    if isinstance(policy, type):
        arguments = "" if issubclass(policy, RandomPolicy) else "..."
        raise TypeError(
            f"policy must be an object, but it is the class {policy.__name__}: pass an instance, "
            f"{policy.__name__}({arguments})"
        )


def _is_client(policy: Any) -> bool:
    """Returns True for a client of an inference server of TorchRL."""
    return type(policy).__module__.startswith("torchrl.") and hasattr(policy, "submit")


def _refuse_uncallable(policy: Any, *_: Any) -> Any:
    raise TypeError(f"policy must be callable, but it is {type(policy).__name__}: {policy!r}")


def _has_keys(policy: Any) -> bool:
    return hasattr(policy, "in_keys") or hasattr(policy, "out_keys")


def _refuse_keys(policy: Any, *_: Any) -> Any:
    """Raises the error for a policy that has keys, but is no module of tensordict."""
    if hasattr(policy, "in_keys") and hasattr(policy, "out_keys"):
        raise RuntimeError(
            f"policy {name_of(policy)} has in_keys and out_keys, but is not a "
            "TensorDictModuleBase: derive its class from tensordict.nn.TensorDictModuleBase"
        )
    raise TypeError(f"policy {name_of(policy)} must have both in_keys and out_keys, or neither")


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
    """Returns True if a TensorDict is the only parameter, by its annotation or its name."""
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
    """Returns a module for a function of observations.

    The names of its parameters must be observation keys, and its results are the action, followed
    by ``output1``, ``output2``, …
    """
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
    if outputs is None:
        raise TypeError(f"policy {name_of(policy)} must return the action, but it returned None")
    count = len(outputs) if isinstance(outputs, tuple) else 1
    if count < len(actions):
        raise TypeError(
            f"policy {name_of(policy)} returned {count} value(s), but the environment takes "
            f"{len(actions)} actions: {show_keys({as_key(key) for key in actions})}"
        )
    return count - len(actions)


#: The kinds of policies. The first one that accepts a policy adapts it.
_KINDS = [
    PolicyKind(lambda policy: isinstance(policy, (TensorDictModuleBase, RandomPolicy))),
    PolicyKind(is_compiled),
    # Kinds that can't be called, but are adapted, stand before this line.
    PolicyKind(lambda policy: not callable(policy), _refuse_uncallable),
    PolicyKind(_is_client),
    PolicyKind(_has_keys, _refuse_keys),
    PolicyKind(_takes_tensordict),
    PolicyKind(lambda policy: True, _wrap),
]


# --- weights: only modules of torch have any


def module_of(policy: Any) -> nn.Module | None:
    """Returns the policy if it is a module, and None otherwise."""
    return policy if isinstance(policy, nn.Module) else None


def tensors_of(policy: Any) -> list[Tensor]:
    """Returns the parameters and buffers of a policy; an empty list if it is not a module."""
    module = module_of(policy)
    return [] if module is None else [*module.parameters(), *module.buffers()]


def on_device(policy: Any, device: torch.device | None) -> Any:
    """Returns the policy, or a copy of it on ``device`` if the policy is on another device."""
    if device is None or all(tensor.device == device for tensor in tensors_of(policy)):
        return policy
    return copy.deepcopy(policy).to(device)
