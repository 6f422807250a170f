# What type checkers see, and the list of names that are imported when they are first used.

from trawl.extras.clusters.remote import DistributedSyncCollector as DistributedSyncCollector
