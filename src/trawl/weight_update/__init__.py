"""How weights come from a learner to the policies that collect."""

from trawl.weight_update.process_group import (
    DistributedWeightSyncScheme,
    DistributedWeightUpdater,
)
from trawl.weight_update.ray import RayWeightSyncScheme, RayWeightUpdater
from trawl.weight_update.rpc import RPCWeightSyncScheme, RPCWeightUpdater
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
    "ray": RayWeightSyncScheme,
    "distributed": DistributedWeightSyncScheme,
    "rpc": RPCWeightSyncScheme,
}

__all__ = [
    "DistributedWeightSyncScheme",
    "DistributedWeightUpdater",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedWeightUpdater",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RPCWeightUpdater",
    "RayWeightSyncScheme",
    "RayWeightUpdater",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "VanillaWeightUpdater",
    "WeightStrategy",
    "WeightSyncScheme",
    "WeightUpdaterBase",
]
