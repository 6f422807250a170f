"""Names of TorchRL's API for clusters that nothing else needs, as those in ``trawl.compat``."""
