"""How weights come from a learner to the policies that collect."""

from trawl.weight_update.scheme import WeightSyncScheme
from trawl.weight_update.schemes import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from trawl.weight_update.strategy import WeightStrategy
from trawl.weight_update.transports import MPTransport, SharedMemTransport, TransportBackend
from trawl.weight_update.updaters import (
    MultiProcessedWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

BACKENDS = {
    "none": NoWeightSyncScheme,
    "direct": NoWeightSyncScheme,
    "shared": SharedMemWeightSyncScheme,
    "thread": SharedMemWeightSyncScheme,
    "process": MultiProcessWeightSyncScheme,
    "multiprocessing": MultiProcessWeightSyncScheme,
}

__all__ = [
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedWeightUpdater",
    "NoWeightSyncScheme",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "VanillaWeightUpdater",
    "WeightStrategy",
    "WeightSyncScheme",
    "WeightUpdaterBase",
]
