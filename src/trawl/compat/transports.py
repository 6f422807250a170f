"""Transports of weights to one receiver, for programs that send weights themselves."""

from __future__ import annotations

import pickle
import queue
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import reduction
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDictBase
from typing_extensions import override

from trawl.weights.groups import ReceiverGroup, by_worker
from trawl.weights.shared import SharedChannel, SharedMemWeightSyncScheme
from trawl.weights.store import WeightStore
from trawl.weights.strategy import WeightStrategy
from trawl.weights.tensors import Weights, weights_of


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


def load_received(weights: Weights, into: Any, strategy: WeightStrategy | None) -> Any:
    """Loads received weights into a model or tensors, if ``into`` is not None.

    Args:
        weights: the received weights.
        into: a module, a TensorDict or a dict of tensors; or None.
        strategy: determines how weights are loaded, and in which form they are returned.

    Returns:
        The weights in the form of ``strategy``.
    """
    form = strategy or WeightStrategy()
    if into is not None:
        form.apply_weights(into, weights)
    return weights.in_form(form.extract_as)


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


class SharedMemTransport(SharedChannel, Transport):
    """Transport to a receiver through shared memory. The newest weights replace earlier ones.

    Args:
        store: shared memory in which weights are published; by default, new memory.
        index: number of the receiver among the store's readers.
        number: number of the receiver in error messages; ``index`` by default.

    The sender makes the object, and passes it to the receiver's process as an argument of
    ``multiprocessing.Process``. There, the object is the receiver's end. If one object has to serve
    several receivers, call :meth:`register_weights` first.
    """

    def __init__(
        self, store: WeightStore | None = None, index: int = 0, number: int | None = None
    ) -> None:
        super().__init__(WeightStore(1) if store is None else store, index, number)
        self._group = ReceiverGroup((self.number,))
        # With several receivers: their scheme, the weights that were registered, and the queues
        # through which each receiver gets its own channel.
        self._scheme: SharedMemWeightSyncScheme | None = None
        self._registered: list[TensorDictBase] = []
        self._queues: Mapping[int, Any] = {}
        self._own: SharedChannel | None = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_queues": self._queues}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_scheme": None, "_own": None})

    # --- several receivers

    def register_weights(
        self,
        params_map: Mapping[int, TensorDictBase],
        init_queues: Mapping[int, Any],
        per_worker: bool = False,
    ) -> None:
        """Makes this the transport to several receivers.

        Args:
            params_map: first weights of each receiver, keyed by receiver number. Receivers
                with the same TensorDict share one copy in shared memory.
            init_queues: queues (``multiprocessing.Queue``) through which receivers get their ends,
                keyed by receiver number.
            per_worker: whether each receiver gets its own copy, even if several receivers have the
                same weights now.

        Raises:
            ValueError: if a receiver has no queue.
        """
        missing = sorted(set(params_map) - set(init_queues))
        if missing:
            raise ValueError(f"init_queues has no queue for receivers {missing}")
        self._scheme = SharedMemWeightSyncScheme(per_worker_weights=per_worker)
        self._scheme.init_on_sender(params_map=params_map)
        self._registered = list({id(one): one for one in params_map.values()}.values())
        self._queues = dict(init_queues)

    @property
    def unique_weights(self) -> list[TensorDictBase]:
        """First weights that were registered, with each TensorDict only once.

        Raises:
            RuntimeError: if no weights were registered.
        """
        if self._scheme is None:
            raise RuntimeError("call register_weights() before reading unique_weights")
        return self._registered

    @override
    def setup_connection_and_weights_on_sender(self) -> None:
        """Sends the first weights of all receivers, and sends each receiver its end.

        If no weights were registered, this method only calls :meth:`connect_sender`.
        """
        if self._scheme is None:
            self.connect_sender()
            return
        for worker, channel in self._scheme.sender_transports.items():
            # A queue would pickle the channel later, when this end may already be closed.
            self._queues[worker].put(bytes(reduction.ForkingPickler.dumps(channel)))
        self._scheme.connect()
        self._scheme.send()

    @override
    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
        timeout: float = 60.0,
    ) -> Any:
        """Connects this end, then receives and returns the first weights.

        Args:
            worker_idx: number of the receiver, if there are several.
            weights: a TensorDict or dict of tensors to copy the received weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.
            timeout: seconds to wait for the sender, and then for the weights.

        Raises:
            ValueError: if the sender registered no such receiver.
            TimeoutError: if the sender does not connect in time.
        """
        if not self._queues:
            self.connect_receiver()
        elif worker_idx is None or worker_idx not in self._queues:
            raise ValueError(
                f"worker_idx is {worker_idx}, but the receivers are {sorted(self._queues)}"
            )
        else:
            if self._scheme is not None and not self._scheme.sends:
                # This process was forked from the sender's, so these ends are only copies.
                self._scheme.shutdown()
                self._scheme = None
            try:
                self._own = pickle.loads(self._queues[worker_idx].get(timeout=timeout))
            except queue.Empty:
                raise TimeoutError(
                    f"the sender of weights did not connect within {timeout:g} s"
                ) from None
            self._own.connect_receiver()
        return self.receive_weights(timeout, weights=weights, model=model, strategy=strategy)

    # --- sending and receiving

    @override
    def send_weights(self, weights: Any, worker_ids: Sequence[int] | None = None) -> None:
        """Sends weights without waiting until they are received.

        Args:
            weights: weights in any form; with several receivers, also a dict keyed
                by receiver number.
            worker_ids: with several receivers, numbers of the receivers that get the weights; None
                for all.
        """
        if self._scheme is not None:
            own = by_worker(weights)
            chosen = set(own if worker_ids is None else worker_ids)
            unknown = chosen - set(self._scheme.receivers.workers) | chosen - set(own or chosen)
            if unknown:
                missing = sorted(unknown)
                raise ValueError(f"these receivers don't exist, or have no weights: {missing}")
            self._scheme.send(weights, worker_ids)
            return
        store = self._sending()
        update = self._group.prepare(self._group.workers, weights, store.layout)
        store.publish(update.layout, update.write, update.extra, None, [self.index])
        self.notify()

    @override
    def send_weights_async(self, weights: Any) -> None:
        """Sends weights to all receivers, and never waits."""
        self.send_weights(weights)

    @override
    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits until all receivers have received the last weights.

        Raises:
            TimeoutError: if a receiver does not receive the weights in time.
            ConnectionError: if a receiver has ended.
        """
        if self._scheme is None:
            super().wait_ack(timeout)
        else:
            self._scheme.wait_async(timeout)

    @override
    def _receive(self, timeout: float | None, use: Callable[[Weights], None]) -> None:
        own = self._own or self
        if own.wait(timeout):
            own.receive(lambda update: None if update.slot is None else use(update.copy()))

    def send_ack(self, message: str = "updated") -> None:
        """Notifies the sender that the weights were received.

        Args:
            message: accepted for compatibility. The shared memory shows which weights were
                received.
        """
        self.acknowledge()

    @override
    def close(self) -> None:
        """Closes the ends of the transport in this process."""
        if self._scheme is not None:
            self._scheme.shutdown()
        if self._own is not None:
            self._own.close()
        super().close()


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


class NoTransport(Transport):
    """Transport that sends nothing, for a scheme that sends nothing."""

    @override
    def send_weights_async(self, weights: Any) -> None:
        pass

    @override
    def wait_ack(self) -> None:
        pass

    @override
    def _receive(self, timeout: float | None, use: Callable[[Weights], None]) -> None:
        pass
