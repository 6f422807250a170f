"""Weight updater for the collectors of a Ray cluster."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tensordict import TensorDictBase
from typing_extensions import override

from trawl.weight_update.updaters import RemoteWeightUpdater


class RayWeightUpdater(RemoteWeightUpdater):
    """Sends weights to the collectors of a Ray cluster. New code should use a weight-sync scheme.

    Without arguments, the updater serves the
    :class:`~trawl.collectors.distributed.RayCollector` that it is passed to.

    Args:
        policy_weights: weights to send if none are pushed; None for the collector's policy.
        remote_collectors: handles of actors with a method ``update_policy_weights_``, such as the
            ``remote_collectors`` of a collector. The updater then calls these actors, and doesn't
            wait for the calls. If a call fails, the next push or :meth:`close` raises its error,
            or only warns if the actor has died.
        max_interval: number of batches that a worker has to deliver, from its start or its last
            update on, before it gets an update; earlier updates skip the worker. If the updater
            belongs to no collector, it counts a batch for each earlier update.

    An updater serves one collector at a time.

    Raises:
        TypeError: if ``max_interval`` is not an integer.
    """

    def __init__(
        self,
        policy_weights: TensorDictBase | None = None,
        remote_collectors: Sequence[Any] | None = None,
        max_interval: int = 0,
    ) -> None:
        if isinstance(max_interval, bool) or not isinstance(max_interval, int):
            raise TypeError(f"max_interval must be an integer, but it is {max_interval!r}")
        super().__init__(policy_weights)
        # Not a copy: a collector keeps its list up to date.
        self.remote_collectors = () if remote_collectors is None else remote_collectors
        self._by_handles = remote_collectors is not None
        # Calls whose results have not been checked yet, each with the number of its actor.
        self._calls: dict[Any, int] = {}
        self.max_interval = max(0, max_interval)
        # For each worker: the number of batches that it had delivered when it got its last update,
        # and the number of updates that were meant for it.
        self._sent: dict[int, int] = {}
        self._asked: Counter[int] = Counter()
        self._put: tuple[Any, Any] | None = None

    @override
    def all_worker_ids(self) -> list[int]:
        if self._by_handles:
            return list(range(len(self.remote_collectors)))
        return super().all_worker_ids()

    @property
    def batches_since_weight_update(self) -> list[int]:
        """Number of batches that each worker has delivered since its last update."""
        return [self._delivered(i) - self._sent.get(i, 0) for i in self.all_worker_ids()]

    def _delivered(self, worker_id: int) -> int:
        batches: Callable[[int], int] | None = getattr(self._first(), "batches_of", None)
        return self._asked[worker_id] if batches is None else batches(worker_id)

    @override
    def _skip_update(self, worker_id: Any) -> bool:
        return self._delivered(worker_id) - self._sent.get(worker_id, 0) < self.max_interval

    @override
    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
        self._sent[worker_id] = self._delivered(worker_id)
        if not self._by_handles:
            super()._sync_weights_with_worker(worker_id, server_weights)
            return
        import ray

        if self._put is None or self._put[0] is not server_weights:
            self._put = server_weights, ray.put(server_weights)
        handle = self.remote_collectors[worker_id]
        self._calls[handle.update_policy_weights_.remote(self._put[1])] = worker_id

    @override
    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        self._check_calls()
        super()._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        self._asked.update(self._workers(worker_ids))

    @override
    def register_collector(self, collector: Any) -> None:
        others = [one for one in self.collectors if one is not collector and not one.closed]
        if others:
            raise ValueError(
                f"this {type(self).__name__} already serves another collector, {others[0]!r}: "
                "make an updater for each collector"
            )
        self.__dict__.pop("_registered", None)
        super().register_collector(collector)

    @override
    def reached(self) -> list[int] | None:
        reached = super().reached()
        # Workers that get weights through their handles report the update themselves.
        return [] if self._by_handles else reached

    @override
    def close(self) -> None:
        self._check_calls()
        self._calls.clear()

    def _check_calls(self) -> None:
        """Raises the errors of earlier pushes that have failed by now.

        A dead actor only causes a warning, because a collector replaces it.
        """
        import ray

        if not self._calls or not ray.is_initialized():
            return
        ended, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for call in ended:
            worker = self._calls.pop(call)
            try:
                ray.get(call)
            except ray.exceptions.RayActorError as error:
                warnings.warn(
                    f"actor {worker} died before it received the weights that were pushed: "
                    f"{str(error).splitlines()[0]}",
                    RuntimeWarning,
                    stacklevel=4,
                )
