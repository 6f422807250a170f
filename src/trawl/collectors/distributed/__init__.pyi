# What type checkers see, and the list of names that are imported when they are first used.

from trawl.compat.updaters import DistributedWeightUpdater as DistributedWeightUpdater
from trawl.compat.updaters import RayWeightUpdater as RayWeightUpdater
from trawl.compat.updaters import RPCWeightUpdater as RPCWeightUpdater
from trawl.extras.clusters.compat.delayed_launcher import (
    submitit_delayed_launcher as submitit_delayed_launcher,
)
from trawl.extras.clusters.launching.outside import run_rank as run_rank
from trawl.extras.clusters.launching.submitit import DEFAULT_SLURM_CONF as DEFAULT_SLURM_CONF
from trawl.extras.clusters.ray.collector import RayCollector as RayCollector
from trawl.extras.clusters.ray.eval_worker import RayEvalWorker as RayEvalWorker
from trawl.extras.clusters.remote import DistributedCollector as DistributedCollector
from trawl.extras.clusters.remote import (
    DistributedSyncCollector as DistributedSyncCollector,
)
from trawl.extras.clusters.remote import RPCCollector as RPCCollector

# Older names.
DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector
RPCDataCollector = RPCCollector
