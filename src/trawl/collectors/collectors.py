"""The collectors, under the same module path as in TorchRL."""

from typing import Any

from tensordict.nn import InteractionType as ExplorationType

from trawl.collectors.base import BaseCollector
from trawl.collectors.legacy import lookup as _lookup
from trawl.collectors.multi import (
    AsyncCollector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from trawl.collectors.single import Collector

DEFAULT_EXPLORATION_TYPE = ExplorationType.RANDOM

__all__ = [
    "DEFAULT_EXPLORATION_TYPE",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
]


def __getattr__(name: str) -> Any:
    return _lookup(name)
