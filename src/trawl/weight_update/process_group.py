"""Weights for workers that are reached over process groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trawl.weight_update.distributed_transport import DistributedTransport
from trawl.weight_update.lines import Inbox, Line, way_of
from trawl.weight_update.mail import MessageWeightSyncScheme
from trawl.weight_update.transports import TransportBackend
from trawl.weight_update.updaters import RemoteWeightUpdater

if TYPE_CHECKING:
    from trawl.backends.link import Address


class DistributedWeightSyncScheme(MessageWeightSyncScheme):
    """Sends weights over a network, by process groups.

    With a collector, weights travel over its connections to its ranks. Without a collector, the
    scheme makes a process group of two with each receiver, in any process on any machine.

    Args:
        backend: the kind of process group: ``"gloo"``.
        sync: accepted for compatibility. Sending never waits, and batches that begin later have
            the new weights.
        timeout: seconds that a sender and a receiver wait for each other when they connect.
        address: without a collector, address of the sender's machine, to which receivers connect.
            Only this machine can reach the default.
        port: without a collector, port at that address; 0 for any free port.

    Raises:
        ValueError: if ``backend`` is another kind of process group, or ``timeout`` is not above 0.

    Example:
        >>> from trawl.weight_update import DistributedWeightSyncScheme
        >>> DistributedWeightSyncScheme(timeout=60.0).timeout
        60.0
    """

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        timeout: float = 3600.0,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        from trawl.backends.link import check_name

        super().__init__()
        check_name(backend)
        if not timeout > 0:
            raise ValueError(f"timeout must be seconds above 0, but it is {timeout!r}")
        self.backend = backend
        self.sync = sync
        self.timeout = timeout
        self._place = address, port
        self._addresses: dict[int, Address] = {}

    @override
    def create_transport(self, **options: Any) -> TransportBackend:
        """Returns a :class:`DistributedTransport` to a rank of the user's own process group.

        Args:
            **options: ``weights_buffer``, ``store``, ``rank`` and ``sync``.
        """
        return DistributedTransport(**{"sync": self.sync, **options})

    @override
    def _new_lines(self, workers: Sequence[int]) -> dict[int, Line]:
        from trawl.weight_update.link_lines import Meeting

        lines = Meeting(*self._place, self.timeout).lines(workers)
        self._addresses = {worker: line.address for worker, line in lines.items()}
        return {**lines}

    @override
    def _join(self, worker: int) -> Inbox:
        from trawl.weight_update.link_lines import joined

        return joined(way_of(self._addresses, worker))


class DistributedWeightUpdater(RemoteWeightUpdater):
    """Sends weights to the ranks of a collector; newer code uses a weight-sync scheme.

    Workers are numbered from 0.

    Args:
        store: accepted for compatibility: the collector's connections are used.
        policy_weights: weights to send if none are pushed; None for the collector's policy.
        num_workers: number of workers; None for that of the collector.
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
