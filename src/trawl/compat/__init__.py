"""Names of TorchRL's API that need nothing else: thin layers over the real machinery.

Weight updaters, transports of weights and older names of classes do nothing that Trawl couldn't do
without them. No other module needs this package: a module outside it imports a name from here only
to list the name in its ``__all__``, as ``trawl.weight_update`` does. Where a public method returns
an object of this package, as ``WeightSyncScheme.create_transport`` does, the class is looked up by
name when the method is called. Older names stand in the stubs of the public modules
(:mod:`trawl.lazy`), and those for clusters alone in :mod:`trawl.extras.clusters.compat`.

Private names of other libraries lie in :mod:`trawl.foreign`, below all other modules.
"""
