"""The weight-sync schemes, under the module path of TorchRL."""

from trawl.weight_update import *  # noqa: F403
