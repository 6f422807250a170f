"""Transports of weights to one receiver, for programs that send weights themselves."""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from typing_extensions import override

from trawl.weight_update.strategy import WeightStrategy, load_received
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
            timeout: seconds to wait; None for no limit.
            weights: a TensorDict or dict of tensors to copy the received weights into.
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
            weights: a TensorDict or dict of tensors to copy the received weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.
        """


class Transport(ABC):
    """Base class of the transports."""

    # Module into which weights are loaded if a call has no other destination.
    _model: Any = None

    def send_weights(self, weights: Any) -> None:
        """Sends weights, in any form, and waits until the receiver has them."""
        self.send_weights_async(weights)
        self.wait_ack()

    @abstractmethod
    def send_weights_async(self, weights: Any) -> None:
        """Sends weights, in any form; :meth:`wait_ack` waits until the receiver has them."""

    @abstractmethod
    def wait_ack(self) -> None:
        """Waits until the receiver has the last weights."""

    @abstractmethod
    def _receive(self, timeout: float | None, use: Callable[[Weights], None]) -> None:
        """Waits for weights, calls ``use`` with them if they arrive, and acknowledges them."""

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
            timeout: seconds to wait; None for no limit.
            weights: a TensorDict or dict of tensors to copy the received weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.

        Raises:
            ConnectionError: if the sender has ended, and all its weights have been received.
        """
        return self._loaded(partial(self._receive, timeout), model, weights, strategy)

    def setup_connection_and_weights_on_sender(self) -> None:  # noqa: B027
        """Does nothing: ``send_weights`` connects both sides, and sends the first weights."""

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
            weights: a TensorDict or dict of tensors to copy the received weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.
        """
        return self._loaded(partial(self._receive_first, worker_idx), model, weights, strategy)

    def _receive_first(self, worker_idx: int, use: Callable[[Weights], None]) -> None:
        """Connects the receiver's end, and handles the first weights like :meth:`_receive`."""
        self._receive(None, use)

    def _loaded(
        self,
        receive: Callable[[Callable[[Weights], None]], None],
        model: Any,
        weights: Any,
        strategy: WeightStrategy | None,
    ) -> Any:
        into = next((one for one in (model, weights, self._model) if one is not None), None)
        found: list[Any] = []
        receive(lambda given: found.append(load_received(given, into, strategy)))
        return found[0] if found else None


class MPTransport(Transport):
    """Transport to a receiver through the user's own queues, such as ``multiprocessing.Queue``.

    The transport delivers every update in order, and skips none.

    Args:
        weight_queue: queue that carries weights to the receiver (``put`` and ``get``).
        ack_queue: queue that carries acknowledgements back to the sender; None to send no
            acknowledgements.
        timeout: default time limit, in seconds, for weights or an acknowledgement.
    """

    def __init__(self, weight_queue: Any, ack_queue: Any = None, timeout: float = 10.0) -> None:
        self.weight_queue = weight_queue
        self.ack_queue = ack_queue
        self.timeout = timeout

    @override
    def send_weights_async(self, weights: Any, model_id: str = "policy") -> None:
        """Sends a copy of the weights, and doesn't wait for the acknowledgement.

        Args:
            weights: weights in any form.
            model_id: accepted for compatibility. A queue carries the weights of only one model.
        """
        copied = weights_of(weights).copy()
        self.weight_queue.put((copied.tensors, copied.extra))

    @override
    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits for the receiver's acknowledgement; without an ``ack_queue``, returns at once.

        Raises:
            TimeoutError: if no acknowledgement arrives in time.
        """
        if self.ack_queue is None:
            return
        limit = self.timeout if timeout is None else timeout
        try:
            self.ack_queue.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError(f"the weights were not received within {limit:g} s") from None

    @override
    def _receive(self, timeout: float | None, use: Callable[[Weights], None]) -> None:
        try:
            found = self.weight_queue.get(timeout=self.timeout if timeout is None else timeout)
        except queue.Empty:
            return
        use(Weights(*found))
        self.send_ack()

    def send_ack(self) -> None:
        """Notifies the sender that weights were received."""
        if self.ack_queue is not None:
            self.ack_queue.put(True)
