# What type checkers see, and the list of names that are imported when they are first used.

from trawl.backends.launching.outside import run_rank as run_rank
from trawl.backends.launching.submitit import DEFAULT_SLURM_CONF as DEFAULT_SLURM_CONF
from trawl.collectors.distributed.process_group import DistributedCollector as DistributedCollector
from trawl.collectors.distributed.process_group import (
    DistributedSyncCollector as DistributedSyncCollector,
)
from trawl.collectors.distributed.ray import RayCollector as RayCollector
from trawl.collectors.distributed.rpc import RPCCollector as RPCCollector
from trawl.compat.delayed_launcher import submitit_delayed_launcher as submitit_delayed_launcher
from trawl.compat.updaters import DistributedWeightUpdater as DistributedWeightUpdater
from trawl.compat.updaters import RayWeightUpdater as RayWeightUpdater
from trawl.compat.updaters import RPCWeightUpdater as RPCWeightUpdater
from trawl.extras.evaluation.ray_worker import RayEvalWorker as RayEvalWorker

# Older names.
DistributedDataCollector = DistributedCollector
DistributedSyncDataCollector = DistributedSyncCollector
RPCDataCollector = RPCCollector
