"""Messages with weights, and where a worker finds them."""

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
        count: how many were sent to this receiver, with this.
        version: the version, if there are such.
        packing: how the weights are packed; None if there are none, and only the version is new.
        data: the weights, as bytes; or what :meth:`opened` makes these of.
        extra: extra state, as :func:`~trawl.weight_update.board.stamped`.
    """

    count: int
    version: Version
    packing: Packing | None = None
    data: Any = None
    extra: bytes = b""

    def opened(self) -> Any:
        """The weights, as bytes."""
        return self.data

    def after(self, waiting: Packet) -> Packet:
        """What there is to take, if this came after one that was not taken."""
        if self.packing is not None:
            return self
        return replace(waiting, count=self.count, version=self.version)


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
        self._update = 0

    def put(self, packet: Packet) -> None:
        """Takes in a message. One that is older than what is there changes nothing."""
        waiting = self._packet
        if packet.count <= max(self.count, 0 if waiting is None else waiting.count):
            return
        self._packet = packet if waiting is None else packet.after(waiting)

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
        posted = Posted(packet.count, packet.version, slot, *unstamped(packet.extra), self._update)
        use(posted)
        self._packet, self.count, self._update = None, packet.count, posted.update
        return posted
