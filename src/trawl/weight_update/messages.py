"""Schemes that send weights as messages, and a scheme that sends nothing.

Messages are used where memory can't be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.weight_update.channel import Channel, Inbox, WeightMessage
from trawl.weight_update.framework_transports import RPCTransport
from trawl.weight_update.layout import FlatLayout, Slot
from trawl.weight_update.prepared import PreparedUpdate, ReceiverGroup
from trawl.weight_update.scheme import WeightSyncScheme
from trawl.weight_update.store import Receiver, Version
from trawl.weight_update.tensors import Weights
from trawl.weight_update.transports import Transport, TransportBackend


class MessageWeightSyncScheme(WeightSyncScheme):
    """Sends weights as messages, which are packed once for all receivers.

    A collector delivers the messages to its workers. Without a collector, the scheme opens
    channels of its own.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.
    """

    def __init__(self, strategy: str = "tensordict") -> None:
        super().__init__(strategy)
        # Newest message to each worker. A replacement of the worker starts with this message.
        self._newest: dict[int, WeightMessage] = {}
        self._updates = 0

    def _new_channels(self, workers: Sequence[int]) -> dict[int, Channel]:
        """Returns channels to receivers that are not workers of a collector.

        Raises:
            RuntimeError: if this scheme has no channels of its own.
        """
        raise RuntimeError(
            f"{type(self).__name__} needs a collector, which carries the weights. Between your "
            "own processes, use SharedMemWeightSyncScheme or DistributedWeightSyncScheme"
        )

    @override
    def _join(self, worker: int) -> Inbox:
        raise NotImplementedError(f"{type(self).__name__} has no channels of its own")

    @override
    def _open(self, workers: Sequence[int]) -> None:
        if self._host is None:
            self._channels = {**self._new_channels(workers)}

    @override
    def _check_fork(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: a receiver can't be in a process that was forked from the "
            "sender's process, which has threads. Start the process with "
            "multiprocessing.get_context('spawn') or 'forkserver', or use "
            "SharedMemWeightSyncScheme"
        )

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_newest": {}, "_channels": {}}

    def add_receiver(self, worker: int, group: ReceiverGroup | None) -> None:
        """Adds a receiver, which is a worker of the scheme's collector.

        Args:
            worker: number of the receiver.
            group: a new group that contains only this receiver. If None, the receiver joins the
                first group, and starts with the newest weights of that group's first receiver.
        """
        assert self._groups is not None
        if group is not None:
            self._groups.add(group)
            return
        first = next(iter(self._groups))
        newest = self._newest.get(first.workers[0])
        first.workers = (*first.workers, worker)
        if newest is not None:
            self._newest[worker] = replace(newest, count=1)

    @override
    def _publish(self, update: PreparedUpdate, version: Version) -> None:
        self._updates += 1
        left = list(update.workers)
        while left:
            before = self._newest.get(left[0])
            message, complete = self._filled(update, before)
            # Missing tensors are copied from a worker's last message, so workers with different
            # last messages get different messages now.
            known = None if before is None else before.data
            alike = [i for i in left if complete or self._data(i) is known]
            for worker in alike:
                self._send(worker, replace(message, count=self.count(worker) + 1, version=version))
            left = [i for i in left if i not in alike]

    def _filled(
        self, update: PreparedUpdate, before: WeightMessage | None
    ) -> tuple[WeightMessage, bool]:
        """Returns a message with weights, and True if the message needs nothing from ``before``."""
        buffer = self._buffer(update.layout.nbytes)
        slot = Slot(update.layout, buffer)
        update.write(slot, self._updates)
        slot.extra_number = self._updates if update.extra else 0
        more = b"" if update.extra or before is None else before.extra
        complete = slot.complete and not more
        if not complete and before is not None and before.layout is not None:
            slot.complete_by(Slot(before.layout, before.opened()))
        return self._message(update.layout, buffer, update.extra or more), complete

    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """Returns new memory for weights. Messages keep this memory, so it can't be reused."""
        return np.empty(nbytes, dtype=np.uint8)

    def _message(self, layout: FlatLayout, buffer: Any, extra: bytes) -> WeightMessage:
        """Returns the message for all workers, still without its count and version."""
        return WeightMessage(0, None, layout, buffer, extra)

    def _data(self, worker: int) -> Any:
        known = self._newest.get(worker)
        return None if known is None else known.data

    @override
    def publish_version(self, version: Version, workers: Iterable[int]) -> None:
        for worker in workers:
            self._send(worker, WeightMessage(self.count(worker) + 1, version))

    def _send(self, worker: int, message: WeightMessage) -> None:
        # A worker that starts later needs the earlier weights, too.
        self._newest[worker] = message.after(self._newest.get(worker))
        if self._host is None:
            self._channels[worker].send(message)
        else:
            assert self.model_id is not None
            self._host.deliver(self.model_id, worker, message)

    @override
    def receiver(self, worker: int) -> Receiver:
        return Inbox(self._newest.get(worker))

    @override
    def last_sent(self, worker: int) -> Weights | None:
        known = self._newest.get(worker)
        return None if known is None or known.layout is None else known.update().copy()

    @override
    def count(self, worker: int) -> int:
        known = self._newest.get(worker)
        return 0 if known is None else known.count


class RPCWeightSyncScheme(MessageWeightSyncScheme, backends=("rpc",)):
    """Sends weights to the nodes of a collector, over the collector's connections to them.

    Sending never waits, and batches that begin later use the new weights.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.

    Examples:
        >>> from trawl.weight_update import RPCWeightSyncScheme
        >>> RPCWeightSyncScheme().strategy
        'tensordict'
    """

    @override
    def create_transport(
        self,
        *,
        collector_info: Any = None,
        collector_rref: Any = None,
        collector_class: Any = None,
        worker_rank: int | None = None,
        **options: Any,
    ) -> TransportBackend:
        """Returns an :class:`RPCTransport` to a node that the user has started.

        Args:
            collector_info: as in :class:`RPCTransport`.
            collector_rref: as in :class:`RPCTransport`.
            collector_class: as in :class:`RPCTransport`.
            worker_rank: as in :class:`RPCTransport`.
            **options: must be empty; any other argument raises an error.

        Raises:
            TypeError: for any other argument.
        """
        return RPCTransport(collector_info, collector_rref, collector_class, worker_rank, **options)


class NoWeightSyncScheme(MessageWeightSyncScheme, backends=("none", "direct")):
    """Sends nothing, for policies that never change, or that get their weights in another way."""

    @override
    def _open(self, workers: Sequence[int]) -> None:
        pass

    @override
    def _join(self, worker: int) -> Inbox:
        return _EmptyInbox()

    @override
    def _check_fork(self) -> None:
        pass

    @override
    def prepare(self, weights: Any, workers: Sequence[int]) -> list[PreparedUpdate]:
        return []

    @override
    def publish_version(self, version: Version, workers: Iterable[int]) -> None:
        pass

    @override
    def create_transport(self, **options: Any) -> TransportBackend:
        return _NoTransport()


class _EmptyInbox(Inbox):
    @override
    def wait(self, timeout: float | None) -> bool:
        return False


class _NoTransport(Transport):
    @override
    def send_weights_async(self, weights: Any) -> None:
        pass

    @override
    def wait_ack(self) -> None:
        pass

    @override
    def _receive(self, timeout: float | None, use: Callable[[Weights], None]) -> None:
        pass
