"""Schemes and a transport that share weights with processes of the same machine."""

from __future__ import annotations

import contextlib
import pickle
import queue
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import reduction
from typing import Any

from tensordict import TensorDictBase
from typing_extensions import override

from trawl.weight_update.channel import channel_of
from trawl.weight_update.prepared import PreparedUpdate, ReceiverGroup, by_worker
from trawl.weight_update.scheme import WeightSyncScheme
from trawl.weight_update.store import Receiver, StoreReader, Version, WeightStore, WeightUpdate
from trawl.weight_update.strategy import WeightStrategy
from trawl.weight_update.tensors import Weights
from trawl.weight_update.transports import MPTransport, Transport, TransportBackend


class SharedMemTransport(Transport):
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
        self._store: WeightStore | None = WeightStore(1) if store is None else store
        self.reader: StoreReader = self._store.reader(index)
        self.index = index
        self.number = index if number is None else number
        self._group = ReceiverGroup((self.number,))
        self._ours: Wakeup | None
        self._theirs: Wakeup | None
        self._ours, self._theirs = Wakeup.pair()
        # With several receivers: their scheme, the weights that were registered, and the queues
        # through which each receiver gets its own transport.
        self._scheme: SharedMemWeightSyncScheme | None = None
        self._registered: list[TensorDictBase] = []
        self._queues: Mapping[int, Any] = {}
        self._own: SharedMemTransport | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._theirs is None:
            raise RuntimeError("a transport can't be sent to another process once it is connected")
        kept = ("reader", "index", "number", "_theirs", "_queues")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _store=None, _ours=None, _scheme=None, _own=None)

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
        for worker, transport in self._scheme.sender_transports.items():
            # A queue would pickle the transport later, when this end may already be closed.
            self._queues[worker].put(bytes(reduction.ForkingPickler.dumps(transport)))
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

    # --- the sender

    def connect_sender(self) -> None:
        """Closes this process's copy of the receiver's end, so the receiver's death is noticed."""
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None

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

    def notify(self) -> None:
        """Notifies the receiver that there are new weights."""
        if self._ours is not None:
            self._ours.wake()

    @override
    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits until all receivers have received the last weights.

        Raises:
            TimeoutError: if a receiver does not receive the weights in time.
            ConnectionError: if a receiver has ended.
        """
        if self._scheme is not None:
            self._scheme.wait_async(timeout)
            return
        store = self._sending()
        deadline = None if timeout is None else time.monotonic() + timeout
        while store.received(self.index) < store.count(self.index):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(
                    f"receiver {self.number} did not receive the weights within {timeout:.3g} s"
                )
            assert self._ours is not None
            try:
                self._ours.wait(left)
            except PeerGone:
                raise ConnectionError(
                    f"receiver {self.number} ended before it received the weights"
                ) from None

    def _sending(self) -> WeightStore:
        if self._store is None:
            raise RuntimeError(
                "this end of the transport only receives: send with the transport that it was "
                "made from"
            )
        return self._store

    # --- the receiver

    def connect_receiver(self) -> None:
        """Closes this process's copy of the sender's end, so the sender's death is noticed."""
        if self._ours is not None:
            self._ours.close()
            self._ours = None

    @override
    def _receive(self, timeout: float | None, use: Callable[[Weights], None]) -> None:
        own = self._own or self
        if own.wait(timeout):
            own.receive(lambda update: None if update.slot is None else use(update.copy()))

    @property
    def newer(self) -> bool:
        """True if there is an update that has not been received yet."""
        return self.reader.newer

    @property
    def count(self) -> int:
        """Number of updates that had been sent to the receiver when it last received one."""
        return self.reader.count

    def receive(self, use: Callable[[WeightUpdate], None]) -> WeightUpdate:
        """Receives the newest update, calls ``use`` with it, and returns it."""
        update = self.reader.receive(use)
        self.send_ack()
        return update

    def wait(self, timeout: float | None) -> bool:
        """Waits for new weights; returns False if none arrive in time.

        Raises:
            ConnectionError: if the sender has ended, and all its weights have been received.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.reader.newer:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            if self._theirs is None:
                raise RuntimeError("this end of the transport only sends: it can't receive")
            try:
                self._theirs.wait(left)
            except PeerGone:
                if not self.reader.newer:
                    raise ConnectionError("the sender of weights has ended") from None
        return True

    def send_ack(self, message: str = "updated") -> None:
        """Notifies the sender that the weights were received.

        Args:
            message: accepted for compatibility. The shared memory shows which weights were
                received.
        """
        if self._theirs is not None:
            self._theirs.wake()

    def close(self) -> None:
        """Closes the ends of the transport in this process."""
        if self._scheme is not None:
            self._scheme.shutdown()
        for end in (self._own, self._ours, self._theirs):
            if end is not None:
                end.close()


class SharedMemWeightSyncScheme(WeightSyncScheme, backends=("shared", "thread")):
    """Puts weights into shared memory, in one copy for all receivers.

    Sending makes one copy, however many receivers there are, and waits for none of them. Each
    receiver later copies the weights into its model, and always gets a complete set.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.
        sync: accepted for compatibility. Sending never waits, and batches that begin later use
            the new weights.
        per_worker_weights: whether receivers may get different weights, passed as a dict keyed by
            receiver number. Each receiver then has its own copy.

    Examples:
        >>> import torch
        >>> from trawl.collectors import MultiCollector
        >>> from trawl.weight_update import SharedMemWeightSyncScheme
        >>> def policy(observation):
        ...     return torch.zeros(*observation.shape[:-1], 1)
        >>> module = torch.nn.Linear(3, 1)
        >>> scheme = SharedMemWeightSyncScheme()
        >>> scheme.init_on_sender(model=module, num_workers=2)
        >>> scheme.connect()
        >>> scheme.send()
    """

    def __init__(
        self, strategy: str = "tensordict", sync: bool = True, per_worker_weights: bool = False
    ) -> None:
        super().__init__(strategy)
        self.sync = sync
        self.per_worker_weights = per_worker_weights
        # The store of each receiver, and the receiver's number among the store's readers.
        self._stores: dict[int, tuple[WeightStore, int]] = {}

    @override
    def _open(self, workers: Sequence[int]) -> None:
        for group in self._groups or ():
            for own in (
                [(i,) for i in group.workers] if self.per_worker_weights else [group.workers]
            ):
                store = WeightStore(len(own))
                self._stores |= {worker: (store, index) for index, worker in enumerate(own)}
        if self._host is None:
            # A collector has other means to wake its workers, and to notice their end.
            self._channels = {
                worker: SharedMemTransport(store, index, worker)
                for worker, (store, index) in self._stores.items()
            }

    @override
    def _join(self, worker: int) -> SharedMemTransport:
        own: SharedMemTransport = channel_of(self._channels, worker)
        for index, transport in self._channels.items():
            if index != worker:
                transport.close()
        self._channels = {worker: own}
        own.connect_receiver()
        return own

    @override
    def _check(self, update: PreparedUpdate) -> None:
        for worker in update.workers:
            self._stores[worker][0].check(update.layout, update.extra)

    @override
    def _publish(self, update: PreparedUpdate, version: Version) -> None:
        by_store: dict[WeightStore, list[int]] = {}
        for worker in update.workers:
            store, index = self._stores[worker]
            by_store.setdefault(store, []).append(index)
        for store, indices in by_store.items():
            store.publish(update.layout, update.write, update.extra, version, indices)
        if self._channels:
            for worker in update.workers:
                self._channels[worker].notify()

    @override
    def publish_version(self, version: Version, workers: Iterable[int]) -> None:
        for worker in workers:
            store, index = self._stores[worker]
            store.publish_version(version, [index])

    @override
    def receiver(self, worker: int) -> Receiver:
        store, index = self._stores[worker]
        return store.reader(index)

    @override
    def count(self, worker: int) -> int:
        store, index = self._stores[worker]
        return store.count(index)

    @override
    def last_sent(self, worker: int) -> Weights | None:
        store, index = self._stores[worker]
        return store.newest(index)

    @override
    def create_transport(self, **options: Any) -> TransportBackend:
        return SharedMemTransport(**options)

    @property
    @override
    def shared_transport(self) -> Any:
        stores = {id(store): store for store, _ in self._stores.values()}
        return next(iter(stores.values())) if len(stores) == 1 else None

    @override
    def shutdown(self) -> None:
        self._stores = {}
        super().shutdown()

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_stores": {}}


class MultiProcessWeightSyncScheme(
    SharedMemWeightSyncScheme, backends=("process", "multiprocessing")
):
    """Sends weights to each receiver separately, in a copy of its own.

    Use this scheme if receivers get different weights. If all receivers get the same weights,
    :class:`SharedMemWeightSyncScheme` copies the weights only once.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.
        sync: accepted for compatibility: sending never waits.
    """

    def __init__(self, strategy: str = "tensordict", sync: bool = True) -> None:
        super().__init__(strategy, sync, per_worker_weights=True)

    @override
    def create_transport(self, **options: Any) -> TransportBackend:
        """Returns an :class:`MPTransport` over the user's own queues.

        Args:
            **options: ``weight_queue``, ``ack_queue`` and ``timeout``.
        """
        return MPTransport(**options)


class PeerGone(ConnectionError):
    """Raised if the other side has ended."""


class Wakeup:
    """One end of a connection over which each side can wake the other side and notice its death."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Wakeup, Wakeup]:
        """Returns both ends of a new connection."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return _wakeup, (reduction.DupFd(self._end.fileno()),)

    def wake(self) -> None:
        """Wakes the other side, or does nothing if it has ended."""
        # If the socket is full, the other side has enough to wake it.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._end.send(b"!")

    def wait(self, timeout: float | None) -> None:
        """Waits until the other side wakes this one, but not longer than ``timeout`` seconds.

        Raises:
            PeerGone: if the other side has ended.
        """
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if not poll.poll(None if timeout is None else max(0.0, timeout) * 1000):
            return
        try:
            received = self._end.recv(1 << 12)
        except BlockingIOError:
            return
        except ConnectionResetError:
            received = b""
        if not received:
            raise PeerGone

    def close(self) -> None:
        """Closes this end."""
        self._end.close()

    def __del__(self) -> None:
        if hasattr(self, "_end"):
            self._end.close()


def _wakeup(descriptor: Any) -> Wakeup:
    return Wakeup(socket.socket(fileno=descriptor.detach()))
