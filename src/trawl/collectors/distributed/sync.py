"""The synchronous collector over process groups, under the module path of TorchRL."""

from trawl.collectors.distributed.process_group import DistributedSyncCollector

__all__ = ["DistributedSyncCollector"]
