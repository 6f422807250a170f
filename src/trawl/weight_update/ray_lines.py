"""Weights through Ray's object store to receivers that are no workers of a collector.

An actor keeps what was sent last to each receiver; what is in the store is only named in it.
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

# Calls for each receiver that may wait at a time: for weights, for an answer; and one more.
_CALLS = 3


class Desk:
    """The actor.

    Args:
        numbers: the receivers.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._progress = {number: Progress(number) for number in numbers}

    def put(self, number: int, packet: Packet) -> None:
        """There are newer weights for a receiver."""
        self._progress[number].put(packet)

    def next(self, number: int, wait: bool) -> Packet | None:
        """The newest weights that a receiver has not been given."""
        return self._progress[number].next(wait)

    def took(self, number: int, count: int) -> None:
        """A receiver has taken so many."""
        self._progress[number].took(count)

    def wait(self, number: int, count: int, timeout: float | None) -> bool:
        """Waits until a receiver has taken so many; tells whether it has."""
        try:
            self._progress[number].wait(timeout, count)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Nothing more is sent."""
        for progress in self._progress.values():
            progress.close()


def desk_of(numbers: Sequence[int]) -> Any:
    """Starts the actor for receivers. It ends with the sender."""
    ray = import_ray()
    many = _CALLS * len(numbers) + 1
    options = {"num_cpus": 0, "max_concurrency": many, "max_restarts": 0}
    return ray.remote(Desk).options(**options).remote(list(numbers))


class RayLine(Line):
    """The sender's end.

    Args:
        number: what the receiver is called in errors.
        desk: the handle of the actor.
    """

    def __init__(self, number: int, desk: Any) -> None:
        super().__init__(number)
        self._desk = desk
        self._latest: Packet | None = None

    @override
    def send(self, packet: Packet) -> None:
        # Ray may bring them in another order: so each has all that there is.
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
            # There may be no connection any more.
            import_ray().get(self._desk.close.remote())


def joined(desk: Any, number: int) -> Inbox:
    """The receiver's end."""
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
