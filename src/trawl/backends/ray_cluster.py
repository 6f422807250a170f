"""The Ray cluster that this process is connected to."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

#: What a worker asks of the cluster if the user doesn't say. GPUs are added where there are some.
DEFAULT_REMOTE_CLASS_CONFIG: dict[str, Any] = {"num_cpus": 1, "memory": 2 * 1024**3}
_GPUS = 0.2

#: Arguments of ``ray.init`` for a cluster of this machine alone.
DEFAULT_RAY_INIT_CONFIG: dict[str, Any] = {
    "address": None,
    "include_dashboard": False,
    "dashboard_host": "127.0.0.1",
}
# By these Ray listens to its own machine only, as it does by default on others than Linux.
_REACHABLE = "ENABLE_RAY_CLUSTER"
_REACHABLE_ENV = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"

_NOT_RESOURCES = frozenset({"num_cpus", "num_gpus", "memory", "resources"})


def import_ray() -> Any:
    """The module ``ray``.

    Raises:
        ImportError: naming the extra that installs it.
    """
    if "ray" not in sys.modules:
        # It is read as Ray is imported: without it Ray warns of what it will do differently once.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "Ray is not installed: collectors and replay buffers in a Ray cluster need it. "
            "`pip install 'trawl-rl[ray]'` installs it"
        ) from error
    return ray


def connect(config: Mapping[str, Any] | None = None) -> bool:
    """Connects to a cluster, if this process is not connected: a running one, or one of its own.

    Args:
        config: arguments of ``ray.init``. None: the cluster is joined that ``RAY_ADDRESS`` names,
            or that runs on this machine (by ``ray start``); if there is none, one is started.

    Returns:
        Whether this call connected it.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    with warnings.catch_warnings():
        # Of Ray's own doing.
        warnings.simplefilter("ignore")
        if config is None:
            try:
                ray.init(address="auto")
                return True
            except ConnectionError:
                if "RAY_ADDRESS" in os.environ:
                    raise
        own = dict(DEFAULT_RAY_INIT_CONFIG if config is None else config)
        alone = own.get("address") is None and "RAY_ADDRESS" not in os.environ
        with _at_loopback() if alone else contextlib.nullcontext():
            ray.init(**own)
    return True


@contextlib.contextmanager
def _at_loopback() -> Iterator[None]:
    """A cluster that is started in this context is reached from this machine alone."""
    constants = importlib.import_module("ray._private.ray_constants")
    before = getattr(constants, _REACHABLE, True), os.environ.get(_REACHABLE_ENV)
    setattr(constants, _REACHABLE, False)
    os.environ[_REACHABLE_ENV] = "0"
    try:
        yield
    finally:
        setattr(constants, _REACHABLE, before[0])
        os.environ.pop(_REACHABLE_ENV)
        if before[1] is not None:
            os.environ[_REACHABLE_ENV] = before[1]


def disconnect() -> None:
    """Ends the connection, and the cluster with it if it was started by it."""
    ray = import_ray()
    if ray.is_initialized():
        ray.shutdown()


def with_defaults(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of an actor, completed."""
    own = dict(config or {})
    for name, value in DEFAULT_REMOTE_CLASS_CONFIG.items():
        own.setdefault(name, value)
    if "num_gpus" not in own and import_ray().cluster_resources().get("GPU", 0) > 0:
        own["num_gpus"] = _GPUS
    return own


class Connection:
    """The connection to the cluster, as it is now.

    Raises:
        ImportError: if there is no Ray.
        RuntimeError: if there is no connection.
    """

    def __init__(self) -> None:
        ray = import_ray()
        if not ray.is_initialized():
            raise RuntimeError("there is no connection to a Ray cluster: call ray.init() first")
        self._id = ray.get_runtime_context().get_worker_id()

    @property
    def alive(self) -> bool:
        """Whether it is still there; what is of another one means nothing to Ray."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return False
        return bool(ray.get_runtime_context().get_worker_id() == self._id)

    def check(self) -> None:
        """Raises a ``RuntimeError`` if it is gone."""
        if not self.alive:
            raise RuntimeError("Ray was shut down, or started anew, since this was made")


def requested(options: Mapping[str, Any]) -> dict[str, float]:
    """The resources that an actor asks for, by the names that clusters have for them."""
    own = {
        "CPU": options.get("num_cpus"),
        "GPU": options.get("num_gpus"),
        "memory": options.get("memory"),
        **(options.get("resources") or {}),
    }
    return {name: float(amount) for name, amount in own.items() if amount}


def lacking(options: Mapping[str, Any]) -> str | None:
    """What of an actor's resources no node has to give now, in words; None if one has all."""
    ray = import_ray()
    asked = requested(options)
    free = ray._private.state.available_resources_per_node()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    if any(_covers(free.get(node["NodeID"], {}), asked) for node in nodes):
        return None
    found = []
    for name, amount in asked.items():
        most = max((node["Resources"].get(name, 0.0) for node in nodes), default=0.0)
        left = max((free.get(node["NodeID"], {}).get(name, 0.0) for node in nodes), default=0.0)
        if most < amount:
            found.append(f"{_shown(name, amount)}, but no node has more than {most:g}")
        elif left < amount:
            found.append(f"{_shown(name, amount)}, of which no node has more than {left:g} free")
    if not found:
        found = [", ".join(_shown(name, amount) for name, amount in asked.items()) + " together"]
    return f"it asks for {'; and for '.join(found)}"


def _covers(has: Mapping[str, float], asked: Mapping[str, float]) -> bool:
    return all(has.get(name, 0.0) >= amount for name, amount in asked.items())


def _shown(name: str, amount: float) -> str:
    return f"{name}={amount:g}"
