"""Weights that are sent to workers as messages, where there is no memory to share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from typing_extensions import override

from trawl.weight_update.board import Posted, Version
from trawl.weight_update.packing import Packing, Slot
from trawl.weight_update.scheme import Receiver, WeightSyncScheme
from trawl.weight_update.shipments import Shipment


@dataclass(frozen=True)
class Packet:
    """A message with weights.

    Attributes:
        count: how many were sent to this receiver, with this.
        version: the version, if there are such.
        packing: how the weights are packed; None if there are none, and only the version is new.
        data: the weights, as bytes; or what :meth:`opened` makes these of.
        extra: extra state, pickled.
    """

    count: int
    version: Version
    packing: Packing | None = None
    data: Any = None
    extra: bytes = b""

    def opened(self) -> Any:
        """The weights, as bytes."""
        return self.data


class Mailbox:
    """Where a worker finds weights that were sent to it: only the newest matter.

    Args:
        packet: what was sent before the worker began.

    Attributes:
        count: how many had been sent when the newest was taken.
    """

    def __init__(self, packet: Packet | None = None) -> None:
        self.count = 0
        self._packet = packet

    def put(self, packet: Packet) -> None:
        """Takes in a message. One that is older than what is there changes nothing."""
        waiting = self._packet
        if packet.count <= max(self.count, 0 if waiting is None else waiting.count):
            return
        if packet.packing is None and waiting is not None:
            packet = replace(waiting, count=packet.count, version=packet.version)
        self._packet = packet

    @property
    def newer(self) -> bool:
        """Whether there is something that was not taken."""
        return self._packet is not None

    def take(self, use: Callable[[Posted], None]) -> Posted:
        """Takes the newest."""
        packet = self._packet
        if packet is None:
            return Posted(self.count, None, None, b"")
        slot = None if packet.packing is None else Slot(packet.packing, packet.opened())
        posted = Posted(packet.count, packet.version, slot, packet.extra)
        use(posted)
        self._packet, self.count = None, packet.count
        return posted


class MessageWeightSyncScheme(WeightSyncScheme):
    """Weights sent to the workers of a collector by messages; they are packed once for all.

    Args:
        strategy: the form in which weights are returned.
    """

    def __init__(self, strategy: str = "tensordict") -> None:
        super().__init__(strategy)
        # The newest of each worker, for one that takes its place.
        self._latest: dict[int, Packet] = {}

    @override
    def _open(self, workers: int) -> None:
        pass

    @override
    def _post(self, shipment: Shipment, version: Version) -> None:
        left = list(shipment.workers)
        while left:
            before = self._latest.get(left[0])
            packet, complete = self._filled(shipment, before)
            # What is missing is as in the last ones that a worker had.
            known = None if before is None else before.data
            alike = [i for i in left if complete or self._data(i) is known]
            for worker in alike:
                self._send(worker, replace(packet, count=self.count(worker) + 1, version=version))
            left = [i for i in left if i not in alike]

    def _filled(self, shipment: Shipment, before: Packet | None) -> tuple[Packet, bool]:
        """A message with weights; and whether that needed nothing of the one before."""
        buffer = np.empty(shipment.packing.nbytes, dtype=np.uint8)
        slot = Slot(shipment.packing, buffer)
        shipment.write(slot)
        more = b"" if shipment.extra or before is None else before.extra
        complete = slot.complete and not more
        if not slot.complete and before is not None and before.packing == shipment.packing:
            slot.complete_by(Slot(shipment.packing, before.opened()))
        return self._packet(shipment.packing, buffer, shipment.extra or more), complete

    def _data(self, worker: int) -> Any:
        known = self._latest.get(worker)
        return None if known is None else known.data

    def _packet(self, packing: Packing, buffer: Any, extra: bytes) -> Packet:
        """What is sent to all workers, but for its number and version."""
        return Packet(0, None, packing, buffer, extra)

    @override
    def _post_version(self, version: Version, workers: Iterable[int]) -> None:
        for worker in workers:
            self._send(worker, Packet(self.count(worker) + 1, version))

    def _send(self, worker: int, packet: Packet) -> None:
        known = self._latest.get(worker)
        if packet.packing is None and known is not None:
            # Who begins later needs the weights as well.
            known = replace(known, count=packet.count, version=packet.version)
        else:
            known = packet
        self._latest[worker] = known
        self.context._send_weights(self.model_id, worker, packet)

    @override
    def receiver(self, worker: int) -> Receiver:
        return Mailbox(self._latest.get(worker))

    @override
    def count(self, worker: int) -> int:
        known = self._latest.get(worker)
        return 0 if known is None else known.count
