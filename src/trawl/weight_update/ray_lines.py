"""Channels through Ray's object store to receivers outside of a collector.

An actor keeps the newest packet for each receiver. The packet refers to weights in the store.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from trawl.backends.ray_cluster import import_ray
from trawl.weight_update.lines import Inbox, Line, Progress
from trawl.weight_update.mailbox import Packet

# Concurrent calls for each receiver: one that waits for weights, one for an acknowledgement, and
# one more.
_CALLS = 3


class Desk:
    """Actor that keeps the newest packet for each receiver.

    Args:
        numbers: numbers of the receivers.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._progress = {number: Progress(number) for number in numbers}

    def put(self, number: int, packet: Packet) -> None:
        """Sets the packet that a receiver gets next, unless it is older than the last one."""
        self._progress[number].put(packet)

    def next(self, number: int, wait: bool) -> Packet | None:
        """Returns the packet that a receiver gets next, or None; see :meth:`Progress.next`."""
        return self._progress[number].next(wait)

    def took(self, number: int, count: int) -> None:
        """Notes that a receiver has taken the packets up to number ``count``."""
        self._progress[number].took(count)

    def wait(self, number: int, count: int, timeout: float | None) -> bool:
        """Waits until a receiver has taken packets up to ``count``; returns False on a time-out."""
        try:
            self._progress[number].wait(timeout, count)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Notes that nothing more will be sent."""
        for progress in self._progress.values():
            progress.close()


def desk_of(numbers: Sequence[int]) -> Any:
    """Starts the actor for receivers. The actor ends with the sender."""
    ray = import_ray()
    many = _CALLS * len(numbers) + 1
    options = {"num_cpus": 0, "max_concurrency": many, "max_restarts": 0}
    return ray.remote(Desk).options(**options).remote(list(numbers))


class RayLine(Line):
    """Sender's end of a channel.

    Args:
        number: number of the receiver.
        desk: handle of the actor.
    """

    def __init__(self, number: int, desk: Any) -> None:
        super().__init__(number)
        self._desk = desk
        self._latest: Packet | None = None

    @override
    def send(self, packet: Packet) -> None:
        # Ray may reorder calls, so each packet includes the newest weights.
        self._latest = packet if self._latest is None else packet.after(self._latest)
        self._desk.put.remote(self.number, self._latest)

    @override
    def wait(self, timeout: float | None) -> None:
        if self._latest is None:
            return
        ref = self._desk.wait.remote(self.number, self._latest.count, timeout)
        if not import_ray().get(ref):
            raise TimeoutError(f"receiver {self.number} took no weights within {timeout:.3g} s")

    @override
    def close(self) -> None:
        with contextlib.suppress(Exception):
            # The connection to Ray may be gone.
            import_ray().get(self._desk.close.remote())


def joined(desk: Any, number: int) -> Inbox:
    """Returns the receiver's end of a channel."""
    ray = import_ray()
    inbox = Inbox(lambda count: desk.took.remote(number, count))
    first = ray.get(desk.next.remote(number, False))
    if first is not None:
        inbox.put(first)
    threading.Thread(target=_listen, args=(desk, number, inbox), daemon=True).start()
    return inbox


def _listen(desk: Any, number: int, inbox: Inbox) -> None:
    ray = import_ray()
    with contextlib.suppress(Exception):
        while (packet := ray.get(desk.next.remote(number, True))) is not None:
            inbox.put(packet)
    inbox.end()
