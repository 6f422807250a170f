"""Objects that an environment consists of: environments, wrappers and transforms."""

from __future__ import annotations

from typing import Any

import gymnasium

from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.foreign import ForeignEnv, is_torchrl, state_of
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
        if isinstance(layer, (ForeignEnv, GymEnv, *WRAPPERS)):
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


def state_parts(env: Any) -> list[Any]:
    """Returns the parts whose states together are the state of an environment.

    Each part has ``state_methods``, ``capture``, ``check_state`` and ``restore``, as in
    :class:`~trawl.envs.base.TensorDictEnv`. The list is empty if the environment is of a library
    whose states can't be captured.
    """
    if isinstance(env, TensorDictEnv):
        return env.parts
    state = state_of(env)
    return [] if state is None else [state]


def _parts(env: Any) -> list[Any]:
    """Returns the objects that a TorchRL environment consists of."""
    from trawl.envs.capture.torchrl import parts_of, simulator_of

    parts = parts_of(env)
    simulators = map(simulator_of, parts)
    return [*parts[1:], *(one for one in simulators if one is not None)]
