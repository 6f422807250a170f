"""Weight updaters: an older way to say how weights come to workers.

New code uses weight-sync schemes, or nothing at all: collectors send weights by themselves.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tensordict import TensorDictBase
from torch import nn
from typing_extensions import override

from trawl.weight_update.strategy import WeightStrategy

_STRATEGY = WeightStrategy()


class Updater(Protocol):
    """The interface of an updater, of Trawl or TorchRL, that a collector uses."""

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Initialises the updater."""

    def register_collector(self, collector: Any) -> Any:
        """Tells the updater whose workers it serves."""

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> Any:
        """Brings weights to workers."""


def is_updater(given: Any) -> bool:
    """Tells whether an object is a weight updater, of Trawl or TorchRL."""
    names = ("init", "push_weights", "register_collector", "__call__")
    return not isinstance(given, type) and all(hasattr(given, name) for name in names)


class WeightUpdaterBase:
    """Brings weights to workers, when a collector's ``update_policy_weights_`` is called.

    A subclass overrides what it does differently: where weights come from
    (``_get_server_weights``), what becomes of them on the way (``_maybe_map_weights``), who gets
    them (``all_worker_ids``, ``_skip_update``), and how (``_sync_weights_with_worker``). To
    subclass it is deprecated: a :class:`~trawl.weight_update.WeightSyncScheme` is the newer way.

    Example:
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
                f"{cls.__name__}: weight updaters are deprecated; use a weight-sync scheme "
                "(trawl.weight_update), or leave it to the collector",
                DeprecationWarning,
                stacklevel=2,
            )

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """Makes an updater for a policy; None if this class doesn't need one for that."""
        return None

    # --- what a subclass may do in its own way

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Initialises the updater, by arguments of ``collector.init_updater``."""

    def all_worker_ids(self) -> Sequence[Any] | None:
        """The workers: numbers, or devices; None if there is but one place."""
        collector = self._first()
        count = getattr(collector, "num_workers", None)
        return None if count is None else list(range(count))

    def _get_server_weights(self) -> Any:
        """The weights to send if none are given: by default those of the collector's policy."""
        policy = getattr(self._first(), "policy", None)
        return policy if isinstance(policy, nn.Module) else None

    def _maybe_map_weights(self, policy_or_weights: Any) -> Any:
        """What is sent, made of what was given: by default a TensorDict of parameters.

        Raises:
            TypeError: if these are no weights.
        """
        return _STRATEGY.extract_weights(policy_or_weights)

    def _skip_update(self, worker_id: Any) -> bool:
        """Whether a worker is left out this time."""
        return False

    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
        """Brings weights to a worker: by default, to that of the collector.

        Raises:
            RuntimeError: if there is no collector.
        """
        if not self.collectors:
            raise RuntimeError(f"{type(self).__name__} has no collector to bring weights to")
        for collector in self.collectors:
            collector._deliver_weights(server_weights, worker_id)

    def close(self) -> None:
        """Called when a collector that it serves is closed."""

    # --- what it does

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Brings weights to workers, and calls the hooks.

        Args:
            policy_or_weights: a module, a TensorDict or a dict of weights; None for those of
                ``_get_server_weights``.
            worker_ids: one worker, or several; None for all.

        Raises:
            RuntimeError: if there are no weights.
        """
        self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        self._call_post_hooks()

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """The same as :meth:`push_weights`."""
        self.push_weights(policy_or_weights, worker_ids)

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        given = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        if given is None:
            raise RuntimeError(
                f"{type(self).__name__} has no weights to push: give them, or let "
                "_get_server_weights() return them"
            )
        weights = self._maybe_map_weights(given)
        chosen = [i for i in self._workers(worker_ids) if not self._skip_update(i)]
        for worker_id in chosen:
            self._sync_weights_with_worker(worker_id=worker_id, server_weights=weights)
        self.__dict__["_reached"] = chosen

    def reached(self) -> list[int] | None:
        """The numbers of workers that the last push brought weights to; None for all."""
        chosen = self.__dict__.pop("_reached", None)
        if chosen is None or not all(isinstance(i, int) for i in chosen):
            # It was not this class that chose, or these are places that workers share.
            return None
        return list(chosen)

    def _workers(self, worker_ids: Any) -> Sequence[Any]:
        if worker_ids is not None:
            several = isinstance(worker_ids, Sequence) and not isinstance(worker_ids, str)
            return list(worker_ids) if several else [worker_ids]
        known = self.all_worker_ids()
        return [None] if known is None else list(known)

    # --- the collectors it belongs to

    def register_collector(self, collector: Any) -> None:
        """Tells the updater whose workers it serves. The collector is not kept by it.

        Args:
            collector: the collector. Several may be registered.
        """
        known = self.__dict__.setdefault("_registered", [])
        if all(one() is not collector for one in known):
            known.append(weakref.ref(collector))

    @property
    def collectors(self) -> list[Any]:
        """The collectors that were registered, and still are there."""
        alive = [one() for one in self.__dict__.get("_registered", ())]
        return [collector for collector in alive if collector is not None]

    @property
    def collector(self) -> Any:
        """The collector that was registered; None if there is none any more.

        Raises:
            ValueError: if there are several.
        """
        known = self.collectors
        if len(known) > 1:
            raise ValueError(f"{len(known)} collectors were registered: see `collectors`")
        return known[0] if known else None

    def _first(self) -> Any:
        return next(iter(self.collectors), None)

    def increment_version(self) -> None:
        """Goes on to the next version of the policy, on all collectors."""
        for collector in self.collectors:
            collector.increment_version()

    # --- hooks

    @property
    def post_hooks(self) -> list[Callable[[], Any]]:
        """What is called after weights were pushed."""
        hooks: list[Callable[[], Any]] = self.__dict__.setdefault("_hooks", [])
        return hooks

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Registers what is called, without arguments, after weights were pushed."""
        self.post_hooks.append(hook)

    def _call_post_hooks(self) -> None:
        for hook in self.post_hooks:
            hook()


