"""Weights that are sent to workers as messages, where memory can't be shared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.weight_update.board import Posted, Version, stamped, unstamped
from trawl.weight_update.lines import Inbox, Line
from trawl.weight_update.mailbox import Mailbox, Packet
from trawl.weight_update.packing import Packing, Slot
from trawl.weight_update.scheme import Receiver, WeightSyncScheme
from trawl.weight_update.shipments import Group, Shipment
from trawl.weight_update.tensors import Weights


class MessageWeightSyncScheme(WeightSyncScheme):
    """Sends weights as messages, which are packed once for all receivers.

    A collector carries the messages to its workers. Without a collector, the scheme opens
    channels of its own.

    Args:
        strategy: the form in which weights are returned.
    """

    def __init__(self, strategy: str = "tensordict") -> None:
        super().__init__(strategy)
        # Newest packet of each worker. A replacement of the worker starts with it.
        self._latest: dict[int, Packet] = {}
        self._posts = 0
        self._lines: dict[int, Line] = {}
        self._inbox: Inbox | None = None

    def _new_lines(self, workers: Sequence[int]) -> dict[int, Line]:
        """Returns channels to receivers that are not workers of a collector.

        Raises:
            RuntimeError: if this scheme has no channels of its own.
        """
        raise RuntimeError(
            f"{type(self).__name__} needs a collector, which carries the weights. Between "
            "processes of your own use SharedMemWeightSyncScheme, or DistributedWeightSyncScheme"
        )

    def _join(self, worker: int) -> Inbox:
        """Returns the receiver's end of a channel of :meth:`_new_lines`."""
        raise NotImplementedError

    @override
    def _open(self, workers: int) -> None:
        if self._host is None:
            self._lines = self._new_lines(self.workers)

    @override
    def _check_fork(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: a receiver can't be in a process that was forked from the "
            "sender's, which has threads. Start it by multiprocessing.get_context('spawn') or "
            "'forkserver', or use SharedMemWeightSyncScheme"
        )

    @override
    def _connect_sender(self) -> None:
        for line in self._lines.values():
            line.begin()

    @override
    def _connect_receiver(self, worker: int) -> None:
        self._inbox = self._join(worker)

    @override
    def _wait(self, worker: int, timeout: float | None) -> None:
        if worker in self._lines:
            self._lines[worker].wait(timeout)

    @override
    def _await(self, timeout: float | None) -> Receiver | None:
        assert self._inbox is not None
        return self._inbox if self._inbox.wait(timeout) else None

    @property
    def inbox(self) -> Inbox:
        """Receiver's end of the scheme's own channel.

        Raises:
            RuntimeError: if the scheme is not connected.
        """
        if self._inbox is None:
            raise RuntimeError("inbox before connect()")
        return self._inbox

    @property
    @override
    def incoming(self) -> Receiver:
        return super().incoming if self._inbox is None else self._inbox

    @property
    @override
    def sender_transports(self) -> dict[int, Any]:
        return dict(self._lines)

    @property
    @override
    def receiver_transport(self) -> Any:
        return self._inbox

    @override
    def shutdown(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines, self._inbox = {}, None
        super().shutdown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_latest": {}, "_lines": {}, "_inbox": None}

    @override
    def _post(self, shipment: Shipment, version: Version) -> None:
        self._posts += 1
        left = list(shipment.workers)
        while left:
            before = self._latest.get(left[0])
            packet, complete = self._filled(shipment, before)
            # Missing tensors come from a worker's last packet, so workers whose last packets
            # differ get different ones now.
            known = None if before is None else before.data
            alike = [i for i in left if complete or self._data(i) is known]
            for worker in alike:
                self._send(worker, replace(packet, count=self.count(worker) + 1, version=version))
            left = [i for i in left if i not in alike]

    def _filled(self, shipment: Shipment, before: Packet | None) -> tuple[Packet, bool]:
        """Returns a packet with weights, and True if it is complete without ``before``."""
        buffer = self._buffer(shipment.packing.nbytes)
        slot = Slot(shipment.packing, buffer)
        shipment.write(slot, self._posts)
        more = b"" if shipment.extra or before is None else before.extra
        complete = slot.complete and not more
        if not slot.complete and before is not None and before.packing == shipment.packing:
            slot.complete_by(Slot(shipment.packing, before.opened()))
        extra = stamped(shipment.extra, self._posts) or more
        return self._packet(shipment.packing, buffer, extra), complete

    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """Returns new memory to write weights to; packets keep it, so it can't be reused."""
        return np.empty(nbytes, dtype=np.uint8)

    def _data(self, worker: int) -> Any:
        known = self._latest.get(worker)
        return None if known is None else known.data

    def _packet(self, packing: Packing, buffer: Any, extra: bytes) -> Packet:
        """Returns the packet for all workers, still without its count and version."""
        return Packet(0, None, packing, buffer, extra)

    @override
    def post_version(self, version: Version, workers: Iterable[int]) -> None:
        for worker in workers:
            self._send(worker, Packet(self.count(worker) + 1, version))

    def _send(self, worker: int, packet: Packet) -> None:
        known = self._latest.get(worker)
        # A worker that starts later needs the earlier weights, too.
        self._latest[worker] = packet if known is None else packet.after(known)
        if self._lines:
            self._lines[worker].send(packet)
        else:
            self._carry(worker, packet)

    def _carry(self, worker: int, packet: Packet) -> None:
        """Lets the collector carry a packet to its worker."""
        assert self._host is not None
        assert self.model_id is not None
        self._host.deliver(self.model_id, worker, packet)

    def add_receiver(self, worker: int, group: Group | None) -> None:
        """Adds a receiver, which is a worker of the scheme's collector.

        Args:
            worker: number of the receiver.
            group: the group of this receiver alone; None for that of the first receiver, with its
                newest weights.
        """
        assert self._groups is not None
        if group is not None:
            self._groups.append(group)
            return
        first = self._groups[0]
        newest = self._latest.get(first.workers[0])
        first.workers = (*first.workers, worker)
        if newest is not None:
            self._latest[worker] = replace(newest, count=1)

    @override
    def receiver(self, worker: int) -> Receiver:
        return Mailbox(self._latest.get(worker))

    @override
    def last_sent(self, worker: int) -> Weights | None:
        known = self._latest.get(worker)
        if known is None or known.packing is None:
            return None
        posted = Posted(0, None, Slot(known.packing, known.opened()), *unstamped(known.extra))
        return posted.copy()

    @override
    def count(self, worker: int) -> int:
        known = self._latest.get(worker)
        return 0 if known is None else known.count
