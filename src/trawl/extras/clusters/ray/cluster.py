"""Connection of this process to a Ray cluster, and the resources of the cluster."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from trawl.foreign import ray as foreign

#: Default resources of a worker. GPUs are added if the cluster has any.
DEFAULT_REMOTE_CLASS_CONFIG: dict[str, Any] = {"num_cpus": 1, "memory": 2 * 1024**3}
_GPUS = 0.2

#: Arguments of ``ray.init`` for a cluster on this machine alone.
DEFAULT_RAY_INIT_CONFIG: dict[str, Any] = {
    "address": None,
    "include_dashboard": False,
    "dashboard_host": "127.0.0.1",
}
# Environment variable of Ray, which must agree with `foreign.set_reachable`.
_REACHABLE_ENV = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Environment variable of Ray. The threads that export the metrics of a process may crash it.
_METRICS_ENV = "RAY_enable_metrics_collection"

# Attempts to start a node. Ray allows 30 seconds for each, which is too short on a busy machine.
_STARTS = 4
# Seconds within which the head of a cluster must answer if its address is given.
_ANSWERING = 10.0
# Id of the connection that `connect` made.
_made: str | None = None

# If the cluster had room for an actor at once, the patience is multiplied by this factor, because
# the actor's dependencies may have to be installed first.
_STARTING = 10.0


def import_ray() -> Any:
    """Returns the module ``ray``.

    Raises:
        ImportError: if Ray is not installed. The error names the extra that installs Ray.
    """
    if "ray" not in sys.modules:
        # Ray reads this variable on import. Without it, Ray warns of a future change of behavior.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            "Ray is not installed, but collectors and replay buffers in a Ray cluster need it: "
            "pip install 'trawl-rl[ray]'"
        ) from error
    return ray


def connect(config: Mapping[str, Any] | None = None) -> bool:
    """Connects to a running cluster or starts one, if this process is not connected already.

    Args:
        config: arguments of ``ray.init``. Without an address in them, this process joins the
            cluster that ``RAY_ADDRESS`` names, or that ``ray start`` has started on this machine.
            If neither exists, this process starts a cluster. It does not join a cluster that
            another program started for itself.

    Returns:
        True if this call made the connection.

    Raises:
        TypeError: if ``config`` is not a mapping.
        ConnectionError: if no cluster answers at the address in ``config``.
        ValueError: if this process is connected to a cluster at another address.
    """
    global _made
    ray = import_ray()
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(
            "ray_init_config must be a mapping of arguments of ray.init, such as {'address': "
            f"'auto'}}, but it is {config!r}"
        )
    own = dict(config or {})
    address = own.get("address")
    if ray.is_initialized():
        _check_same(ray, address)
        return False
    joins = _joins(address)
    if joins:
        _check_there(address)
    else:
        own = {**DEFAULT_RAY_INIT_CONFIG, **own}
    with warnings.catch_warnings():
        # Ray's own code causes warnings.
        warnings.simplefilter("ignore")
        with contextlib.nullcontext() if joins else _own_cluster():
            in_lasting_thread(lambda: _initialize(ray, own))
    _made = ray.get_runtime_context().get_worker_id()
    return True


def in_lasting_thread(function: Callable[[], None]) -> None:
    """Calls a function in the main thread, or in a thread that lives as long as this process.

    The kernel ends a cluster together with the thread that started it.
    """
    if threading.current_thread() is threading.main_thread():
        function()
        return
    done: Future[None] = Future()
    _tasks().put((function, done))
    try:
        done.result()
    finally:
        # An error refers to this frame, so this frame must not keep the error.
        del done


@functools.cache
def _tasks() -> SimpleQueue[tuple[Callable[[], None], Future[None]]]:
    tasks: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
    threading.Thread(target=_carry_out, args=(tasks,), name="trawl-ray", daemon=True).start()
    return tasks


# A forked child does not have the thread.
os.register_at_fork(after_in_child=_tasks.cache_clear)


def _carry_out(tasks: SimpleQueue[tuple[Callable[[], None], Future[None]]]) -> None:
    while True:
        function, done = tasks.get()
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)
        # An error refers to its caller's frames, which must not be kept alive until the next task.
        del function, done


def _initialize(ray: Any, config: Mapping[str, Any]) -> None:
    for left in reversed(range(_STARTS)):
        try:
            ray.init(**config)
            return
        except Exception as error:
            if not left or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


def _named(address: str | None) -> tuple[str, int] | None:
    """Returns the host and the port in an address, or None if the address lacks them."""
    host, _, port = (address or "").rpartition(":")
    return (host, int(port)) if host and port.isdigit() and "/" not in host else None


def _check_there(address: str | None) -> None:
    named = _named(address)
    if named is None:
        return
    try:
        socket.create_connection(named, _ANSWERING).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster answers at {address!r}, the address in ray_init_config: "
            f"{error.strerror or error}"
        ) from None


def _check_same(ray: Any, address: str | None) -> None:
    here = ray.get_runtime_context().gcs_address
    if _named(address) not in (None, _named(here)):
        raise ValueError(
            f"ray_init_config has the address {address!r}, but this process is already connected "
            f"to the cluster at {here!r}: leave the address out, or call ray.shutdown() first"
        )


def _joins(address: str | None) -> bool:
    """Returns True if ``ray.init`` would join a running cluster when it gets this address."""
    if address in (None, "auto"):
        address = os.environ.get("RAY_ADDRESS") or foreign.running_address()
    return address not in (None, "", "local")


@contextlib.contextmanager
def _own_cluster() -> Iterator[None]:
    """Context in which a new cluster can be reached only from this machine, without metrics."""
    reachable = foreign.set_reachable(False)
    before = {name: os.environ.get(name) for name in (_REACHABLE_ENV, _METRICS_ENV)}
    os.environ[_REACHABLE_ENV] = "0"
    os.environ.setdefault(_METRICS_ENV, "0")
    try:
        yield
    finally:
        foreign.set_reachable(reachable)
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def disconnect() -> None:
    """Ends the connection if :func:`connect` made it.

    If :func:`connect` also started the cluster, this ends the cluster, too.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    if ray.get_runtime_context().get_worker_id() == _made:
        ray.shutdown()


