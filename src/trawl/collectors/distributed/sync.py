"""The synchronous collector over process groups, at the same module path as in TorchRL."""

from trawl.collectors.distributed.process_group import DistributedSyncCollector

__all__ = ["DistributedSyncCollector"]
