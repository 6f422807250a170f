"""Weights for workers, and for other actors, in a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.backends.ray_cluster import import_ray
from trawl.weight_update.board import Posted, Version
from trawl.weight_update.lines import Inbox, Line, way_of
from trawl.weight_update.mail import MessageWeightSyncScheme
from trawl.weight_update.mailbox import Packet
from trawl.weight_update.packing import Packing
from trawl.weight_update.scheme import Receiver
from trawl.weight_update.strategy import WeightStrategy, in_form, take_in
from trawl.weight_update.tensors import weights_of
from trawl.weight_update.transports import TransportBackend

if TYPE_CHECKING:
    from trawl.backends.link import Address
    from trawl.weight_update.link_lines import LinkLine, Meeting

_STORE = "object_store"
_BACKENDS = (_STORE, "gloo")
# Number of receivers that may wait for their senders at one registry at the same time.
_WAITING = 1000


class RayPacket(Packet):
    """Packet whose weights are in Ray's object store; :attr:`data` is a reference to them."""

    @override
    def opened(self) -> Any:
        import ray

        from trawl.backends.ray_wire import writable

        return writable(ray.get(self.data))


class RayWeightSyncScheme(MessageWeightSyncScheme):
    """Puts weights once into Ray's object store, where all workers read them.

    The sender writes the weights once, however many workers there are. Ray copies them once to
    each node, and all workers of a node read the same memory. Without a collector, pass the scheme
    to your own actors as an argument of one of their methods. An actor notices when the sender
    ends. With the object store, the sender does not notice when an actor ends, so give
    ``wait_async`` a time-out.

    Args:
        strategy: the form in which weights are returned.
        backend: ``"object_store"``, or ``"gloo"`` for a process group of two with each receiver.
            With ``"gloo"``, the sender sends to each receiver, and the store holds nothing.
        timeout: with ``"gloo"``, seconds that a sender and a receiver wait for each other when
            they connect.

    Raises:
        ValueError: for another ``backend``.

    Example:
        >>> from trawl.weight_update import RayWeightSyncScheme
        >>> RayWeightSyncScheme().strategy
        'tensordict'
    """

    def __init__(
        self, strategy: str = "tensordict", backend: str = "object_store", *, timeout: float = 300.0
    ) -> None:
        super().__init__(strategy)
        if backend not in _BACKENDS:
            raise ValueError(
                f"backend must be one of {', '.join(map(repr, _BACKENDS))}, but it is {backend!r}. "
                "(Weights are sent in CPU memory: 'nccl' has no use here)"
            )
        self.backend = backend
        self.timeout = timeout
        # With the object store, without a collector: the actor that keeps the newest packets.
        self._desk: Any = None
        # With process groups: their rendezvous; the addresses of the scheme's own channels; the
        # channels to the workers of a collector.
        self._meeting: Meeting | None = None
        self._addresses: dict[int, Address] = {}
        self._ways: dict[int, LinkLine] = {}
        self._written = np.empty(0, dtype=np.uint8)

    @property
    def connection_info_name(self) -> str:
        """Name of the actor by which transports for this model find each other."""
        return f"connection_info_{self._model_id or 'policy'}"

    @override
    def create_transport(
        self,
        *,
        remote_actor: Any = None,
        worker_idx: int | None = None,
        remote_collector: Any = None,
        **options: Any,
    ) -> TransportBackend:
        """Returns a :class:`RayTransport` to an actor of the user's own.

        Args:
            remote_actor: handle of the actor.
            worker_idx: number of the receiver.
            remote_collector: older name of ``remote_actor``.
            **options: further arguments of the transport.
        """
        actor = remote_collector if remote_actor is None else remote_actor
        own = {"backend": self.backend, "connection_info_name": self.connection_info_name}
        return RayTransport(remote_actor=actor, worker_idx=worker_idx, **{**own, **options})

    def _met(self) -> Meeting:
        if self._meeting is None:
            import ray

            from trawl.weight_update.link_lines import Meeting

            self._meeting = Meeting(ray.util.get_node_ip_address(), 0, self.timeout)
        return self._meeting

    @override
    def _new_lines(self, workers: Sequence[int]) -> dict[int, Line]:
        if self.backend == _STORE:
            from trawl.weight_update.ray_lines import RayLine, desk_of

            self._desk = desk_of(workers)
            return {worker: RayLine(worker, self._desk) for worker in workers}
        lines = self._met().lines(workers)
        self._addresses = {worker: line.address for worker, line in lines.items()}
        return {**lines}

    @override
    def _join(self, worker: int) -> Inbox:
        if self.backend == _STORE:
            from trawl.weight_update.ray_lines import joined

            return joined(self._desk, worker)
        from trawl.weight_update.link_lines import joined as joined_by_link

        return joined_by_link(way_of(self._addresses, worker))

    @override
    def receiver(self, worker: int) -> Receiver:
        if self.backend == _STORE:
            return super().receiver(worker)
        from trawl.weight_update.tickets import TicketMailbox, ticket

        before = self._ways.pop(worker, None)
        if before is not None:
            # This channel led to a worker that died.
            before.close()
        self._ways[worker] = line = self._met().line(worker)
        line.begin()
        latest = self._latest.get(worker)
        if latest is not None:
            line.send(latest)
        return TicketMailbox(line.address, None if latest is None else ticket(latest))

    @override
    def _carry(self, worker: int, packet: Packet) -> None:
        if self.backend != _STORE:
            from trawl.weight_update.tickets import ticket

            if packet.packing is not None:
                self._ways[worker].send(packet)
            packet = ticket(packet)
        super()._carry(worker, packet)

    @override
    def shutdown(self) -> None:
        for line in self._ways.values():
            line.close()
        self._ways, self._meeting, self._desk = {}, None, None
        super().shutdown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_meeting": None,
            "_ways": {},
            "_written": np.empty(0, dtype=np.uint8),
        }

    @override
    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        if self.backend != _STORE:
            return super()._buffer(nbytes)
        # Ray copies the memory into its store at once, so it can be reused. Writing to used memory
        # takes half as long as writing to new memory.
        if self._written.nbytes != nbytes:
            self._written = np.empty(nbytes, dtype=np.uint8)
        return self._written

    @override
    def _packet(self, packing: Packing, buffer: Any, extra: bytes) -> Packet:
        if self.backend != _STORE:
            return super()._packet(packing, buffer, extra)
        import ray

        # The packets hold the reference, so Ray keeps the weights as long as they may be read.
        return RayPacket(0, None, packing, ray.put(buffer), extra)


