"""Collectors, which run a policy in environments and deliver batches of experience."""

import importlib
from typing import Any

from trawl.collectors.base import BaseCollector
from trawl.collectors.config import CollectorConfig
from trawl.collectors.multi import (
    AsyncCollector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.single import Collector
from trawl.collectors.utils import split_trajectories
from trawl.collectors.watch.profile import ProfileConfig
from trawl.compat.older_names import lookup as _lookup
from trawl.envs.transforms import PolicyVersion
from trawl.rollout.normalization import Normalization, NormalizeObservation, NormalizeReward
from trawl.rollout.policy.random_policy import RandomPolicy

__all__ = [
    "AsyncBatchedCollector",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "CollectorConfig",
    "Comparison",
    "EvaluationResult",
    "Evaluator",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiConfig",
    "MultiProcessedWeightUpdater",
    "MultiSyncCollector",
    "Normalization",
    "NormalizeObservation",
    "NormalizeReward",
    "PolicyVersion",
    "ProfileConfig",
    "RandomPolicy",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "TuneResult",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
    "bootstrap_estimate",
    "paired_comparison",
    "split_trajectories",
    "tune",
]


# Imported on first use: workers import this package too, but don't need these classes.
_LATER = dict.fromkeys(
    (
        "Comparison",
        "EvaluationResult",
        "Evaluator",
        "bootstrap_estimate",
        "paired_comparison",
    ),
    "trawl.extras.evaluation",
)
_LATER |= dict.fromkeys(("TuneResult", "tune"), "trawl.extras.tuning")
_LATER |= dict.fromkeys(
    (
        "MultiProcessedWeightUpdater",
        "RayWeightUpdater",
        "RemoteModuleWeightUpdater",
        "VanillaWeightUpdater",
        "WeightUpdaterBase",
    ),
    "trawl.compat.updaters",
)
_LATER["AsyncBatchedCollector"] = "trawl.collectors.async_batched"


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        return _lookup(name)
    module = importlib.import_module(_LATER[name])
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
