# What type checkers see, and the list of names that are imported when they are first used.

from trawl.compat.transports import InitialSyncTransport as InitialSyncTransport
from trawl.compat.transports import MPTransport as MPTransport
from trawl.compat.transports import SharedMemTransport as SharedMemTransport
from trawl.compat.updaters import DistributedWeightUpdater as DistributedWeightUpdater
from trawl.compat.updaters import MultiProcessedWeightUpdater as MultiProcessedWeightUpdater
from trawl.compat.updaters import RayWeightUpdater as RayWeightUpdater
from trawl.compat.updaters import RemoteModuleWeightUpdater as RemoteModuleWeightUpdater
from trawl.compat.updaters import RPCWeightUpdater as RPCWeightUpdater
from trawl.compat.updaters import VanillaWeightUpdater as VanillaWeightUpdater
from trawl.compat.updaters import WeightUpdaterBase as WeightUpdaterBase
from trawl.extras.clusters.compat.network_transports import (
    DistributedTransport as DistributedTransport,
)
from trawl.extras.clusters.compat.network_transports import RayTransport as RayTransport
from trawl.extras.clusters.compat.network_transports import RPCTransport as RPCTransport
from trawl.extras.clusters.compat.transform_scheme import (
    RayModuleTransformScheme as RayModuleTransformScheme,
)
from trawl.extras.clusters.network.weights import (
    DistributedWeightSyncScheme as DistributedWeightSyncScheme,
)
from trawl.extras.clusters.ray.weights import RayWeightSyncScheme as RayWeightSyncScheme
from trawl.weights.message_schemes import NoWeightSyncScheme as NoWeightSyncScheme
from trawl.weights.message_schemes import RPCWeightSyncScheme as RPCWeightSyncScheme
from trawl.weights.scheme import TransportBackend as TransportBackend
from trawl.weights.scheme import WeightSyncBackend as WeightSyncBackend
from trawl.weights.scheme import WeightSyncScheme as WeightSyncScheme
from trawl.weights.shared import MultiProcessWeightSyncScheme as MultiProcessWeightSyncScheme
from trawl.weights.shared import SharedMemWeightSyncScheme as SharedMemWeightSyncScheme
from trawl.weights.strategy import WeightStrategy as WeightStrategy
