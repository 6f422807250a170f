"""Schemes that send weights to workers and other actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.extras.clusters.network.frames import writable
from trawl.extras.clusters.network.weights import NetworkWeightSyncScheme
from trawl.extras.clusters.ray.cluster import import_ray
from trawl.weights.messages import (
    Inbox,
    MessageChannel,
    Outbox,
    WeightCodec,
    WeightMessage,
    late,
)
from trawl.weights.scheme import TransportBackend

_STORE = "object_store"
_BACKENDS = (_STORE, "gloo")


class RayCodec(WeightCodec):
    """Puts weights into Ray's object store; messages carry a reference to them.

    Ray keeps the weights as long as a message may be read.
    """

    copies = True

    @override
    def encode(self, weights: NDArray[np.uint8]) -> Any:
        return import_ray().put(super().encode(weights))

    @override
    def decode(self, data: Any) -> Any:
        import ray

        return super().decode(writable(ray.get(data)))


class RayWeightSyncScheme(NetworkWeightSyncScheme):
    """Puts weights into Ray's object store once, and all workers read them there.

    The sender writes the weights once, however many workers there are. Ray copies them once to
    each node, and all workers of a node read the same memory. Without a collector, pass the scheme
    to your own actors as an argument of one of their methods. An actor notices when the sender
    ends. With the object store, the sender does not notice when an actor ends, so pass a timeout
    to ``wait_async``.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.
        backend: ``"object_store"``, or ``"gloo"`` to send the weights to each receiver separately.
            With ``"gloo"``, the weights go through the collector's connection to the receiver or,
            without a collector, through a connection of the scheme.
        timeout: with ``"gloo"`` and without a collector, seconds that a sender and a receiver wait
            for each other when they connect.

    Raises:
        ValueError: for another ``backend``.

    Examples:
        >>> from trawl.weight_update import RayWeightSyncScheme
        >>> RayWeightSyncScheme().strategy
        'tensordict'
    """

    transport = "trawl.extras.clusters.compat.network_transports:RayTransport"

    def __init__(
        self, strategy: str = "tensordict", backend: str = "object_store", *, timeout: float = 300.0
    ) -> None:
        super().__init__(strategy)
        if backend not in _BACKENDS:
            raise ValueError(
                f"backend must be one of {', '.join(map(repr, _BACKENDS))}, but it is "
                f"{backend!r}. (Weights are sent in CPU memory, so 'nccl' can't be used)"
            )
        self.backend = backend
        self.timeout = timeout
        # With the object store, without a collector: the actor that keeps the newest messages.
        self._messenger: Any = None

    @property
    def connection_info_name(self) -> str:
        """Name of the actor through which transports for this model find each other."""
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
        """Returns a :class:`~trawl.weight_update.RayTransport` to one of the user's actors.

        Args:
            remote_actor: handle of the actor.
            worker_idx: number of the receiver.
            remote_collector: older name of ``remote_actor``.
            **options: further arguments of the transport.
        """
        actor = remote_collector if remote_actor is None else remote_actor
        own = {"backend": self.backend, "connection_info_name": self.connection_info_name}
        return super().create_transport(
            remote_actor=actor, worker_idx=worker_idx, **{**own, **options}
        )

    @override
    def _meeting(self) -> tuple[str, int, float]:
        return import_ray().util.get_node_ip_address(), 0, self.timeout

    @override
    def _new_channels(self, workers: Sequence[int]) -> dict[int, MessageChannel]:
        if self.backend != _STORE:
            return super()._new_channels(workers)
        self._messenger = new_messenger(workers)
        return {worker: RayChannel(worker, self._messenger) for worker in workers}

    @override
    def _join(self, worker: int) -> Inbox:
        if self.backend != _STORE:
            return super()._join(worker)
        return joined(self._messenger, worker)

    @override
    def shutdown(self) -> None:
        super().shutdown()
        self._messenger = None

    @override
    def _codec(self) -> WeightCodec:
        return RayCodec() if self.backend == _STORE else super()._codec()


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

    def call(self, number: int, method: str, *given: Any) -> Any:
        """Calls a method of a receiver's :class:`Outbox`."""
        return getattr(self._outboxes[number], method)(*given)

    def close(self) -> None:
        """Records that nothing more will be sent."""
        for outbox in self._outboxes.values():
            outbox.close()


class RayChannel(MessageChannel):
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
        self._messenger.call.remote(self._number, "put", self._newest)

    @override
    def wait_ack(self, timeout: float | None = None) -> None:
        if self._newest is None:
            return
        wait = self._messenger.call.remote(self._number, "wait_ack", timeout, self._newest.count)
        try:
            import_ray().get(wait)
        except TimeoutError:
            raise late(self._number, timeout) from None

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
            while (message := ray.get(messenger.call.remote(number, "next"))) is not None:
                inbox.put(message)
        inbox.end()

    first = ray.get(messenger.call.remote(number, "next", False))
    inbox = Inbox(first, lambda count: messenger.call.remote(number, "acknowledge", count))
    threading.Thread(target=receive_all, daemon=True).start()
    return inbox
