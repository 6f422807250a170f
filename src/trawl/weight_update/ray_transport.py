"""Transport of weights to an actor of the user's own in a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from trawl.backends.ray_cluster import import_ray
from trawl.weight_update.ray import RayWeightSyncScheme
from trawl.weight_update.store import Version, WeightUpdate
from trawl.weight_update.strategy import WeightStrategy, in_form
from trawl.weight_update.tensors import Weights, weights_of
from trawl.weight_update.transports import Transport

# Number of receivers that may wait for their senders at one registry at the same time.
_WAITING = 1000


class RayTransport(Transport):
    """Sends weights to an actor of a Ray cluster.

    If the actor has a method ``update_policy_weights_``, as collectors have, the transport calls
    this method with the weights. Any other actor makes a transport of its own, with the same
    ``connection_info_name``, ``worker_idx`` and ``model_id``, and calls ``receive_weights``.

    Args:
        remote_actor: handle of the actor, on the sender's side.
        worker_idx: number of the receiver; 0 by default.
        backend: ``"gloo"`` sends weights by a process group of the two, ``"object_store"`` by Ray's
            store.
        connection_info_name: name of the actor by which sender and receiver find each other.
        model_id: name of the model that the weights belong to.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: for another ``backend``.

    Example:
        >>> from trawl.weight_update import RayTransport
        >>> def learner(actor, weights):
        ...     RayTransport(remote_actor=actor, worker_idx=0).send_weights(weights)
        >>> def actor(policy):
        ...     RayTransport(worker_idx=0).receive_weights(timeout=10, model=policy)
    """

    def __init__(
        self,
        *,
        remote_actor: Any = None,
        worker_idx: int | None = None,
        backend: str = "gloo",
        connection_info_name: str = "connection_info",
        model_id: str | None = None,
    ) -> None:
        import_ray()
        self.remote_actor = remote_actor
        self.worker_idx = worker_idx or 0
        self.backend = backend
        self.connection_info_name = connection_info_name
        self.model_id = model_id
        #: Version of the weights that were received last; None if they had none.
        self.model_version: Version = None
        self._scheme = RayWeightSyncScheme(backend=backend)
        self._next_version: Version = None
        self._call: Any = None
        self._registry: Any = None

    @property
    def _key(self) -> tuple[str | None, int]:
        return self.model_id, self.worker_idx

    def _found_registry(self) -> Any:
        if self._registry is None:
            options = {"num_cpus": 0, "max_concurrency": _WAITING, "get_if_exists": True}
            remote = import_ray().remote(_Registry)
            self._registry = remote.options(name=self.connection_info_name, **options).remote()
        return self._registry

    # --- the sender

    def set_model_version(self, model_version: Version) -> None:
        """Sets the version that is sent with the next weights."""
        self._next_version = model_version

    @override
    def send_weights_async(self, weights: Any) -> None:
        """Sends weights, in any form; :meth:`wait_ack` waits until the actor has received them."""
        if hasattr(self.remote_actor, "update_policy_weights_"):
            sent = import_ray().put(in_form(weights_of(weights), "tensordict"))
            self._call = self.remote_actor.update_policy_weights_.remote(sent)
            return
        scheme = self._scheme
        if not scheme.initialized_on_sender:
            first = in_form(weights_of(weights), "tensordict")
            scheme.init_on_sender(model_id=self.model_id or "policy", weights=first, num_workers=1)
            import_ray().get(self._found_registry().put.remote(self._key, scheme))
            scheme.connect()
        version, self._next_version = self._next_version, None
        scheme.commit(scheme.prepare(weights, [0]), version)

    @override
    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits until the actor has received the last weights.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            RuntimeError: if nothing was sent.
            TimeoutError: if the actor does not receive them in time.
            ConnectionError: if the receiver has ended.
            Exception: any error that the actor's ``update_policy_weights_`` raises.
        """
        if self._call is not None:
            ready, _ = import_ray().wait([self._call], timeout=timeout)
            if not ready:
                raise TimeoutError(f"the actor took no weights within {timeout:.3g} s")
            call, self._call = self._call, None
            import_ray().get(call)
        elif self._scheme.synchronized_on_sender:
            self._scheme.wait_async(timeout)
        else:
            raise RuntimeError("wait_ack() before send_weights_async()")

    # --- the receiver

    def set_model(self, model: Any) -> None:
        """Sets the module that weights are loaded into, if a call names no other."""
        self._model = model

    @override
    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        strategy: WeightStrategy | None = None,
        model: Any = None,
        weights: Any = None,
    ) -> Any:
        """Waits for the sender, then receives and returns the first weights.

        Args:
            worker_idx: number of the receiver.
            strategy: determines how weights are loaded, and in which form they are returned.
            model: a module to load the weights into.
            weights: tensors to copy the weights into.
        """
        self.worker_idx = worker_idx
        return self.receive_weights(weights=weights, model=model, strategy=strategy)

    @override
    def _receive(self, timeout: float | None, use: Callable[[Weights], None]) -> None:
        if not self._scheme.initialized_on_receiver:
            found = import_ray().get(self._found_registry().get.remote(self._key, timeout))
            if found is None:
                return
            self._scheme = found
            found.init_on_receiver(model_id=self.model_id or "policy", worker_idx=0)
            found.connect()
        inbox = self._scheme.receiver_transport
        if not inbox.wait(timeout):
            return

        def note(update: WeightUpdate) -> None:
            self.model_version = update.version
            use(update.copy())

        inbox.receive(note)


class _Registry:
    """Actor from which each receiver gets its end of a scheme."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str | None, int], RayWeightSyncScheme] = {}
        self._changed = threading.Condition()

    def put(self, key: tuple[str | None, int], end: RayWeightSyncScheme) -> None:
        """Stores the end for a receiver, in place of the end of an earlier sender."""
        with self._changed:
            self._ends[key] = end
            self._changed.notify_all()

    def get(self, key: tuple[str | None, int], timeout: float | None) -> RayWeightSyncScheme | None:
        """Returns the end for a receiver; None if there is none in time."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._ends, timeout)
            return self._ends.get(key)
