"""Weights for workers that are reached over RPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from trawl.weight_update.mail import MessageWeightSyncScheme
from trawl.weight_update.rpc_transport import RPCTransport
from trawl.weight_update.transports import TransportBackend
from trawl.weight_update.updaters import RemoteWeightUpdater


class RPCWeightSyncScheme(MessageWeightSyncScheme):
    """Weights sent to the nodes of a collector, over the connections that it has to them.

    Sending never waits, and a batch that begins after it has the new weights.

    Args:
        strategy: the form in which weights are returned.

    Example:
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
        """Makes a way to a node of the user's own.

        Args:
            collector_info: as :class:`RPCTransport` takes it, as are the others.
            collector_rref: as that.
            collector_class: as that.
            worker_rank: as that.
            **options: none.

        Raises:
            TypeError: for any other argument.
        """
        return RPCTransport(collector_info, collector_rref, collector_class, worker_rank, **options)


class RPCWeightUpdater(RemoteWeightUpdater):
    """Brings weights to the nodes of a collector: an older way than a scheme.

    Args:
        collector_infos: accepted for compatibility, as are the next two: the collector knows its
            nodes.
        collector_class: as that.
        collector_rrefs: as that.
        policy_weights: what is sent if nothing is pushed; None for the collector's policy.
        num_workers: number of workers; None for those of the collector.
    """

    def __init__(
        self,
        collector_infos: Sequence[Any] | None = None,
        collector_class: Any = None,
        collector_rrefs: Sequence[Any] | None = None,
        policy_weights: Any = None,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(policy_weights, num_workers)
        self.collector_infos = collector_infos
        self.collector_class = collector_class
        self.collector_rrefs = collector_rrefs
