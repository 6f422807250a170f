"""Objects that an environment consists of: environments, wrappers and transforms."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium

from trawl.envs.base import TensorDictEnv
from trawl.envs.gym import GymEnv

WRAPPERS = (gymnasium.Wrapper, gymnasium.vector.VectorWrapper)


def layers_of(env: Any) -> list[Any]:
    """Returns an environment, and the wrappers, transforms and environments that it consists of.

    Those in other processes are left out, and those that an environment has not made yet.
    """
    found: list[Any] = []
    waiting = [env]
    while waiting:
        layer = waiting.pop()
        if any(layer is other for other in found):
            continue
        found.append(layer)
        if isinstance(layer, TensorDictEnv):
            waiting += layer.parts
        if isinstance(layer, (GymEnv, *WRAPPERS)):
            waiting.append(layer.env)
        elif isinstance(layer, gymnasium.vector.SyncVectorEnv):
            waiting += layer.envs
        elif is_torchrl(layer):
            waiting += _parts(layer)
    return found


def owns_parts(layer: Any) -> bool:
    """Returns True for a layer that makes and ends environments, or processes with them."""
    if isinstance(layer, TensorDictEnv):
        return layer.has_processes
    return is_torchrl(layer) and hasattr(type(layer), "start")


def is_torchrl(env: Any) -> bool:
    """Returns True for an environment of TorchRL."""
    base = getattr(sys.modules.get("torchrl.envs"), "EnvBase", None)
    return base is not None and isinstance(env, base)


def state_parts(env: Any) -> list[Any]:
    """Returns the parts whose states together are the state of an environment.

    Each part has ``state_methods``, ``capture``, ``check_state`` and ``restore``, as in
    :class:`~trawl.envs.base.TensorDictEnv`. The list is empty if the state can't be captured.
    """
    found = env.parts if isinstance(env, TensorDictEnv) else [env]
    parts = [_torchrl_state(part) if is_torchrl(part) else part for part in found]
    # Looked up in the class, because wrappers of other libraries pass on names they do not know.
    return parts if all(hasattr(type(part), "capture") for part in parts) else []


def _torchrl_state(env: Any) -> Any:
    from trawl.envs.capture.torchrl import TorchRLState

    return TorchRLState(env)


def _parts(env: Any) -> list[Any]:
    """Returns the objects that a TorchRL environment consists of."""
    from trawl.envs.capture.torchrl import parts_of, simulator_of

    parts = parts_of(env)
    simulators = map(simulator_of, parts)
    return [*parts[1:], *(one for one in simulators if one is not None)]
