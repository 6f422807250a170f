"""The synchronous collector of a launcher's workers, at the same module path as in TorchRL."""

from trawl.collectors.distributed.process_group import DistributedSyncCollector

__all__ = ["DistributedSyncCollector"]
