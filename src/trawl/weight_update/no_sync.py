"""Scheme for policies whose weights are not sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from typing_extensions import override

from trawl.weight_update.channel import Inbox
from trawl.weight_update.messages import MessageWeightSyncScheme
from trawl.weight_update.prepared import PreparedUpdate
from trawl.weight_update.store import Version
from trawl.weight_update.tensors import Weights
from trawl.weight_update.transports import Transport, TransportBackend


class NoWeightSyncScheme(MessageWeightSyncScheme, backends=("none", "direct")):
    """Sends nothing. For policies that never change, or get their weights in another way."""

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
