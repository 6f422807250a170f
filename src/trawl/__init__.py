"""Trawl collects experience for reinforcement learning in PyTorch."""

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from trawl.lean import import_lean

if sys.platform in ("win32", "cygwin"):
    raise ImportError(
        "trawl needs Linux, and does not work on Windows: use it in WSL (the Windows Subsystem for "
        "Linux) or in a container"
    )
if sys.platform != "linux":
    warnings.warn(
        f"trawl is made for Linux: on {sys.platform}, only collectors without workers work "
        "(Collector, and MultiSyncCollector and MultiAsyncCollector with start_method='inline')",
        stacklevel=2,
    )

import_lean()

if TYPE_CHECKING:
    from tensordict.nn import InteractionType as ExplorationType
    from tensordict.nn import set_interaction_type as set_exploration_type
    from tensordict.nn.probabilistic import interaction_type as exploration_type

    from trawl.collectors import (
        AsyncCollector,
        BaseCollector,
        Collector,
        Evaluator,
        MultiAsyncCollector,
        MultiCollector,
        MultiSyncCollector,
        PolicyVersion,
        RandomPolicy,
        split_trajectories,
        tune,
    )
    from trawl.envs import GymEnv, ParallelEnv, SerialEnv

__version__ = "0.1.0"

__all__ = [
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "Evaluator",
    "ExplorationType",
    "GymEnv",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "ParallelEnv",
    "PolicyVersion",
    "RandomPolicy",
    "SerialEnv",
    "exploration_type",
    "set_exploration_type",
    "split_trajectories",
    "tune",
]

# Module and attribute of each public name. The module is imported when the name is first used.
_HOMES = {
    "MultiSyncCollector": ("trawl.collectors", "MultiSyncCollector"),
    "MultiCollector": ("trawl.collectors", "MultiCollector"),
    "MultiAsyncCollector": ("trawl.collectors", "MultiAsyncCollector"),
    "AsyncCollector": ("trawl.collectors", "AsyncCollector"),
    "BaseCollector": ("trawl.collectors", "BaseCollector"),
    "Collector": ("trawl.collectors", "Collector"),
    "Evaluator": ("trawl.collectors", "Evaluator"),
    "ExplorationType": ("tensordict.nn", "InteractionType"),
    "GymEnv": ("trawl.envs", "GymEnv"),
    "ParallelEnv": ("trawl.envs", "ParallelEnv"),
    "PolicyVersion": ("trawl.collectors", "PolicyVersion"),
    "RandomPolicy": ("trawl.collectors", "RandomPolicy"),
    "SerialEnv": ("trawl.envs", "SerialEnv"),
    "exploration_type": ("tensordict.nn.probabilistic", "interaction_type"),
    "set_exploration_type": ("tensordict.nn", "set_interaction_type"),
    "split_trajectories": ("trawl.collectors", "split_trajectories"),
    "tune": ("trawl.collectors", "tune"),
}


# Hidden from type checkers, because with this function they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'trawl' has no attribute {name!r}")
        module, attribute = _HOMES[name]
        value = globals()[name] = getattr(importlib.import_module(module), attribute)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
