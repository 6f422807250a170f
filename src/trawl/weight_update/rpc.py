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
    """Sends weights to the nodes of a collector, over the collector's connections to them.

    Sending never waits, and batches that begin later have the new weights.

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
        """Returns an :class:`RPCTransport` to a node of the user's own.

        Args:
            collector_info: as in :class:`RPCTransport`.
            collector_rref: as in :class:`RPCTransport`.
            collector_class: as in :class:`RPCTransport`.
            worker_rank: as in :class:`RPCTransport`.
            **options: no further arguments are accepted.

        Raises:
            TypeError: for any other argument.
        """
        return RPCTransport(collector_info, collector_rref, collector_class, worker_rank, **options)


class RPCWeightUpdater(RemoteWeightUpdater):
    """Sends weights to the nodes of a collector; newer code uses a weight-sync scheme.

    Args:
        collector_infos: accepted for compatibility: the collector knows its nodes.
        collector_class: accepted for compatibility.
        collector_rrefs: accepted for compatibility.
        policy_weights: weights to send if none are pushed; None for the collector's policy.
        num_workers: number of workers; None for that of the collector.
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
