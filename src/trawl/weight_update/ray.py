"""Weights for workers in a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase
from typing_extensions import override

from trawl.weight_update.lines import Inbox, Line, way_of
from trawl.weight_update.mail import MessageWeightSyncScheme
from trawl.weight_update.mailbox import Packet
from trawl.weight_update.packing import Packing
from trawl.weight_update.scheme import Receiver
from trawl.weight_update.updaters import RemoteWeightUpdater

if TYPE_CHECKING:
    from trawl.backends.link import Address
    from trawl.weight_update.link_lines import LinkLine, Meeting

_STORE = "object_store"
_BACKENDS = (_STORE, "gloo")


class RayPacket(Packet):
    """Weights in Ray's object store; :attr:`data` is a reference to them."""

    @override
    def opened(self) -> Any:
        import ray

        from trawl.backends.ray_wire import writable

        return writable(ray.get(self.data))


class RayWeightSyncScheme(MessageWeightSyncScheme):
    """Weights put once into Ray's object store, where all workers read them.

    However many workers there are, the sender writes them once; Ray brings them once to each
    node, and the workers there read the same memory. Alone, the scheme goes to actors of your own
    as an argument of one of their methods. The end of the sender is noticed by them; that of an
    actor is not noticed by the sender, so give ``wait_async`` a time-out.

    Args:
        strategy: the form in which weights are returned.
        backend: ``"object_store"``, or ``"gloo"`` for a process group of two with each receiver:
            the sender sends to each then, and nothing is kept in the store.
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
        # Of the object store, alone: the actor that keeps what was sent.
        self._desk: Any = None
        # Of process groups: where they meet; alone, the addresses; in a collector, the lines.
        self._meeting: Meeting | None = None
        self._addresses: dict[int, Address] = {}
        self._ways: dict[int, LinkLine] = {}
        self._written = np.empty(0, dtype=np.uint8)

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
            # That of a worker which died.
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
        # Ray copies it into its store at once: then it is free for the next weights, and memory
        # that was written to before takes half the time of memory that is new.
        if self._written.nbytes != nbytes:
            self._written = np.empty(nbytes, dtype=np.uint8)
        return self._written

    @override
    def _packet(self, packing: Packing, buffer: Any, extra: bytes) -> Packet:
        if self.backend != _STORE:
            return super()._packet(packing, buffer, extra)
        import ray

        # Packets keep the reference for as long as somebody may ask for them.
        return RayPacket(0, None, packing, ray.put(buffer), extra)


class RayWeightUpdater(RemoteWeightUpdater):
    """Brings weights to the collectors of a Ray cluster: an older way than a scheme.

    Without arguments it serves the :class:`~trawl.collectors.distributed.RayCollector` that it is
    given to.

    Args:
        policy_weights: what is sent if nothing is pushed; None for the collector's policy.
        remote_collectors: actors that have a method ``update_policy_weights_``, if these are to
            be served and not the workers of a collector.
        max_interval: batches that a worker has to deliver after an update before it gets another.
    """

    def __init__(
        self,
        policy_weights: TensorDictBase | None = None,
        remote_collectors: Sequence[Any] | None = None,
        max_interval: int = 0,
    ) -> None:
        if isinstance(max_interval, bool) or not isinstance(max_interval, int):
            raise TypeError(f"max_interval must be an integer, but it is {max_interval!r}")
        super().__init__(policy_weights)
        self.remote_collectors = list(remote_collectors or ())
        self.max_interval = max(0, max_interval)
        self._sent: dict[int, int] = {}
        self._put: tuple[Any, Any] | None = None

    @override
    def all_worker_ids(self) -> list[int]:
        if self.remote_collectors:
            return list(range(len(self.remote_collectors)))
        return super().all_worker_ids()

    @property
    def batches_since_weight_update(self) -> list[int]:
        """How many batches each worker has delivered since its last update."""
        return [self._delivered(i) - self._sent.get(i, 0) for i in self.all_worker_ids()]

    def _delivered(self, worker_id: int) -> int:
        collector = self._first()
        if self.remote_collectors or collector is None:
            return 0
        batches: Callable[[int], int] = collector.batches_of
        return batches(worker_id)

    @override
    def _skip_update(self, worker_id: Any) -> bool:
        if self.remote_collectors or worker_id not in self._sent:
            return False
        return self._delivered(worker_id) - self._sent[worker_id] < self.max_interval

    @override
    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
        self._sent[worker_id] = self._delivered(worker_id)
        if not self.remote_collectors:
            super()._sync_weights_with_worker(worker_id, server_weights)
            return
        import ray

        if self._put is None or self._put[0] is not server_weights:
            self._put = server_weights, ray.put(server_weights)
        self.remote_collectors[worker_id].update_policy_weights_.remote(self._put[1])
