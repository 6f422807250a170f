"""The collector over process groups, under the module path of TorchRL."""

from trawl.collectors.distributed.process_group import DistributedCollector
from trawl.weight_update.updaters import DistributedWeightUpdater

__all__ = ["DistributedCollector", "DistributedWeightUpdater"]
