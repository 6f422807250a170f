"""Schemes, transports and updaters that send weights from a learner to policies that collect."""

from trawl.weight_update.framework_transports import DistributedTransport, RPCTransport
from trawl.weight_update.messages import NoWeightSyncScheme, RPCWeightSyncScheme
from trawl.weight_update.process_group import DistributedWeightSyncScheme
from trawl.weight_update.ray import RayModuleTransformScheme, RayTransport, RayWeightSyncScheme
from trawl.weight_update.ray_updater import RayWeightUpdater
from trawl.weight_update.scheme import WeightSyncScheme
from trawl.weight_update.shared import (
    MultiProcessWeightSyncScheme,
    SharedMemTransport,
    SharedMemWeightSyncScheme,
)
from trawl.weight_update.strategy import WeightStrategy
from trawl.weight_update.transports import (
    InitialSyncTransport,
    MPTransport,
    TransportBackend,
    WeightSyncBackend,
)
from trawl.weight_update.updaters import (
    DistributedWeightUpdater,
    MultiProcessedWeightUpdater,
    RemoteModuleWeightUpdater,
    RPCWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)

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
