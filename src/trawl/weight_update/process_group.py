"""Weights for workers that are reached over process groups."""

from __future__ import annotations

from typing import Any

from trawl.weight_update.mail import MessageWeightSyncScheme
from trawl.weight_update.updaters import RemoteWeightUpdater


class DistributedWeightSyncScheme(MessageWeightSyncScheme):
    """Weights sent to the ranks of a collector, over the connections that it has to them.

    Args:
        backend: the kind of process group: ``"gloo"``.
        sync: accepted for compatibility; sending never waits, and a batch that begins after it
            has the new weights.
        timeout: accepted for compatibility: nothing is waited for.

    Raises:
        ValueError: for another kind of process group, or a time-out that is not above 0.

    Example:
        >>> from trawl.weight_update import DistributedWeightSyncScheme
        >>> DistributedWeightSyncScheme(timeout=60.0).timeout
        60.0
    """

    def __init__(self, backend: str = "gloo", sync: bool = True, timeout: float = 3600.0) -> None:
        from trawl.backends.process_group import check_name

        super().__init__()
        check_name(backend)
        if not timeout > 0:
            raise ValueError(f"timeout must be seconds above 0, but it is {timeout!r}")
        self.backend = backend
        self.sync = sync
        self.timeout = timeout


class DistributedWeightUpdater(RemoteWeightUpdater):
    """Brings weights to the ranks of a collector: an older way than a scheme.

    Workers have numbers from 0, as everywhere.

    Args:
        store: accepted for compatibility: the collector's connections are used.
        policy_weights: what is sent if nothing is pushed; None for the collector's policy.
        num_workers: number of workers; None for those of the collector.
        sync: accepted for compatibility: sending never waits.
    """

    def __init__(
        self,
        store: Any = None,
        policy_weights: Any = None,
        num_workers: int | None = None,
        sync: bool = True,
    ) -> None:
        super().__init__(policy_weights, num_workers)
        self.store = store
        self.sync = sync
