"""The collector of a launcher's workers, available at the same module path as in TorchRL."""

from trawl.collectors.distributed.process_group import DistributedCollector
from trawl.compat.updaters import DistributedWeightUpdater

__all__ = ["DistributedCollector", "DistributedWeightUpdater"]
