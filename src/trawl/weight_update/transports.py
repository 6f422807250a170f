"""The interfaces of a way of weights to one receiver, and the way by queues."""

from __future__ import annotations

import queue
from typing import Any, Literal, Protocol, runtime_checkable

from trawl.weight_update.strategy import WeightStrategy, take_in
from trawl.weight_update.tensors import Weights, weights_of

#: Places of workers that :meth:`WeightSyncScheme.from_backend` knows a scheme for.
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
    """What a way to a receiver can do."""

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
        """Takes the newest weights; None if none came in time.

        Args:
            timeout: seconds to wait; None waits as long as it takes.
            weights: tensors to put them into.
            model: a module to put them into.
            strategy: the form in which they are returned, and how they are put there.
        """


@runtime_checkable
class InitialSyncTransport(Protocol):
    """A way to a receiver that is set up on both sides, and then brings the first weights."""

    def setup_connection_and_weights_on_sender(self) -> None:
        """Connects the sender's end, and sends the first weights, if there are some."""

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Connects the receiver's end, and takes the first weights, which it returns.

        Args:
            worker_idx: the number of the receiver.
            weights: tensors to put the weights into.
            model: a module to put them into.
            strategy: the form in which they are returned, and how they are put there.
        """


class MPTransport:
    """The way to a receiver by queues of the user's: ``multiprocessing.Queue``, for example.

    Args:
        weight_queue: takes weights to the receiver (``put`` and ``get``).
        ack_queue: takes the receiver's answers back, or None if there are none.
        timeout: seconds that are waited for weights or an answer, if a call names no others.
    """

    def __init__(self, weight_queue: Any, ack_queue: Any = None, timeout: float = 10.0) -> None:
        self.weight_queue = weight_queue
        self.ack_queue = ack_queue
        self.timeout = timeout

    def send_weights(self, weights: Any) -> None:
        """Sends a copy of the weights, and waits for the answer if there is a queue for that."""
        self.send_weights_async(weights)
        self.wait_ack()

    def send_weights_async(self, weights: Any, model_id: str = "policy") -> None:
        """Sends a copy of the weights, and doesn't wait for the answer.

        Args:
            weights: in any form.
            model_id: accepted for compatibility: a queue brings the weights of one model.
        """
        given = weights_of(weights)
        copies = {name: t.detach().cpu().clone() for name, t in given.tensors.items()}
        self.weight_queue.put((copies, given.extra))

    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits for the receiver's answer.

        Raises:
            TimeoutError: if there is none in time.
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
        """Takes the next weights; None if none came in time."""
        try:
            found = self.weight_queue.get(timeout=self.timeout if timeout is None else timeout)
        except queue.Empty:
            return None
        taken = take_in(Weights(*found), model if model is not None else weights, strategy)
        self.send_ack()
        return taken

    def setup_connection_and_weights_on_sender(self) -> None:
        """Does nothing: the queues are there, and the first weights come by ``send_weights``."""

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Takes the first weights, and returns them; None if none came in time.

        Args:
            worker_idx: the number of the receiver.
            weights: tensors to put the weights into.
            model: a module to put them into.
            strategy: the form in which they are returned, and how they are put there.
        """
        return self.receive_weights(weights=weights, model=model, strategy=strategy)

    def send_ack(self) -> None:
        """Tells the sender that weights were taken."""
        if self.ack_queue is not None:
            self.ack_queue.put(True)
