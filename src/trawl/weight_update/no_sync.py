"""Scheme for policies whose weights are not sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from typing_extensions import override

from trawl.weight_update.prepared import PreparedUpdate
from trawl.weight_update.scheme import WeightSyncScheme
from trawl.weight_update.store import Receiver, Version, WeightUpdate
from trawl.weight_update.transports import TransportBackend


class NoWeightSyncScheme(WeightSyncScheme, backends=("none", "direct")):
    """Sends nothing. For policies that never change, or get their weights in another way."""

    @override
    def _open(self, workers: Sequence[int]) -> None:
        pass

    @override
    def _join(self, worker: int) -> _Nothing:
        return _Nothing()

    @override
    def prepare(self, weights: Any, workers: Sequence[int]) -> list[PreparedUpdate]:
        return []

    @override
    def _publish(self, update: PreparedUpdate, version: Version) -> None:
        pass

    @override
    def publish_version(self, version: Version, workers: Iterable[int]) -> None:
        pass

    @override
    def receiver(self, worker: int) -> Receiver:
        return _Nothing()

    @override
    def count(self, worker: int) -> int:
        return 0

    @override
    def create_transport(self, **options: Any) -> TransportBackend:
        return _Nothing()


class _Nothing:
    """Receiver, and transport, of weights that never come."""

    count = 0
    newer = False

    def wait(self, timeout: float | None) -> bool:
        return False

    def receive(self, use: Any) -> WeightUpdate:
        return WeightUpdate(0)

    def send_weights(self, weights: Any) -> None:
        pass

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: Any = None,
    ) -> None:
        pass