class RayTransport:
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
        self._model: Any = None
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

    def send_weights(self, weights: Any) -> None:
        """Sends weights, in any form, and waits until the actor has taken them.

        Raises:
            ConnectionError: if the receiver has ended.
            Exception: any error that the actor's ``update_policy_weights_`` raises.
        """
        self.send_weights_async(weights)
        self.wait_ack()

    def send_weights_async(self, weights: Any) -> None:
        """Sends weights, in any form; :meth:`wait_ack` waits until the actor has taken them."""
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

    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits until the actor has taken the last weights.

        Args:
            timeout: seconds to wait; None waits as long as it takes.

        Raises:
            RuntimeError: if nothing was sent.
            TimeoutError: if the actor does not take them in time.
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

    def setup_connection_and_weights_on_sender(self) -> None:
        """Does nothing: sender and receiver connect when the first weights are sent."""

    # --- the receiver

    def set_model(self, model: Any) -> None:
        """Sets the module that weights are loaded into, if a call names no other."""
        self._model = model

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

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Receives and returns the newest weights, or None if none arrive in time.

        Args:
            timeout: seconds to wait; None waits as long as it takes.
            weights: tensors to copy the weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.

        Raises:
            ConnectionError: if the sender has ended, and all its weights were taken.
        """
        if not self._scheme.initialized_on_receiver:
            found = import_ray().get(self._found_registry().get.remote(self._key, timeout))
            if found is None:
                return None
            self._scheme = found
            found.init_on_receiver(model_id=self.model_id or "policy", worker_idx=0)
            found.connect()
        inbox = self._scheme.inbox
        if not inbox.wait(timeout):
            return None
        into = next((one for one in (model, weights, self._model) if one is not None), None)
        taken: list[Any] = []

        def use(posted: Posted) -> None:
            self.model_version = posted.version
            taken.append(take_in(posted.copy(), into, strategy))

        inbox.take(use)
        return taken[0]


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
