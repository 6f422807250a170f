"""The collectors, under the same module path as in TorchRL."""

from tensordict.nn import InteractionType

from trawl import collectors
from trawl.collectors import (
    AsyncCollector,
    BaseCollector,
    Collector,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
)

DEFAULT_EXPLORATION_TYPE = InteractionType.RANDOM

__all__ = [
    "DEFAULT_EXPLORATION_TYPE",
    "AsyncCollector",
    "BaseCollector",
    "Collector",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
]

# Older names, too.
__getattr__ = collectors.__getattr__
