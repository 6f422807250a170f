"""Support for TorchRL's environments and modules in collectors.

In ``trawl.collectors``, only this module and ``torchrl_transforms`` import TorchRL, and only if the
caller passed one of TorchRL's objects.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from typing import Any

from torch import nn

from trawl.envs import specs
from trawl.foreign.torchrl import lacks_spec, storage_of
from trawl.rollout.policy.random_policy import RandomPolicy


def register_collectors(cls: type[Any]) -> None:
    """Registers collectors as subclasses of TorchRL's ``BaseCollector``, if TorchRL is imported.

    TorchRL's trainers check for this class. A collector made before the import passes the check
    too, once another collector is made after the import.

    Args:
        cls: the base class of Trawl's collectors.
    """
    base = getattr(sys.modules.get("torchrl.collectors"), "BaseCollector", None)
    if isinstance(base, ABCMeta):
        ABCMeta.register(base, cls)


def has_fixed_rows(buffer: Any) -> bool:
    """Returns True if all entries of a replay buffer must have the same shape.

    This applies to TorchRL's storages of tensors, such as ``LazyTensorStorage``.
    """
    kind = getattr(sys.modules.get("torchrl.data"), "TensorStorage", None)
    return kind is not None and isinstance(storage_of(buffer), kind)


def names(spec: Any) -> set[str]:
    """Returns the last part of each key in a spec, including nested keys."""
    return {key if isinstance(key, str) else key[-1] for key in spec.keys(True, True)}


def give_specs(policy: Any, env: Any) -> Any:
    """Gives the environment's action spec to exploration modules and random policies.

    Modules and policies that already have a spec keep it.

    Returns:
        The policy, or a copy of a random policy.
    """
    if isinstance(policy, RandomPolicy):
        policy = policy.with_spec_of(env)
    elif is_random(policy) and policy.action_spec is None:
        policy.action_spec = spec_for(policy, env.full_action_spec.clone())
    for module in policy.modules() if isinstance(policy, nn.Module) else ():
        if lacks_spec(module):
            module.spec = spec_for(module, env.action_spec_unbatched)
    return policy


def is_random(policy: Any) -> bool:
    """Returns True for a random policy of Trawl or TorchRL."""
    return hasattr(policy, "set_action_spec_from_env") and not isinstance(policy, type)


def spec_for(user: Any, spec: Any) -> Any:
    """Returns ``spec`` in a form that ``user`` can read: TorchRL's objects need TorchRL's specs."""
    own = isinstance(spec, (specs.Spec, specs.Composite))
    foreign = any(cls.__module__.startswith("torchrl.") for cls in type(user).__mro__)
    return torchrl_spec(spec) if own and foreign else spec


def torchrl_spec(spec: specs.Spec | specs.Composite) -> Any:
    """Converts a spec of Trawl to the equivalent spec of TorchRL.

    Raises:
        TypeError: if TorchRL has no equivalent, for example for data without a fixed layout.
    """
    from torchrl import data

    if isinstance(spec, specs.Composite):
        children = {name: torchrl_spec(child) for name, child in spec.items()}
        return data.Composite(children, shape=spec.shape)
    place = {"shape": spec.shape, "dtype": spec.dtype, "device": spec.device}
    if isinstance(spec, specs.Bounded):
        low, high = (bound.expand(spec.shape) for bound in (spec.low, spec.high))
        return data.Bounded(low, high, **place)
    if isinstance(spec, specs.OneHot):
        return data.OneHot(spec.n, **place)
    if isinstance(spec, specs.MultiOneHot):
        return data.MultiOneHot(spec.nvec, **place)
    if isinstance(spec, specs.Categorical):
        return data.Categorical(spec.n, **place)
    if isinstance(spec, specs.MultiCategorical):
        return data.MultiCategorical(spec.nvec, **place)
    if isinstance(spec, specs.Binary):
        return data.Binary(spec.shape[-1], **place)
    if isinstance(spec, specs.Unbounded):
        return data.Unbounded(**place)
    raise TypeError(f"TorchRL has no spec for {spec}")
