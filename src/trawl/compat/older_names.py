"""Older names of the collectors; each warns when it is first used."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

# For each public module: the module of each class, and the class, by the older name.
OLDER_NAMES = {
    "trawl.collectors": {
        "SyncDataCollector": ("single", "Collector"),
        "MultiSyncDataCollector": ("multi", "MultiSyncCollector"),
        "MultiaSyncDataCollector": ("multi", "MultiAsyncCollector"),
        "aSyncDataCollector": ("multi", "AsyncCollector"),
        "DataCollectorBase": ("base", "BaseCollector"),
    },
    "trawl.collectors.distributed": {
        "DistributedDataCollector": ("process_group", "DistributedCollector"),
        "DistributedSyncDataCollector": ("process_group", "DistributedSyncCollector"),
        "RPCDataCollector": ("rpc", "RPCCollector"),
    },
}
_warned: set[str] = set()


def lookup(name: str, module: str = "trawl.collectors") -> type[Any]:
    """Returns the class that an older name stands for.

    Args:
        name: the older name.
        module: name of the module in which the older name was looked up.

    Raises:
        AttributeError: if ``name`` is not an older name of a collector.
    """
    if name not in OLDER_NAMES[module]:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    home, new = OLDER_NAMES[module][name]
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} is an older name of {new}: use the new name", DeprecationWarning, stacklevel=3
        )
    found: type[Any] = getattr(importlib.import_module(f"{module}.{home}"), new)
    return found
