"""Weight-sync schemes for processes of one machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override

from trawl.weight_update.board import Board, Posted, Reader, Version
from trawl.weight_update.lines import way_of
from trawl.weight_update.scheme import Receiver, WeightSyncScheme
from trawl.weight_update.shared_transport import SharedMemTransport
from trawl.weight_update.shipments import Shipment
from trawl.weight_update.tensors import Weights
from trawl.weight_update.transports import MPTransport, TransportBackend


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Puts weights into shared memory, in one copy for all receivers.

    Sending makes one copy, however many receivers there are, and waits for none of them. Each
    receiver later copies the weights into its model, and always gets a complete set.

    Args:
        strategy: the form in which weights are returned.
        sync: accepted for compatibility. Sending never waits, and batches that begin later have
            the new weights.
        per_worker_weights: whether receivers may get different weights, as a dict by number. Each
            receiver then has a copy of its own.

    Example:
        >>> import torch
        >>> from trawl.collectors import MultiCollector
        >>> from trawl.weight_update import SharedMemWeightSyncScheme
        >>> def policy(observation):
        ...     return torch.zeros(*observation.shape[:-1], 1)
        >>> module = torch.nn.Linear(3, 1)
        >>> scheme = SharedMemWeightSyncScheme()
        >>> scheme.init_on_sender(model=module, num_workers=2)
        >>> scheme.connect()
        >>> scheme.send()
    """

    def __init__(
        self, strategy: str = "tensordict", sync: bool = True, per_worker_weights: bool = False
    ) -> None:
        super().__init__(strategy)
        self.sync = sync
        self.per_worker_weights = per_worker_weights
        self._boards: dict[int, tuple[Board, int]] = {}
        self._transports: dict[int, SharedMemTransport] = {}
        self._readers: dict[int, Reader] = {}

    @override
    def _open(self, workers: int) -> None:
        for group in self._groups or ():
            sets = [(i,) for i in group.workers] if self.per_worker_weights else [group.workers]
            for one in sets:
                board = Board(len(one))
                self._boards |= {worker: (board, place) for place, worker in enumerate(one)}
        if self._host is None:
            # A collector has other means to wake its workers, and to notice their end.
            self._transports = {
                worker: SharedMemTransport(board, place, worker)
                for worker, (board, place) in self._boards.items()
            }

    @override
    def _check_shipment(self, shipment: Shipment) -> None:
        for worker in shipment.workers:
            self._boards[worker][0].check(shipment.packing, shipment.extra)

    @override
    def _post(self, shipment: Shipment, version: Version) -> None:
        by_board: dict[Board, list[int]] = {}
        for worker in shipment.workers:
            board, place = self._boards[worker]
            by_board.setdefault(board, []).append(place)
        for board, places in by_board.items():
            board.post(shipment.packing, shipment.write, shipment.extra, version, places)
        for worker in shipment.workers:
            if worker in self._transports:
                self._transports[worker].notify()

    @override
    def post_version(self, version: Version, workers: Iterable[int]) -> None:
        for worker in workers:
            board, place = self._boards[worker]
            board.post_version(version, [place])

    @override
    def receiver(self, worker: int) -> Receiver:
        board, place = self._boards[worker]
        return board.reader(place)

    @override
    def count(self, worker: int) -> int:
        board, place = self._boards[worker]
        return board.count(place)

    @override
    def create_transport(self, **options: Any) -> TransportBackend:
        return SharedMemTransport(**options)

    @override
    def last_sent(self, worker: int) -> Weights | None:
        board, place = self._boards[worker]
        return board.newest(place)

    @override
    def _connect_sender(self) -> None:
        for transport in self._transports.values():
            transport.connect_sender()

    @override
    def _connect_receiver(self, worker: int) -> None:
        own = way_of(self._transports, worker)
        for index, transport in self._transports.items():
            if index != worker:
                transport.close()
        self._transports = {worker: own}
        own.connect_receiver()

    @override
    def _wait(self, worker: int, timeout: float | None) -> None:
        if worker in self._transports:
            self._transports[worker].wait_ack(timeout)

    @override
    def _await(self, timeout: float | None) -> Receiver | None:
        transport = self.receiver_transport
        return transport.reader if transport.wait(timeout) else None

    @override
    def acknowledge(self) -> None:
        self.receiver_transport.send_ack()

    @property
    @override
    def incoming(self) -> Receiver:
        if not self._connected_receiver:
            return super().incoming
        reader: Reader = self.receiver_transport.reader
        return reader

    @property
    @override
    def sender_transports(self) -> dict[int, Any]:
        return dict(self._transports) if self.initialized_on_sender else {}

    @property
    @override
    def receiver_transport(self) -> Any:
        if not self._connected_receiver:
            return None
        return self._transports[self._worker_idx or 0]

    @property
    @override
    def shared_transport(self) -> Any:
        boards = {id(board): board for board, _ in self._boards.values()}
        return next(iter(boards.values())) if len(boards) == 1 else None

    @override
    def shutdown(self) -> None:
        for transport in self._transports.values():
            transport.close()
        self._boards, self._transports = {}, {}
        super().shutdown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_boards": {}}


class MultiProcessWeightSyncScheme(SharedMemWeightSyncScheme):
    """Sends weights to each receiver separately, in a copy of its own.

    Use this scheme if receivers get different weights. If all get the same,
    :class:`SharedMemWeightSyncScheme` copies the weights only once.

    Args:
        strategy: the form in which weights are returned.
        sync: accepted for compatibility: sending never waits.
    """

    def __init__(self, strategy: str = "tensordict", sync: bool = True) -> None:
        super().__init__(strategy, sync, per_worker_weights=True)

    @override
    def create_transport(self, **options: Any) -> TransportBackend:
        """Returns an :class:`MPTransport` over queues of the user's own.

        Args:
            **options: ``weight_queue``, ``ack_queue`` and ``timeout``.
        """
        return MPTransport(**options)


class NoWeightSyncScheme(WeightSyncScheme):
    """Sends nothing. For policies that never change, or get their weights in another way."""

    @override
    def _open(self, workers: int) -> None:
        pass

    @override
    def create_transport(self, **options: Any) -> TransportBackend:
        return _NoTransport()

    @override
    def prepare(self, weights: Any, workers: Sequence[int]) -> list[Shipment]:
        return []

    @override
    def _post(self, shipment: Shipment, version: Version) -> None:
        pass

    @override
    def post_version(self, version: Version, workers: Iterable[int]) -> None:
        pass

    @override
    def receiver(self, worker: int) -> Receiver:
        return _Nothing()

    @override
    def count(self, worker: int) -> int:
        return 0

    @override
    def _await(self, timeout: float | None) -> Receiver | None:
        return None

    @property
    @override
    def incoming(self) -> Receiver:
        return _Nothing()


class _NoTransport:
    """Transport that sends nothing."""

    def send_weights(self, weights: Any) -> None:
        """Does nothing."""

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> None:
        """Returns None at once."""


class _Nothing:
    """Receiver that never gets weights."""

    count = 0
    newer = False

    def take(self, use: Any) -> Posted:
        return Posted(0, None, None, b"")
