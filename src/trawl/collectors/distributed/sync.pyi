# What type checkers see, and the list of names that are imported when they are first used.

from trawl.extras.clusters.process_group import DistributedSyncCollector as DistributedSyncCollector
