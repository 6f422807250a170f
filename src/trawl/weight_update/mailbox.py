"""Messages with weights, and the mailbox in which a worker finds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trawl.weight_update.board import Posted, Version, unstamped
from trawl.weight_update.packing import Packing, Slot


@dataclass(frozen=True)
class Packet:
    """A message with weights.

    Attributes:
        count: number of packets sent to this receiver, including this one.
        version: version of the weights; None without versions.
        packing: layout of the weights; None if the packet has none and only the version is new.
        data: the weights as bytes, or an object that :meth:`opened` turns into bytes.
        extra: extra state, as :func:`~trawl.weight_update.board.stamped`.
    """

    count: int
    version: Version
    packing: Packing | None = None
    data: Any = None
    extra: bytes = b""

    def opened(self) -> Any:
        """Returns the weights as bytes."""
        return self.data

    def after(self, waiting: Packet) -> Packet:
        """Returns the packet to take if this one follows ``waiting``, which was not taken."""
        if self.packing is not None:
            return self
        return replace(waiting, count=self.count, version=self.version)


class Mailbox:
    """Mailbox of a worker, which keeps the newest weights only.

    Args:
        packet: packet that was sent before the worker started.

    Attributes:
        count: number of the packet that was taken last.
    """

    def __init__(self, packet: Packet | None = None) -> None:
        self.count = 0
        self._packet = packet
        self._update = 0

    def put(self, packet: Packet) -> None:
        """Stores a packet, unless it is older than the newest one."""
        waiting = self._packet
        if packet.count <= max(self.count, 0 if waiting is None else waiting.count):
            return
        self._packet = packet if waiting is None else packet.after(waiting)

    @property
    def newer(self) -> bool:
        """True if there is a packet that was not taken."""
        return self._packet is not None

    def take(self, use: Callable[[Posted], None]) -> Posted:
        """Takes and returns the newest weights; calls ``use`` with them, if there are any."""
        packet = self._packet
        if packet is None:
            return Posted(self.count, None, None, b"")
        slot = None if packet.packing is None else Slot(packet.packing, packet.opened())
        posted = Posted(packet.count, packet.version, slot, *unstamped(packet.extra), self._update)
        use(posted)
        self._packet, self.count, self._update = None, packet.count, posted.update
        return posted