def end_connection() -> None:
    """Ends the connection of this process to Ray, if there is one, regardless of who made it."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


def with_defaults(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the options of an actor, with defaults for missing ones."""
    own = dict(config or {})
    for name, value in DEFAULT_REMOTE_CLASS_CONFIG.items():
        own.setdefault(name, value)
    if "num_gpus" not in own and import_ray().cluster_resources().get("GPU", 0) > 0:
        own["num_gpus"] = _GPUS
    return own


class Connection:
    """Connection that this process has to a cluster when the object is made.

    Raises:
        ImportError: if Ray is not installed.
        RuntimeError: if there is no connection.
    """

    def __init__(self) -> None:
        ray = import_ray()
        if not ray.is_initialized():
            raise RuntimeError(
                "this process is not connected to a Ray cluster: call ray.init() first"
            )
        self._id = ray.get_runtime_context().get_worker_id()

    @property
    def alive(self) -> bool:
        """True if the connection still exists. Handles don't outlive their connection."""
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return False
        return bool(ray.get_runtime_context().get_worker_id() == self._id)

    def check(self) -> None:
        """Raises a ``RuntimeError`` if the connection is gone."""
        if not self.alive:
            raise RuntimeError(
                "Ray was shut down or restarted since this object was made: make another one"
            )


def requested(options: Mapping[str, Any]) -> dict[str, float]:
    """Returns the resources that an actor requests, under the names that clusters use."""
    own = {
        "CPU": options.get("num_cpus"),
        "GPU": options.get("num_gpus"),
        "memory": options.get("memory"),
        **(options.get("resources") or {}),
    }
    return {name: float(amount) for name, amount in own.items() if amount}


class Placement:
    """Monitors an actor that waits for a place in the cluster.

    This object must be made before the actor is requested, because it checks at once whether there
    is room. After the request, the actor's resources no longer count as free, although the actor
    may take long to start.

    Args:
        options: options of the actor.
        patience: seconds that the actor may wait for room; None for no limit.
        before: options of other actors that were requested and are not known to have started.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        patience: float | None,
        before: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._options = options
        self._had_room = lacking(options, before) is None
        self.patience = patience
        if patience is not None and self._had_room:
            self.patience = patience * _STARTING
        self.begun = time.monotonic()

    @property
    def late(self) -> float | None:
        """Time at which to check on the actor if it has not started; None for never."""
        return None if self.patience is None else self.begun + self.patience

    def check(self, who: str) -> None:
        """Checks whether the actor may continue to wait; if so, restarts the wait.

        Raises:
            RuntimeError: if the cluster has no place for the actor. The error names the missing
                resources.
        """
        what = lacking(self._options)
        if what is None:
            # There is room now, and the actor may be about to start.
            self.begun = time.monotonic()
            return
        how = "has not started" if self._had_room else "could not be placed in the Ray cluster"
        raise RuntimeError(
            f"{who} {how} within {self.patience:g} s: {what}. Ask for less in its options "
            "(remote_configs, remote_config or ray_kwargs), or add resources to the cluster"
        )


def lacking(options: Mapping[str, Any], before: Iterable[Mapping[str, Any]] = ()) -> str | None:
    """Describes why no node has room for an actor; None if a node has room.

    Args:
        options: options of the actor.
        before: options of other actors, which get their resources first.
    """
    ray = import_ray()
    asked = requested(options)
    known = foreign.free_resources()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    # A node that has just joined has not reported its free resources yet.
    free = {node["NodeID"]: dict(known.get(node["NodeID"]) or node["Resources"]) for node in nodes}
    for other in before:
        _reserve(free, requested(other))
    if any(_covers(left, asked) for left in free.values()):
        return None
    found = []
    for name, amount in asked.items():
        most = max((node["Resources"].get(name, 0.0) for node in nodes), default=0.0)
        left = max((free.get(node["NodeID"], {}).get(name, 0.0) for node in nodes), default=0.0)
        if most < amount:
            found.append(f"{_shown(name, amount)}, but no node has more than {most:g}")
        elif left < amount:
            found.append(f"{_shown(name, amount)}, but no node has more than {left:g} free")
    if not found:
        every = ", ".join(_shown(name, amount) for name, amount in asked.items())
        found = [f"{every} together, but no node has all of them free"]
    return f"it asks for {'; and for '.join(found)}"


def _reserve(free: Mapping[str, dict[str, float]], asked: Mapping[str, float]) -> None:
    """Subtracts resources from the first node that has all of them."""
    for left in free.values():
        if _covers(left, asked):
            for name, amount in asked.items():
                left[name] -= amount
            return


def _covers(has: Mapping[str, float], asked: Mapping[str, float]) -> bool:
    return all(has.get(name, 0.0) >= amount for name, amount in asked.items())


def _shown(name: str, amount: float) -> str:
    return f"{name}={amount:g}"
