"""Interfaces of a transport of weights to one receiver, and the transport by queues."""

from __future__ import annotations

import queue
from typing import Any, Literal, Protocol, runtime_checkable

from trawl.weight_update.strategy import WeightStrategy, take_in
from trawl.weight_update.tensors import Weights, weights_of

#: Backends for which :meth:`WeightSyncScheme.from_backend` makes a scheme.
WeightSyncBackend = Literal[
    "none",
    "direct",
    "shared",
    "thread",
    "process",
    "multiprocessing",
    "distributed",
    "rpc",
    "ray",
]


@runtime_checkable
class TransportBackend(Protocol):
    """Interface of a transport to one receiver."""

    def send_weights(self, weights: Any) -> None:
        """Sends weights, in any form."""

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Receives and returns the newest weights, or None if none arrive in time.

        Args:
            timeout: seconds to wait; None waits as long as it takes.
            weights: tensors to copy the weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.
        """


@runtime_checkable
class InitialSyncTransport(Protocol):
    """Interface of a transport that connects both sides, and then sends the first weights."""

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connects the sender's end, and sends the first weights if there are any."""

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Connects the receiver's end, then receives and returns the first weights.

        Args:
            worker_idx: number of the receiver.
            weights: tensors to copy the weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.
        """


class MPTransport:
    """Transport to a receiver by queues of the user's own, such as ``multiprocessing.Queue``.

    Args:
        weight_queue: queue that carries weights to the receiver (``put`` and ``get``).
        ack_queue: queue that carries acknowledgements back to the sender; None for none.
        timeout: seconds to wait for weights or an acknowledgement, if a call gives no time-out.
    """

    def __init__(self, weight_queue: Any, ack_queue: Any = None, timeout: float = 10.0) -> None:
        self.weight_queue = weight_queue
        self.ack_queue = ack_queue
        self.timeout = timeout

    def send_weights(self, weights: Any) -> None:
        """Sends a copy of the weights, and waits for the acknowledgement if there is a queue."""
        self.send_weights_async(weights)
        self.wait_ack()

    def send_weights_async(self, weights: Any, model_id: str = "policy") -> None:
        """Sends a copy of the weights, and doesn't wait for the acknowledgement.

        Args:
            weights: weights in any form.
            model_id: accepted for compatibility: a queue carries the weights of one model.
        """
        given = weights_of(weights)
        copies = {name: t.detach().cpu().clone() for name, t in given.tensors.items()}
        self.weight_queue.put((copies, given.extra))

    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits for the receiver's acknowledgement; without an ``ack_queue``, returns at once.

        Raises:
            TimeoutError: if none arrives in time.
        """
        if self.ack_queue is None:
            return
        limit = self.timeout if timeout is None else timeout
        try:
            self.ack_queue.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError(f"the receiver took no weights within {limit:g} s") from None

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Receives and returns the next weights, or None if none arrive in time."""
        try:
            found = self.weight_queue.get(timeout=self.timeout if timeout is None else timeout)
        except queue.Empty:
            return None
        taken = take_in(Weights(*found), model if model is not None else weights, strategy)
        self.send_ack()
        return taken

    def setup_connection_and_weights_on_sender(self) -> None:
        """Does nothing: the queues exist already, and ``send_weights`` sends the first weights."""

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Receives and returns the first weights, or None if none arrive in time.

        Args:
            worker_idx: number of the receiver.
            weights: tensors to copy the weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.
        """
        return self.receive_weights(weights=weights, model=model, strategy=strategy)

    def send_ack(self) -> None:
        """Tells the sender that weights were taken."""
        if self.ack_queue is not None:
            self.ack_queue.put(True)
