"""A Ray cluster of this machine alone, started and ended by the process that measures with it."""

from __future__ import annotations

import os
import sys
from typing import Any

MIB = 2**20
STORE_MIB = 1536
# Ray only counts what actors say that they need: here they may say anything.
ENOUGH = 2**40


def start(cpus: int) -> Any:
    """Starts a cluster, whose processes find the benchmarks' modules, and connects to it."""
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.pop("RAY_ADDRESS", None)
    # What others do with this machine's memory is no reason to kill actors.
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112 - that is its name
    from trawl.extras.clusters.ray.cluster import DEFAULT_RAY_INIT_CONFIG, connect, import_ray

    own = {
        **DEFAULT_RAY_INIT_CONFIG,
        "num_cpus": cpus,
        "object_store_memory": STORE_MIB * MIB,
        "_memory": ENOUGH,
        "log_to_driver": False,
    }
    ray = import_ray()
    if not connect(own):
        raise RuntimeError("this process is connected to a Ray cluster already")
    return ray


def end() -> None:
    """Ends it."""
    from trawl.extras.clusters.ray.cluster import disconnect

    disconnect()
