"""Collectors: from an environment and a policy to batches of experience."""

from typing import Any

from trawl.collectors.base import BaseCollector
from trawl.collectors.config import CollectorConfig
from trawl.collectors.legacy import lookup as _lookup
from trawl.collectors.multi import (
    AsyncCollector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.policy_version import PolicyVersion
from trawl.collectors.profile import ProfileConfig
from trawl.collectors.single import Collector
from trawl.collectors.utils import split_trajectories
from trawl.rollout.random_policy import RandomPolicy
from trawl.weight_update import (
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

__all__ = [
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "CollectorConfig",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiConfig",
    "MultiProcessedWeightUpdater",
    "MultiSyncCollector",
    "PolicyVersion",
    "ProfileConfig",
    "RandomPolicy",
    "RayWeightUpdater",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
    "split_trajectories",
]


def __getattr__(name: str) -> Any:
    return _lookup(name)
