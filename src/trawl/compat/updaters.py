"""Weight updaters, an older way to determine how workers get their weights.

New code should use a weight-sync scheme, or nothing at all, because collectors send weights by
themselves.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from typing_extensions import override

from trawl.weights.strategy import WeightStrategy

_STRATEGY = WeightStrategy()


class WeightUpdaterBase:
    """Sends weights to workers when a collector's ``update_policy_weights_`` is called.

    A subclass may override the source of the weights (``_get_server_weights``), their conversion
    (``_maybe_map_weights``), the choice of workers (``all_worker_ids``, ``_skip_update``), and the
    transfer to a worker (``_sync_weights_with_worker``). Subclassing is deprecated: use a
    :class:`~trawl.weight_update.WeightSyncScheme`.

    Examples:
        >>> import torch, warnings
        >>> from trawl.weight_update import VanillaWeightUpdater, WeightStrategy
        >>> actor, learner = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        >>> updater = VanillaWeightUpdater.from_policy(actor)
        >>> updater.push_weights(learner)
        >>> bool((actor.weight == learner.weight).all())
        True
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__module__.startswith("trawl."):
            warnings.warn(
                f"{cls.__name__}: weight updaters are deprecated. Use a weight-sync scheme "
                "(trawl.weight_update), or let the collector send the weights",
                DeprecationWarning,
                stacklevel=2,
            )

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """Returns an updater for a policy, or None to let the constructor make the updater."""
        return None

    # --- methods that a subclass may override

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Initialises the updater, with the arguments of ``collector.init_updater``."""

    def all_worker_ids(self) -> Sequence[Any] | None:
        """Returns the workers, as numbers or devices; None to send once without naming a worker."""
        collector = self._first()
        count = getattr(collector, "num_workers", None)
        return None if count is None else list(range(count))

    def _get_server_weights(self) -> Any:
        """Returns the weights to send if none are passed; by default, the collector's policy."""
        policy = getattr(self._first(), "policy", None)
        return policy if isinstance(policy, nn.Module) else None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """Converts weights to the form in which they are sent; by default, to a TensorDict.

        Raises:
            TypeError: if ``policy_or_weights`` is not a form of weights.
        """
        return _STRATEGY.extract_weights(policy_or_weights)

    def _skip_update(self, worker_id: Any) -> bool:
        """Returns True if this update must leave out a worker."""
        return False

    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
        """Sends weights to a worker; by default, to a worker of each registered collector.

        Raises:
            RuntimeError: if there is no collector.
        """
        if not self.collectors:
            raise RuntimeError(f"{type(self).__name__} has no collector to send weights to")
        for collector in self.collectors:
            collector.deliver_weights(server_weights, worker_id)

    def close(self) -> None:
        """Ends the updater when a collector that it serves is closed; by default, does nothing."""

    # --- pushing weights

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Sends weights to workers, and calls the hooks.

        Args:
            policy_or_weights: a module, a TensorDict or a dict of weights; None for the weights
                that ``_get_server_weights`` returns.
            worker_ids: one worker or several, as numbers or devices; None for all workers.

        Raises:
            RuntimeError: if there are no weights.
        """
        self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        self._call_post_hooks()

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Calls :meth:`push_weights`."""
        self.push_weights(policy_or_weights, worker_ids)

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        given = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        if given is None:
            raise RuntimeError(
                f"{type(self).__name__} has no weights to push: pass them, or let "
                "_get_server_weights() return them"
            )
        weights = self._maybe_map_weights(given)
        chosen = [i for i in self._workers(worker_ids) if not self._skip_update(i)]
        for worker_id in chosen:
            self._sync_weights_with_worker(worker_id=worker_id, server_weights=weights)
        self.__dict__["_reached"] = chosen

    def reached(self) -> list[int] | None:
        """Returns the numbers of the workers that the last push reached; None for all."""
        chosen = self.__dict__.pop("_reached", None)
        if chosen is None or not all(isinstance(i, int) for i in chosen):
            # A subclass chose the workers, or they are given as devices, which workers may share.
            return None
        return list(chosen)

    def _workers(self, worker_ids: Any) -> Sequence[Any]:
        if worker_ids is not None:
            several = isinstance(worker_ids, Sequence) and not isinstance(worker_ids, str)
            return list(worker_ids) if several else [worker_ids]
        known = self.all_worker_ids()
        return [None] if known is None else list(known)

    # --- registered collectors

    def register_collector(self, collector: Any) -> None:
        """Registers a collector whose workers the updater serves.

        The updater keeps only a weak reference to the collector.

        Args:
            collector: the collector. Several may be registered.
        """
        known = self.__dict__.setdefault("_registered", [])
        if all(one() is not collector for one in known):
            known.append(weakref.ref(collector))

    @property
    def collectors(self) -> list[Any]:
        """Registered collectors that still exist."""
        alive = [one() for one in self.__dict__.get("_registered", ())]
        return [collector for collector in alive if collector is not None]

    @property
    def collector(self) -> Any:
        """Registered collector; None if there is none, or it no longer exists.

        Raises:
            ValueError: if there are several.
        """
        known = self.collectors
        if len(known) > 1:
            raise ValueError(
                f"{len(known)} collectors are registered: use `collectors` instead of `collector`"
            )
        return known[0] if known else None

    def _first(self) -> Any:
        return next(iter(self.collectors), None)

    def increment_version(self) -> None:
        """Begins the next version of the policy in all registered collectors."""
        for collector in self.collectors:
            collector.increment_version()

    # --- hooks

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """Functions that are called each time weights have been pushed."""
        hooks: list[Callable[[], Any]] = self.__dict__.setdefault("_hooks", [])
        return hooks

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Registers a function to call, without arguments, each time weights have been pushed."""
        self.post_hooks.append(hook)

    def _call_post_hooks(self) -> None:
        for hook in self.post_hooks:
            hook()


class VanillaWeightUpdater(WeightUpdaterBase):
    """Copies weights into a policy of this process.

    Args:
        weight_getter: function that returns the weights to copy if an update comes without any.
        policy_weights: the policy's own tensors, as a TensorDict or dict, to copy weights into.
    """

    def __init__(
        self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: Any
    ) -> None:
        self.weight_getter = weight_getter
        self.policy_weights = policy_weights

    @classmethod
    @override
    def from_policy(cls, policy: Any) -> VanillaWeightUpdater:
        return cls(policy_weights=_STRATEGY.extract_weights(policy))

    @override
    def register_collector(self, collector: Any) -> None:
        if getattr(collector, "num_workers", None) is not None:
            raise ValueError(
                f"weight_updater: {type(self).__name__} copies weights into a policy in this "
                f"process, but the policies of {type(collector).__name__} are in its workers. "
                "Use MultiProcessedWeightUpdater, or no updater"
            )
        super().register_collector(collector)

    @override
    def all_worker_ids(self) -> None:
        return None

    @override
    def _get_server_weights(self) -> Any:
        return None if self.weight_getter is None else self.weight_getter()

    @override
    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
        _STRATEGY.apply_weights(self.policy_weights, server_weights)


class MultiProcessedWeightUpdater(WeightUpdaterBase):
    """Sends weights to the worker processes of a collector.

    Args:
        get_server_weights: function that returns the weights if none are pushed; None for the
            weights of the collector's policy.
        policy_weights: shared TensorDicts by device, into which weights are copied as well.
    """

    def __init__(
        self,
        *,
        get_server_weights: Callable[[], Any] | None = None,
        policy_weights: Mapping[Any, TensorDictBase] | None = None,
    ) -> None:
        self.weights_getter = get_server_weights
        self.policy_weights = dict(policy_weights or {})

    @override
    def _get_server_weights(self) -> Any:
        getter = self.weights_getter
        return super()._get_server_weights() if getter is None else getter()

    @override
    def all_worker_ids(self) -> Sequence[Any]:
        workers = super().all_worker_ids()
        if workers is None:
            # A collector without workers gets the weights itself.
            workers = [None] if self.collectors or not self.policy_weights else []
        return [*self.policy_weights, *workers]

    @override
    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
        if worker_id in self.policy_weights:
            _STRATEGY.apply_weights(self.policy_weights[worker_id], server_weights)
        else:
            super()._sync_weights_with_worker(worker_id, server_weights)


class RemoteModuleWeightUpdater(WeightUpdaterBase):
    """Sends weights to workers whose policies exist only in the workers.

    Use this updater for policies from a ``policy_factory``. This process does not have the weights
    of these policies, so each update must include weights.

    Examples:
        >>> from trawl.collectors import MultiSyncCollector, RemoteModuleWeightUpdater
        >>> from tensordict.nn import TensorDictModule
        >>> from torch import nn, ones
        >>> def policy():
        ...     return TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
        >>> with MultiSyncCollector(
        ...     "Pendulum-v1",
        ...     policy_factory=policy,
        ...     num_workers=2,
        ...     frames_per_batch=20,
        ...     weight_updater=RemoteModuleWeightUpdater(),
        ... ) as collector:
        ...     collector.update_policy_weights_(policy())
    """

    @override
    def all_worker_ids(self) -> None:
        """Returns None, because the collector knows its workers."""

    @override
    def _get_server_weights(self) -> Any:
        raise RuntimeError(
            f"{type(self).__name__} has no weights of its own: pass them to "
            "update_policy_weights_()"
        )


class RemoteWeightUpdater(WeightUpdaterBase):
    """Sends weights to the workers of the collector that the updater is passed to.

    Args:
        policy_weights: weights to send if none are pushed; None for the collector's policy.
        num_workers: number of workers; None for the collector's number of workers.
    """

    def __init__(self, policy_weights: Any = None, num_workers: int | None = None) -> None:
        # A TensorDict is also a mapping, but its keys are names.
        by_device = isinstance(policy_weights, Mapping) and not isinstance(
            policy_weights, TensorDictBase
        )
        if by_device and all(isinstance(one, TensorDictBase) for one in policy_weights.values()):
            # All devices have the same weights.
            policy_weights = next(iter(policy_weights.values()), None)
        self.policy_weights = policy_weights
        self.num_workers = num_workers

    @override
    def all_worker_ids(self) -> list[int]:
        if self.num_workers is not None:
            return list(range(self.num_workers))
        return list(super().all_worker_ids() or ())

    @override
    def _get_server_weights(self) -> Any:
        return super()._get_server_weights() if self.policy_weights is None else self.policy_weights


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


class DistributedWeightUpdater(RemoteWeightUpdater):
    """Sends weights to the ranks of a collector. New code should use a weight-sync scheme.

    Workers are numbered from 0.

    Args:
        store: accepted for compatibility. The collector's connections are used.
        policy_weights: weights to send if none are pushed; None for the collector's policy.
        num_workers: number of workers; None for the collector's number of workers.
        sync: accepted for compatibility. Sending never waits.
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


class RPCWeightUpdater(RemoteWeightUpdater):
    """Sends weights to the nodes of a collector. New code should use a weight-sync scheme.

    Args:
        collector_infos: accepted for compatibility. The collector knows its nodes.
        collector_class: accepted for compatibility.
        collector_rrefs: accepted for compatibility.
        policy_weights: weights to send if none are pushed; None for the collector's policy.
        num_workers: number of workers; None for the collector's number of workers.
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
