"""Channels through Ray to receivers outside of a collector.

An actor keeps the newest messages. The weights are in Ray's object store.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from trawl.backends.ray_cluster import import_ray
from trawl.weight_update.channel import Channel, Inbox, Outbox, WeightMessage

# Number of concurrent calls to the messenger for each receiver: one that waits for weights, one
# that waits for an acknowledgement, and one more.
_CALLS = 3


class _Messenger:
    """Actor that keeps the newest message to each receiver.

    Args:
        numbers: numbers of the receivers.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._outboxes = {number: Outbox(number) for number in numbers}

    def put(self, number: int, message: WeightMessage) -> None:
        """Sets the message that a receiver gets next, unless it is older than the last one."""
        self._outboxes[number].put(message)

    def next(self, number: int, wait: bool) -> WeightMessage | None:
        """Returns the message that a receiver gets next, or None; see :meth:`Outbox.next`."""
        return self._outboxes[number].next(wait)

    def acknowledge(self, number: int, count: int) -> None:
        """Records that a receiver has received the messages up to number ``count``."""
        self._outboxes[number].acknowledge(count)

    def wait_ack(self, number: int, count: int, timeout: float | None) -> bool:
        """Waits until a receiver has received messages up to ``count``; False after a timeout."""
        try:
            self._outboxes[number].wait_ack(timeout, count)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Records that nothing more will be sent."""
        for outbox in self._outboxes.values():
            outbox.close()


class RayChannel(Channel):
    """Channel through an actor, with the weights in Ray's object store.

    Args:
        number: number of the receiver.
        messenger: handle of the actor.
    """

    def __init__(self, number: int, messenger: Any) -> None:
        self._number = number
        self._messenger = messenger
        self._newest: WeightMessage | None = None

    @override
    def connect_sender(self) -> None:
        pass

    @override
    def send(self, message: WeightMessage) -> None:
        # Ray may reorder calls, so each message includes the newest weights.
        self._newest = message.after(self._newest)
        self._messenger.put.remote(self._number, self._newest)

    @override
    def wait_ack(self, timeout: float | None = None) -> None:
        if self._newest is None:
            return
        ref = self._messenger.wait_ack.remote(self._number, self._newest.count, timeout)
        if not import_ray().get(ref):
            raise TimeoutError(
                f"receiver {self._number} did not receive the weights within {timeout:.3g} s"
            )

    @override
    def close(self) -> None:
        with contextlib.suppress(Exception):
            # The connection to Ray may be gone.
            import_ray().get(self._messenger.close.remote())


def new_messenger(numbers: Sequence[int]) -> Any:
    """Starts the actor that keeps messages to receivers. The actor ends when the sender ends."""
    calls = _CALLS * len(numbers) + 1
    options = {"num_cpus": 0, "max_concurrency": calls, "max_restarts": 0}
    return import_ray().remote(_Messenger).options(**options).remote(list(numbers))


def joined(messenger: Any, number: int) -> Inbox:
    """Returns the receiver's end of a channel."""
    ray = import_ray()

    def receive_all() -> None:
        with contextlib.suppress(Exception):
            while (message := ray.get(messenger.next.remote(number, True))) is not None:
                inbox.put(message)
        inbox.end()

    first = ray.get(messenger.next.remote(number, False))
    inbox = Inbox(first, lambda count: messenger.acknowledge.remote(number, count))
    threading.Thread(target=receive_all, daemon=True).start()
    return inbox
