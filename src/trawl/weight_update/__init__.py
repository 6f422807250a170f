"""Public names of schemes, transports and updaters, which stand in ``weights`` and ``compat``."""

from trawl.compat.network_transports import DistributedTransport, RayTransport, RPCTransport
from trawl.compat.transform_scheme import RayModuleTransformScheme
from trawl.compat.transports import InitialSyncTransport, MPTransport, SharedMemTransport
from trawl.compat.updaters import (
    DistributedWeightUpdater,
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    RemoteModuleWeightUpdater,
    RPCWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from trawl.weights.message_schemes import NoWeightSyncScheme, RPCWeightSyncScheme
from trawl.weights.network import DistributedWeightSyncScheme
from trawl.weights.ray import RayWeightSyncScheme
from trawl.weights.scheme import TransportBackend, WeightSyncBackend, WeightSyncScheme
from trawl.weights.shared import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme
from trawl.weights.strategy import WeightStrategy

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
