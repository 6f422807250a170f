"""Schemes and a channel that share weights with processes of the same machine."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from pkgutil import resolve_name
from typing import Any

from typing_extensions import override

from trawl.weights.groups import PreparedUpdate, entry_of
from trawl.weights.messages import Channel, late, lost
from trawl.weights.scheme import WeightSyncScheme
from trawl.weights.store import StoreReader, Version, WeightStore, WeightUpdate


class SharedChannel(Channel):
    """Channel through shared memory. The newest weights replace earlier ones.

    The sender makes the object, and passes it to the receiver's process as an argument of
    ``multiprocessing.Process``. There, the object is the receiver's end.

    Args:
        store: shared memory in which weights are published.
        index: number of the receiver among the store's readers.
        number: number of the receiver in error messages; ``index`` by default.
    """

    def __init__(self, store: WeightStore, index: int = 0, number: int | None = None) -> None:
        self._store: WeightStore | None = store
        self.reader: StoreReader = store.reader(index)
        self.index = index
        self.number = index if number is None else number
        self._ours: Wakeup | None
        self._theirs: Wakeup | None
        self._ours, self._theirs = Wakeup.pair()

    def __getstate__(self) -> dict[str, Any]:
        if self._theirs is None:
            raise RuntimeError("a transport can't be sent to another process once it is connected")
        kept = ("reader", "index", "number", "_theirs")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _store=None, _ours=None)

    # --- the sender

    @override
    def connect_sender(self) -> None:
        """Closes this process's copy of the receiver's end, so the receiver's death is noticed."""
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None

    def notify(self) -> None:
        """Notifies the receiver that there are new weights."""
        if self._ours is not None:
            self._ours.wake()

    @override
    def wait_ack(self, timeout: float | None = None) -> None:
        store = self._sending()
        deadline = None if timeout is None else time.monotonic() + timeout
        while store.received(self.index) < store.count(self.index):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise late(self.number, timeout)
            assert self._ours is not None
            try:
                self._ours.wait(left)
            except PeerGone:
                raise lost(self.number) from None

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
        self.acknowledge()
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

    def acknowledge(self) -> None:
        """Notifies the sender that the weights were received."""
        if self._theirs is not None:
            self._theirs.wake()

    @override
    def close(self) -> None:
        """Closes the ends of the channel in this process."""
        for end in (self._ours, self._theirs):
            if end is not None:
                end.close()


class SharedMemWeightSyncScheme(WeightSyncScheme):
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

    transport = "trawl.compat.transports:SharedMemTransport"

    def __init__(
        self, strategy: str = "tensordict", sync: bool = True, per_worker_weights: bool = False
    ) -> None:
        super().__init__(strategy)
        self.sync = sync
        self.per_worker_weights = per_worker_weights

    @override
    def _open(self, workers: Sequence[int]) -> None:
        for group in self.receivers:
            for own in (
                [(i,) for i in group.workers] if self.per_worker_weights else [group.workers]
            ):
                store = WeightStore(len(own))
                self.receivers.keep_in(store, {worker: i for i, worker in enumerate(own)})
                if self._host is None:
                    # A collector has other means to wake its workers, and to notice their end.
                    channel = resolve_name(SharedMemWeightSyncScheme.transport)
                    self._channels |= {own[i]: channel(store, i, own[i]) for i in range(len(own))}

    @override
    def _join(self, worker: int) -> SharedChannel:
        own: SharedChannel = entry_of(self._channels, worker)
        for index, channel in self._channels.items():
            if index != worker:
                channel.close()
        self._channels = {worker: own}
        own.connect_receiver()
        return own

    @override
    def commit(self, prepared: Sequence[PreparedUpdate], version: Version) -> None:
        super().commit(prepared, version)
        for update in prepared if self._channels else ():
            for worker in update.workers:
                self._channels[worker].notify()

    @property
    @override
    def shared_transport(self) -> Any:
        stores = self.receivers.stores
        return stores[0] if len(stores) == 1 else None


class MultiProcessWeightSyncScheme(SharedMemWeightSyncScheme):
    """Sends weights to each receiver separately, in a copy of its own.

    Use this scheme if receivers get different weights. If all receivers get the same weights,
    :class:`SharedMemWeightSyncScheme` copies the weights only once.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.
        sync: accepted for compatibility: sending never waits.
    """

    transport = "trawl.compat.transports:MPTransport"

    def __init__(self, strategy: str = "tensordict", sync: bool = True) -> None:
        super().__init__(strategy, sync, per_worker_weights=True)


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
