"""Schemes, transports and updaters that send weights from a learner to policies that collect."""

from trawl.weight_update.distributed_transport import DistributedTransport
from trawl.weight_update.process_group import (
    DistributedWeightSyncScheme,
    DistributedWeightUpdater,
)
from trawl.weight_update.ray import RayTransport, RayWeightSyncScheme
from trawl.weight_update.ray_module import RayModuleTransformScheme
from trawl.weight_update.ray_updater import RayWeightUpdater
from trawl.weight_update.rpc import RPCWeightSyncScheme, RPCWeightUpdater
from trawl.weight_update.rpc_transport import RPCTransport
from trawl.weight_update.scheme import WeightSyncScheme
from trawl.weight_update.schemes import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from trawl.weight_update.shared_transport import SharedMemTransport
from trawl.weight_update.strategy import WeightStrategy
from trawl.weight_update.transports import (
    InitialSyncTransport,
    MPTransport,
    TransportBackend,
    WeightSyncBackend,
)
from trawl.weight_update.updaters import (
    MultiProcessedWeightUpdater,
    RemoteModuleWeightUpdater,
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
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "DistributedWeightUpdater",
    "InitialSyncTransport",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedWeightUpdater",
    "NoWeightSyncScheme",
    "RPCTransport",
    "RPCWeightSyncScheme",
    "RPCWeightUpdater",
    "RayModuleTransformScheme",
    "RayTransport",
    "RayWeightSyncScheme",
    "RayWeightUpdater",
    "RemoteModuleWeightUpdater",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "VanillaWeightUpdater",
    "WeightStrategy",
    "WeightSyncBackend",
    "WeightSyncScheme",
    "WeightUpdaterBase",
]
