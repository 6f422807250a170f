"""Schemes that send weights as messages, and a scheme that sends nothing.

Messages are used where memory can't be shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from trawl.weights.groups import PreparedUpdate, ReceiverGroup
from trawl.weights.messages import PLAIN, Inbox, MessageChannel, MessageStore, WeightCodec
from trawl.weights.scheme import TransportBackend, WeightSyncScheme


class MessageWeightSyncScheme(WeightSyncScheme):
    """Sends weights as messages, which are packed once for all receivers.

    A collector delivers the messages to its workers. Without a collector, the scheme opens
    channels of its own.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.
    """

    def _codec(self) -> WeightCodec:
        """Returns the codec of all messages."""
        return PLAIN

    def _new_channels(self, workers: Sequence[int]) -> dict[int, MessageChannel]:
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
            channels = self._new_channels(workers)
            self._channels = {**channels}
            store = MessageStore(
                lambda worker, message: channels[worker].send(message), self._codec()
            )
        else:
            store = MessageStore(partial(self._host.deliver, self.model_id or ""), self._codec())
        self.receivers.keep_in(store, {worker: worker for worker in workers})

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
        return {**super().__getstate__(), "_channels": {}}

    def add_receiver(self, worker: int, group: ReceiverGroup | None) -> None:
        """Adds a receiver, which is a worker of the scheme's collector.

        Args:
            worker: number of the receiver.
            group: a new group that contains only this receiver. If None, the receiver joins the
                first group, and starts with the newest weights of that group's first receiver.
        """
        (store,) = self.receivers.stores
        assert isinstance(store, MessageStore)
        self.receivers.keep_in(store, {worker: worker})
        if group is not None:
            self.receivers.add(group)
            return
        first = next(iter(self.receivers))
        first.workers = (*first.workers, worker)
        store.add(worker, like=first.workers[0])


class RPCWeightSyncScheme(MessageWeightSyncScheme):
    """Sends weights to the nodes of a collector, over the collector's connections to them.

    Sending never waits, and batches that begin later use the new weights.

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.

    Examples:
        >>> from trawl.weight_update import RPCWeightSyncScheme
        >>> RPCWeightSyncScheme().strategy
        'tensordict'
    """

    transport = "trawl.extras.clusters.compat.network_transports:RPCTransport"

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
        """Returns a :class:`~trawl.weight_update.RPCTransport` to a node of the user's.

        Args:
            collector_info: as in ``RPCTransport``.
            collector_rref: as in ``RPCTransport``.
            collector_class: as in ``RPCTransport``.
            worker_rank: as in ``RPCTransport``.
            **options: must be empty; any other argument raises an error.

        Raises:
            TypeError: for any other argument.
        """
        return super().create_transport(
            collector_info=collector_info,
            collector_rref=collector_rref,
            collector_class=collector_class,
            worker_rank=worker_rank,
            **options,
        )


class NoWeightSyncScheme(MessageWeightSyncScheme):
    """Sends nothing, for policies that never change, or that get their weights in another way."""

    transport = "trawl.compat.transports:NoTransport"

    @override
    def _new_channels(self, workers: Sequence[int]) -> dict[int, MessageChannel]:
        return {}

    @override
    def _join(self, worker: int) -> Inbox:
        return _EmptyInbox()

    @override
    def _check_fork(self) -> None:
        pass

    @override
    def prepare(self, weights: Any, workers: Sequence[int]) -> list[PreparedUpdate]:
        return []


class _EmptyInbox(Inbox):
    @override
    def wait(self, timeout: float | None) -> bool:
        return False