class VanillaWeightUpdater(WeightUpdaterBase):
    """Copies weights into a policy of this process.

    Args:
        weight_getter: gives the weights, if none are pushed.
        policy_weights: the policy's own weights, as a TensorDict or dict, which are written to.
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
                f"weight_updater: {type(self).__name__} copies weights into a policy of this "
                f"process, but the policies of {type(collector).__name__} are those of its "
                "workers. Use MultiProcessedWeightUpdater, or none"
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
    """Brings weights to the workers of a collector with processes.

    Args:
        get_server_weights: gives the weights, if none are pushed; None for those of the
            collector's policy.
        policy_weights: by device, TensorDicts that are written to as well, if there are such that
            somebody shares.
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
            # A collector without any is one place itself.
            workers = [None] if self.collectors or not self.policy_weights else []
        return [*self.policy_weights, *workers]

    @override
    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
        if worker_id in self.policy_weights:
            _STRATEGY.apply_weights(self.policy_weights[worker_id], server_weights)
        else:
            super()._sync_weights_with_worker(worker_id, server_weights)


class RemoteModuleWeightUpdater(WeightUpdaterBase):
    """Brings weights to workers whose policies only exist there.

    For policies that a ``policy_factory`` makes: this process has no weights of them, so they have
    to be given with each update.

    Example:
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
        """Returns None: the collector knows its workers."""

    @override
    def _get_server_weights(self) -> Any:
        raise RuntimeError(
            f"{type(self).__name__} has no weights of its own: give them to "
            "update_policy_weights_()"
        )


class RemoteWeightUpdater(WeightUpdaterBase):
    """Brings weights to the workers of the collector that it is given to.

    Args:
        policy_weights: what is sent if nothing is pushed; None for the collector's policy.
        num_workers: number of workers; None for those of the collector.
    """

    def __init__(self, policy_weights: Any = None, num_workers: int | None = None) -> None:
        # A TensorDict is a mapping, too, but of names.
        by_device = isinstance(policy_weights, Mapping) and not isinstance(
            policy_weights, TensorDictBase
        )
        if by_device and all(isinstance(one, TensorDictBase) for one in policy_weights.values()):
            # They are equal.
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
