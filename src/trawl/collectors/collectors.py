"""The collectors, under the same module path as in TorchRL."""

from typing import Any

from tensordict.nn import InteractionType as ExplorationType

from trawl.collectors.base import BaseCollector
from trawl.collectors.multi import (
    AsyncCollector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)
from trawl.collectors.single import Collector
from trawl.compat.older_names import lookup as _lookup

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
