"""Older names of the collectors; each warns when it is first used."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from trawl.collectors.base import BaseCollector
from trawl.collectors.multi import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from trawl.collectors.single import Collector

ALIASES: dict[str, type[Any]] = {
    "SyncDataCollector": Collector,
    "MultiSyncDataCollector": MultiSyncCollector,
    "MultiaSyncDataCollector": MultiAsyncCollector,
    "aSyncDataCollector": AsyncCollector,
    "DataCollectorBase": BaseCollector,
}
_warned: set[str] = set()


def lookup(
    name: str, aliases: Mapping[str, type[Any]] = ALIASES, module: str = "trawl.collectors"
) -> type[Any]:
    """Returns the class that an older name stands for.

    Args:
        name: the older name.
        aliases: mapping from older names to classes.
        module: name of the module in which the older name was looked up.

    Raises:
        AttributeError: if ``name`` is not an older name of a collector.
    """
    if name not in aliases:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    target = aliases[name]
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} is an older name of {target.__name__}: use the new name",
            DeprecationWarning,
            stacklevel=3,
        )
    return target
