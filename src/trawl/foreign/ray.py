"""Private names of Ray, which is imported only if a cluster is used."""

from __future__ import annotations

import importlib
from typing import Any

_REACHABLE = "ENABLE_RAY_CLUSTER"


def _module(name: str) -> Any:
    return importlib.import_module(f"ray._private.{name}")


def running_address() -> str | None:
    """Returns the address of the cluster that ``ray start`` has started on this machine, or None.

    ``ray.init`` joins that cluster, and there is no public way to know this beforehand.
    """
    found: str | None = _module("utils").read_ray_address()
    return found


def set_reachable(reachable: bool) -> bool:
    """Sets whether clusters that start later can be reached from other machines.

    If not, Ray listens only on the loopback address, as it does by default on systems other than
    Linux. The environment variable for this is read only when Ray is imported.

    Returns:
        The value that held before.
    """
    constants = _module("ray_constants")
    before: bool = getattr(constants, _REACHABLE, True)
    setattr(constants, _REACHABLE, reachable)
    return before


def free_resources() -> dict[str, dict[str, float]]:
    """Returns the free resources of each node by its id.

    The public ``ray.available_resources`` adds up all nodes.
    """
    found: dict[str, dict[str, float]] = _module("state").available_resources_per_node()
    return found
