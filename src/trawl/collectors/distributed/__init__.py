"""Collectors whose workers are on other machines."""

from pkgutil import resolve_name
from typing import Any

from trawl.backends.launching.outside import run_rank
from trawl.backends.launching.submitit import DEFAULT_SLURM_CONF
from trawl.collectors.distributed.process_group import (
    DistributedCollector,
    DistributedSyncCollector,
)
from trawl.collectors.distributed.ray import RayCollector
from trawl.collectors.distributed.rpc import RPCCollector
from trawl.compat.delayed_launcher import submitit_delayed_launcher
from trawl.compat.older_names import lookup as _lookup
from trawl.compat.updaters import DistributedWeightUpdater, RayWeightUpdater, RPCWeightUpdater

__all__ = [
    "DEFAULT_SLURM_CONF",
    "DistributedCollector",
    "DistributedSyncCollector",
    "DistributedWeightUpdater",
    "RPCCollector",
    "RPCWeightUpdater",
    "RayCollector",
    "RayEvalWorker",
    "RayWeightUpdater",
    "run_rank",
    "submitit_delayed_launcher",
]


def __getattr__(name: str) -> Any:
    if name == "RayEvalWorker":  # it evaluates, and collectors do without it
        return resolve_name("trawl.extras.evaluation.ray_worker:RayEvalWorker")
    return _lookup(name, __name__)
