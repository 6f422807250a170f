"""Weights for workers that are reached over RPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trawl.weight_update.mail import MessageWeightSyncScheme
from trawl.weight_update.updaters import RemoteWeightUpdater


class RPCWeightSyncScheme(MessageWeightSyncScheme):
    """Weights sent to the nodes of a collector, over the connections that it has to them.

    Sending never waits, and a batch that begins after it has the new weights.

    Example:
        >>> from trawl.weight_update import RPCWeightSyncScheme
        >>> RPCWeightSyncScheme().strategy
        'tensordict'
    """

    def __init__(self) -> None:
        super().__init__()


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
