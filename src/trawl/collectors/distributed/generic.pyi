# What type checkers see, and the list of names that are imported when they are first used.

from trawl.compat.updaters import DistributedWeightUpdater as DistributedWeightUpdater
from trawl.extras.clusters.remote import DistributedCollector as DistributedCollector
