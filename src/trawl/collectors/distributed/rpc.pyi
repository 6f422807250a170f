# What type checkers see, and the list of names that are imported when they are first used.

from trawl.compat.updaters import RPCWeightUpdater as RPCWeightUpdater
from trawl.extras.clusters.remote import RPCCollector as RPCCollector
from trawl.extras.clusters.remote import RPCOptions as RPCOptions
