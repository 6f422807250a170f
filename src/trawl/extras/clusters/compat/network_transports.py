"""Transports of weights through a process group, RPC or Ray, which the user has started."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from tensordict import TensorDictBase
from typing_extensions import override

from trawl.compat.transports import Transport, load_received
from trawl.extras.clusters.ray.cluster import import_ray
from trawl.extras.clusters.ray.weights import RayWeightSyncScheme
from trawl.keys import as_key
from trawl.weights.store import Version, WeightUpdate
from trawl.weights.strategy import WeightStrategy
from trawl.weights.tensors import Weights, weights_of

# Number of receivers that may wait for their senders at one registry at the same time.
_WAITING = 1000
# Timeout for calls of PyTorch that require a timeout, if the caller sets no limit.
_LONG = timedelta(days=365)
# Weights for receivers of this RPC node that are not collectors, by the receiver's number.
_inboxes: defaultdict[int, queue.Queue[Any]] = defaultdict(queue.Queue)


class RPCTransport(Transport):
    """Sends weights over ``torch.distributed.rpc``, which the user has started.

    With a reference to a collector (``collector_rref``), the transport calls the collector's
    ``update_policy_weights_``. Without one, the weights wait in the receiving node until a
    transport there, with the same ``worker_rank``, calls ``receive_weights``.

    Args:
        collector_info: node of the receiver: its name, its number or its ``WorkerInfo``. None for
            the node of ``collector_rref``.
        collector_rref: reference (``RRef``) to the collector that gets the weights.
        collector_class: class whose ``update_policy_weights_`` is called with the collector. None
            for the collector's own class.
        worker_rank: number of the receiver among the receivers in its node.

    Examples:
        >>> from trawl.weight_update import RPCTransport
        >>> def learner(weights):
        ...     RPCTransport("actor", worker_rank=0).send_weights(weights)
        >>> def actor(policy):
        ...     RPCTransport(worker_rank=0).receive_weights(timeout=10, model=policy)
    """

    def __init__(
        self,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        worker_rank: int | None = None,
    ) -> None:
        self.collector_info = collector_info
        self.collector_rref = collector_rref
        self.collector_class = collector_class
        self.worker_rank = worker_rank
        self._pending: Any = None

    @override
    def send_weights_async(self, weights: Any) -> None:
        """Sends weights, in any form; :meth:`wait_ack` waits until the receiver has them.

        The call first waits until earlier weights have arrived, because RPC may reorder calls.

        Raises:
            RuntimeError: if the transport has no receiver, or the receiver has ended.
            Exception: any error that the collector raised for earlier weights.
        """
        from torch.distributed import rpc

        self.wait_ack()
        # RPC sends the tensors later. Copies keep their present values until then.
        sent = weights_of(weights).copy().flat()
        to = self.collector_info
        if self.collector_rref is not None:
            to = self.collector_rref.owner() if to is None else to
            arguments = (self.collector_rref, self.collector_class, sent)
            self._pending = rpc.rpc_async(to, _update, args=arguments)
        elif to is not None:
            self._pending = rpc.rpc_async(to, _put, args=(self.worker_rank or 0, sent))
        else:
            raise RuntimeError(
                "this transport has no receiver: pass collector_info, collector_rref, or both"
            )

    @override
    def wait_ack(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    @override
    def _receive(self, timeout: float | None, use: Callable[[Weights], None]) -> None:
        inbox = _inboxes[self.worker_rank or 0]
        try:
            found = inbox.get(timeout=timeout) if timeout != 0 else inbox.get_nowait()
            while not inbox.empty():
                found = inbox.get_nowait()
        except queue.Empty:
            return
        use(weights_of(found))

    @override
    def _receive_first(self, worker_idx: int, use: Callable[[Weights], None]) -> None:
        if self.worker_rank is None:
            self.worker_rank = worker_idx
        # This call does not wait for weights that have not arrived yet.
        self._receive(0, use)


class DistributedTransport(Transport):
    """Sends weights over ``torch.distributed``, in the default process group of this process.

    Each side makes a transport. The sender is rank 0, and passes the rank of the receiver; the
    receiver passes no rank. The process group carries the tensors. If there is a store, it notifies
    the receiver that weights were sent, and the sender that the weights were received. The
    transport delivers all weights, one set after the other.

    Args:
        weights_buffer: a TensorDict with the names, shapes and dtypes of the weights, the same on
            both sides. Weights are sent from this buffer, and received into it.
        store: a store of ``torch.distributed`` that both sides are connected to.
        rank: rank of the receiver, on the sender's side.
        sync: whether ``send_weights`` waits until the weights are received.

    Raises:
        RuntimeError: if this process has no process group.

    Examples:
        >>> from trawl.weight_update import DistributedTransport
        >>> def learner(weights, store):
        ...     transport = DistributedTransport(weights_buffer=weights, store=store, rank=1)
        ...     transport.send_weights(weights)
        >>> def actor(weights, store, policy):
        ...     transport = DistributedTransport(weights_buffer=weights, store=store)
        ...     transport.receive_weights(timeout=10, model=policy)
    """

    def __init__(
        self,
        *,
        weights_buffer: TensorDictBase,
        store: Any = None,
        rank: int | None = None,
        sync: bool = True,
    ) -> None:
        if not torch.distributed.is_initialized():
            raise RuntimeError(
                "DistributedTransport needs a process group: call "
                "torch.distributed.init_process_group() first"
            )
        self.weights_buffer = weights_buffer
        self.rank = rank
        self.sync = sync
        self._store = store
        receiver = torch.distributed.get_rank() if rank is None else rank
        self._prefix = f"trawl/weights/{receiver}"
        self._count = self._received = 0
        self._pending: list[Any] = []

    @override
    def send_weights(self, weights: Any) -> None:
        """Sends weights, in any form; with ``sync``, waits as :meth:`wait_ack` does."""
        self.send_weights_async(weights)
        if self.sync:
            self.wait_ack()

    @override
    def send_weights_async(self, weights: Any) -> None:
        """Sends weights without waiting for the receiver.

        The call first waits until the weights of earlier calls have been sent.
        """
        self._finish()
        if self._store is not None:
            self._store.set(f"{self._prefix}/sent/{self._count}", b"")
        self._count += 1
        self._send(weights)

    def send_initial_weights(self, weights: Any) -> None:
        """Sends weights for :meth:`receive_initial_weights`, without the store."""
        self._finish()
        self._send(weights)
        self._finish()

    @override
    def setup_connection_and_weights_on_sender(self) -> None:
        """Sends the contents of the buffer as the first weights."""
        self.send_initial_weights(self.weights_buffer)

    @override
    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits until the receiver has the last weights; without a store, until they are sent.

        Raises:
            TimeoutError: if the receiver takes longer than ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._store is not None and self._received < self._count:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._was_set(f"{self._prefix}/taken/{self._received}", left):
                raise TimeoutError(
                    f"rank {self.rank} did not receive the weights within {timeout:.3g} s"
                )
            self._received += 1
        self._finish()

    def _send(self, weights: Any) -> None:
        WeightStrategy().apply_weights(self.weights_buffer, weights)
        if self.rank is None:
            raise RuntimeError(
                "this end of the transport only receives: pass a rank to the sender's end"
            )
        for tensor in self._tensors():
            # Keeps the tensor alive until it is sent.
            sent = tensor.contiguous()
            self._pending.append((torch.distributed.isend(sent, self.rank), sent))

    def _finish(self) -> None:
        for work, _ in self._pending:
            work.wait()
        self._pending = []

    @override
    def _receive(self, timeout: float | None, use: Callable[[Weights], None]) -> None:
        if self._store is None:
            if timeout is not None:
                raise ValueError(
                    f"timeout={timeout} needs a store, through which the receiver learns of new "
                    "weights"
                )
        elif not self._was_set(f"{self._prefix}/sent/{self._count}", timeout):
            return
        count, self._count = self._count, self._count + 1
        use(self._next())
        if self._store is not None:
            self._store.set(f"{self._prefix}/taken/{count}", b"")

    def receive_initial_weights(self) -> Any:
        """Receives the first weights into the buffer, and returns them."""
        return load_received(self._next(), None, None)

    @override
    def _receive_first(self, worker_idx: int, use: Callable[[Weights], None]) -> None:
        use(self._next())

    def _next(self) -> Weights:
        for tensor in self._tensors():
            found = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            torch.distributed.recv(found, 0)
            tensor.copy_(found)
        return weights_of(self.weights_buffer.clone())

    def _tensors(self) -> list[torch.Tensor]:
        """Returns the tensors of the buffer, in the same order on both sides."""
        named = {as_key(name): value for name, value in self.weights_buffer.items(True, True)}
        return [named[name].data for name in sorted(named)]

    def _was_set(self, key: str, timeout: float | None) -> bool:
        """Waits for a key of the store, and deletes it; returns False if it is not set in time."""
        store = self._store
        assert store is not None
        limit = _LONG if timeout is None else timedelta(seconds=max(timeout, 0.001))
        # PyTorch prints a message for each wait that fails, so a call that should not wait only
        # checks the key.
        if timeout == 0 and not store.check([key]):
            return False
        try:
            store.wait([key], limit)
        except torch.distributed.DistStoreError as error:
            if "timeout" in str(error).lower():
                return False
            raise
        store.delete_key(key)
        return True


class RayTransport(Transport):
    """Sends weights to an actor of a Ray cluster.

    If the actor has a method ``update_policy_weights_``, as collectors have, the transport calls
    this method with the weights. Any other actor has to make its own transport, with the same
    ``connection_info_name``, ``worker_idx`` and ``model_id``, and call ``receive_weights``.

    Args:
        remote_actor: handle of the actor, on the sender's side.
        worker_idx: number of the receiver; 0 by default.
        backend: ``"gloo"`` sends weights over a connection of the sender and the receiver;
            ``"object_store"`` sends them through Ray's object store.
        connection_info_name: name of the actor through which sender and receiver find each other.
        model_id: name of the model that the weights belong to.

    Raises:
        ImportError: if Ray is not installed.
        ValueError: for another ``backend``.

    Examples:
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
        #: Version of the weights that were received last; None if these weights had no version.
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
            sent = import_ray().put(weights_of(weights).nested())
            self._call = self.remote_actor.update_policy_weights_.remote(sent)
            return
        scheme = self._scheme
        if not scheme.initialized_on_sender:
            first = weights_of(weights).nested()
            scheme.init_on_sender(model_id=self.model_id or "policy", weights=first, num_workers=1)
            import_ray().get(self._found_registry().put.remote(self._key, scheme))
            scheme.connect()
        version, self._next_version = self._next_version, None
        scheme.commit(scheme.prepare(weights, [0]), version)

    @override
    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits until the actor has received the last weights.

        Args:
            timeout: seconds to wait; None for no limit.

        Raises:
            RuntimeError: if nothing was sent.
            TimeoutError: if the actor does not receive the weights in time.
            ConnectionError: if the receiver has ended.
            Exception: any error that the actor's ``update_policy_weights_`` raises.
        """
        if self._call is not None:
            ready, _ = import_ray().wait([self._call], timeout=timeout)
            if not ready:
                raise TimeoutError(f"the actor did not receive the weights within {timeout:.3g} s")
            call, self._call = self._call, None
            import_ray().get(call)
        elif self._scheme.synchronized_on_sender:
            self._scheme.wait_async(timeout)
        else:
            raise RuntimeError("call send_weights_async() before wait_ack()")

    # --- the receiver

    def set_model(self, model: Any) -> None:
        """Sets the module into which weights are loaded if a call has no other destination."""
        self._model = model

    @override
    def _receive_first(self, worker_idx: int, use: Callable[[Weights], None]) -> None:
        self.worker_idx = worker_idx
        super()._receive_first(worker_idx, use)

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
    """Actor that passes the receivers' ends of schemes from senders to receivers."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str | None, int], RayWeightSyncScheme] = {}
        self._changed = threading.Condition()

    def put(self, key: tuple[str | None, int], end: RayWeightSyncScheme) -> None:
        """Stores a receiver's end of a scheme, in place of an end from an earlier sender."""
        with self._changed:
            self._ends[key] = end
            self._changed.notify_all()

    def get(self, key: tuple[str | None, int], timeout: float | None) -> RayWeightSyncScheme | None:
        """Waits for a receiver's end of a scheme, and returns it; None if none arrives in time."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._ends, timeout)
            return self._ends.get(key)


def _update(rref: Any, kind: Any, weights: dict[str, Any]) -> None:
    """Passes new weights to a collector; called in the collector's node."""
    collector = rref.local_value()
    if kind is None:
        collector.update_policy_weights_(weights)
    else:
        kind.update_policy_weights_(collector, weights)


def _put(number: int, weights: dict[str, Any]) -> None:
    """Stores new weights for a receiver; called in the receiver's node."""
    _inboxes[number].put(weights)
