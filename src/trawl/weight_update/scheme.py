"""How weights come from a learner to the policies that collect."""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import numpy as np
from torch import Tensor

from trawl.paths import get_path
from trawl.weight_update.board import Posted, Version
from trawl.weight_update.packing import Live, Packing
from trawl.weight_update.shipments import (
    Group,
    Shipment,
    by_worker,
    groups_of,
    receivers_of,
    shipment_of,
)
from trawl.weight_update.strategy import WeightStrategy, check_strategy, in_form
from trawl.weight_update.tensors import Weights, set_extra_state
from trawl.weight_update.transports import TransportBackend, WeightSyncBackend


class Receiver(Protocol):
    """Where a worker looks for new weights.

    Attributes:
        count: how many sets of weights it has taken, those included that newer ones replaced.
    """

    count: int

    @property
    def newer(self) -> bool:
        """Whether there is something new. It is asked before each batch."""

    def take(self, use: Callable[[Posted], None]) -> Posted:
        """Takes the newest: ``use`` is called with it while it can't change."""


class WeightSyncScheme(ABC):
    """Brings the weights of a model from one sender to receivers in other places.

    A collector does all of this by itself. Alone, between processes of one's own::

        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_sender(model=learner, num_workers=2)
        ...                             # start the processes, with the scheme as an argument
        scheme.connect()
        scheme.send()                   # whenever the learner has learned

        # in process number i
        scheme.init_on_receiver(model=actor, worker_idx=i)
        scheme.connect()
        scheme.receive()                # waits for new weights, and loads them

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.

    Raises:
        ValueError: for another strategy.
    """

    # Whether a collector that has the scheme has not the model, nor have its workers.
    model_is_elsewhere: ClassVar[bool] = False

    def __init__(self, strategy: str = "tensordict") -> None:
        check_strategy("strategy", strategy)
        self._strategy = WeightStrategy(strategy)
        self._model_id: str | None = None
        self._context: weakref.ref[Any] | None = None
        self._groups: list[Group] | None = None
        self._connected_sender = self._connected_receiver = False
        self._worker_idx: int | None = None
        self._live: Live | None = None
        self._model: Any = None
        self._owner = os.getpid()

    @staticmethod
    def from_backend(backend: WeightSyncBackend, **options: Any) -> WeightSyncScheme:
        """The scheme that suits a place of workers.

        Args:
            backend: ``"none"`` or ``"direct"``, ``"shared"`` or ``"thread"``, ``"process"`` or
                ``"multiprocessing"``, ``"ray"``, ``"distributed"`` or ``"rpc"``.
            **options: arguments of the scheme.

        Raises:
            ValueError: for another place.
        """
        from trawl.weight_update import BACKENDS

        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, but it is {backend!r}")
        scheme: WeightSyncScheme = BACKENDS[backend](**options)
        return scheme

    # --- what a scheme does; what is empty here not all of them need

    @abstractmethod
    def _open(self, workers: int) -> None:
        """Makes the ways to receivers."""

    def _check_shipment(self, shipment: Shipment) -> None:  # noqa: B027
        """Refuses what could not be sent, before anything is."""

    @abstractmethod
    def _post(self, shipment: Shipment, version: Version) -> None:
        """Sends weights; doesn't wait until they are taken."""

    @abstractmethod
    def _post_version(self, version: Version, workers: Iterable[int]) -> None:
        """Says that weights that were sent have another version now."""

    @abstractmethod
    def receiver(self, worker: int) -> Receiver:
        """What a worker looks for weights in; it can be sent to the worker as that is started."""

    @abstractmethod
    def count(self, worker: int) -> int:
        """How many sets of weights were sent to a worker."""

    def last_sent(self, worker: int) -> Weights | None:
        """Returns a copy of the weights that a worker was sent last; None before the first."""
        return None

    def _connect_sender(self) -> None:  # noqa: B027
        """Called when receivers have been started."""

    def _connect_receiver(self, worker: int) -> None:  # noqa: B027
        """Called when this process turns out to be a receiver's."""

    def _wait(self, worker: int, timeout: float | None) -> None:  # noqa: B027
        """Waits until a receiver has taken what was sent."""

    def _check_fork(self) -> None:  # noqa: B027
        """Refuses a receiver in a process forked from the sender's, where that can't be."""

    def _await(self, timeout: float | None) -> Receiver | None:
        """Waits until there is something new; None if there is nothing in time."""
        raise NotImplementedError(f"{type(self).__name__} has no receive()")

    def acknowledge(self) -> None:  # noqa: B027
        """Tells the sender that what it sent was taken."""

    # --- the sender

    def init_on_sender(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        devices: Sequence[Any] | None = None,
        params_map: Mapping[int, Any] | None = None,
        device_map_fn: Callable[[int, Any], Any] | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Makes this the sender's end.

        Args:
            model_id: name, or path, of the model.
            context: what has the model: a collector. It is not kept.
            model: the model itself; weights are those that it has when they are sent.
            weights: a TensorDict or dict of tensors, in the model's place.
            devices: where each receiver has its model: their number is that of receivers. (They
                copy weights there themselves.)
            params_map: weights for each receiver.
            device_map_fn: called with a receiver's number and ``weights``; gives those for it.
            num_workers: number of receivers.

        Raises:
            RuntimeError: if it was initialised before.
            TypeError: if there are several of ``model``, ``weights`` and ``params_map``.
            ValueError: if numbers contradict each other.
        """
        if self.initialized_on_sender or self.initialized_on_receiver:
            raise RuntimeError("this weight-sync scheme was initialised already")
        given = {"model": model, "weights": weights, "params_map": params_map}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise TypeError(f"give one of {', '.join(names)}, not several")
        self._model_id = model_id
        self._context = None if context is None else weakref.ref(context)
        groups = getattr(context, "_weight_groups", None)
        if groups is not None and not names:
            self._groups = list(groups(model_id))
        else:
            source = model if model is not None else weights
            if source is None and context is not None and params_map is None:
                source = _model_of(context, model_id)
            count = receivers_of(num_workers, devices, params_map, context)
            self._groups = groups_of(source, params_map, device_map_fn, count)
        self._model = model
        self._owner = os.getpid()
        self._open(1 + max((i for group in self._groups for i in group.workers), default=-1))

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Called once on each side, when all processes have been started.

        Args:
            worker_idx: the receiver's number, if it was not given before.
            weights: sent at once, on the sender's side.

        Raises:
            RuntimeError: if it is not initialised, or was connected before, or the sender is
                given a number.
        """
        if self.initialized_on_sender:
            if worker_idx is not None:
                raise RuntimeError(f"worker_idx={worker_idx} is for receivers; this is the sender")
            if self._connected_sender:
                raise RuntimeError("this weight-sync scheme was connected already")
            self._connect_sender()
            self._connected_sender = True
            if weights is not None:
                self.send(weights)
            return
        if not self.initialized_on_receiver:
            raise RuntimeError("connect() before init_on_sender() or init_on_receiver()")
        if self._connected_receiver:
            raise RuntimeError("this weight-sync scheme was connected already")
        if worker_idx is not None:
            self._worker_idx = worker_idx
        self._connect_receiver(self._worker_idx or 0)
        self._connected_receiver = True

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Sends weights. It does not wait until they are taken: :meth:`wait_async` does.

        A collector's scheme sends by ``update_policy_weights_`` of the collector, and raises what
        that does.

        Args:
            weights: in any form (a module, a TensorDict, a dict); a dict of numbers of receivers
                gives each its own. None: those that the model has now.
            worker_ids: the receivers that get them; None: all.

        Raises:
            RuntimeError: if it is not connected, or there are no weights to take.
            ValueError: for an unknown receiver; if shapes don't fit, or dtypes are not cast.
            KeyError: if names don't fit.
            TypeError: if weights are in no known form.
        """
        if not self.initialized_on_sender:
            raise RuntimeError("send() before init_on_sender()")
        collector = self.context
        if getattr(collector, "_weight_sync_schemes", {}).get(self._model_id) is self:
            # It counts versions, and how far workers may be behind.
            by_model = {self._model_id: weights}
            collector.update_policy_weights_(weights_dict=by_model, worker_ids=worker_ids)
            return
        if not self._connected_sender:
            raise RuntimeError("send() before connect()")
        self.commit(self.prepare(weights, self.chosen(worker_ids)), None)

    def send_async(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None
    ) -> None:
        """The same as :meth:`send`, which never waits."""
        self.send(weights, worker_ids)

    def wait_async(
        self, timeout: float | None = None, worker_ids: int | Sequence[int] | None = None
    ) -> None:
        """Waits until receivers have taken what was sent last.

        Workers of a collector are not waited for: each takes it before the next batch it begins.

        Args:
            timeout: seconds; None waits as long as it takes.
            worker_ids: the receivers; None: all.

        Raises:
            TimeoutError: if one does not in time.
            ConnectionError: if one has ended.
        """
        if not self._connected_sender:
            raise RuntimeError("wait_async() before connect()")
        deadline = None if timeout is None else time.monotonic() + timeout
        for worker in self.chosen(worker_ids):
            self._wait(worker, None if deadline is None else max(0.0, deadline - time.monotonic()))

    def prepare(self, weights: Any, workers: Sequence[int]) -> list[Shipment]:
        """Checks weights, and changes nothing.

        Raises:
            RuntimeError: if there are no weights to take.
            ValueError: if shapes don't fit, dtypes are not cast, or nobody would get any.
            KeyError: if names don't fit.
            TypeError: if weights are in no known form.
        """
        own = by_worker(weights)
        if own:
            workers = [i for i in self.chosen(list(own)) if i in workers]
            if not workers:
                raise ValueError(
                    f"there are weights for workers {sorted(own)} only: nobody gets any"
                )
        shipments = []
        for group in self._groups or ():
            chosen = tuple(i for i in group.workers if i in workers)
            sets = [((i,), own[i]) for i in chosen] if own else [(chosen, weights)] * bool(chosen)
            packing = group.packing
            for workers_, given in sets:
                shipments.append(shipment_of(group, packing, workers_, given))
                packing = shipments[-1].packing
                self._check_shipment(shipments[-1])
        return shipments

    def create_transport(self, **options: Any) -> TransportBackend:
        """Makes a way to one receiver, of the kind that this scheme stands for.

        It is for programs that carry weights themselves: a scheme makes its own when it is
        initialised.

        Args:
            **options: arguments of the transport.

        Raises:
            NotImplementedError: if this scheme has no kind of its own.
        """
        raise NotImplementedError(f"{type(self).__name__} has no transport of its own")

    def prepare_weights(
        self,
        weights: Any,
        model_id: str = "policy",
        strategy: WeightStrategy | None = None,
        context: Any = None,
    ) -> Any:
        """Returns weights in the form in which they are sent, not copied.

        Args:
            weights: in any form; the path of a model of the context; or None for the weights that
                the model has now.
            model_id: the model that they are for.
            strategy: the form; by default that of this scheme.
            context: what has the model: a collector. By default that of this scheme.

        Raises:
            RuntimeError: if there are no weights to take.
            TypeError: if they are in no known form.
        """
        form = strategy or self._strategy
        owner = self.context if context is None else context
        if isinstance(weights, str):
            model_id, weights = weights, None
        if weights is None:
            weights = self._model if owner is None else _model_of(owner, model_id)
        if weights is None:
            raise RuntimeError(
                f"there are no weights of {model_id!r} to take: give them, or a context that has "
                "the model"
            )
        return form.extract_weights(weights)

    def commit(self, shipments: Sequence[Shipment], version: Version) -> None:
        """Sends what was prepared."""
        for shipment in shipments:
            self._post(shipment, version)
            shipment.group.packing = shipment.packing

    def know(self, worker: int, packing: Packing) -> None:
        """Says how the model of a receiver is packed, which the sender could not know."""
        for group in self._groups or ():
            if worker in group.workers:
                group.know(packing)

    @property
    def workers(self) -> list[int]:
        """The numbers of all receivers."""
        return sorted(i for group in self._groups or () for i in group.workers)

    def chosen(self, worker_ids: Any) -> list[int]:
        """The numbers of receivers that are named; all for None.

        Raises:
            ValueError: if there is no such receiver, or none is named.
            TypeError: if these are no numbers.
        """
        known = self.workers
        if worker_ids is None:
            return known
        single = not isinstance(worker_ids, Iterable) or isinstance(worker_ids, (str, Tensor))
        given: list[Any] = [worker_ids] if single else list(cast("Iterable[Any]", worker_ids))
        if any(isinstance(i, bool) or not isinstance(i, (int, np.integer)) for i in given):
            raise TypeError(
                "worker_ids must be the number of a worker, or several of them, but it is "
                f"{worker_ids!r}"
            )
        chosen = [int(i) for i in given]
        if not chosen:
            raise ValueError("worker_ids is empty: nobody would get the weights")
        for index in chosen:
            if index not in known:
                raise ValueError(
                    f"worker_ids names worker {index}, but there are workers {known[0]} to "
                    f"{known[-1]}"
                )
        return chosen

    # --- the receiver

    def init_on_receiver(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """Makes this a receiver's end.

        Args:
            model_id: name, or path, of the model.
            context: what has the model: a collector. It is told of new weights by its
                ``update_policy_weights_``, and not kept.
            model: the model itself, into which weights are loaded.
            worker_idx: the number of this receiver; by default that of the context, or 0.

        Raises:
            RuntimeError: if it was initialised before, or this process was forked from the
                sender's and such receivers can't be.
        """
        if self.initialized_on_sender and not self.sends:
            # A copy of the sender's end, in a process that was forked.
            self._check_fork()
            self.__dict__.update(self.__getstate__())
        if self.initialized_on_sender or self.initialized_on_receiver:
            raise RuntimeError("this weight-sync scheme was initialised already")
        self._model_id = model_id
        self._context = None if context is None else weakref.ref(context)
        self._model = model
        self._live = None if model is None else Live(model)
        config = getattr(context, "config", None)
        self._worker_idx = worker_idx if worker_idx is not None else _index_of(config)

    def receive(self, timeout: float | None = None) -> Any:
        """Takes the newest weights, and loads them into the model.

        Args:
            timeout: seconds that are waited for new ones; 0 doesn't wait, None waits as long as
                it takes.

        Returns:
            The weights, in the form of the strategy; None if there were no new ones.

        Raises:
            RuntimeError: if it is not initialised or connected.
            ConnectionError: if the sender has ended, and all it sent was taken.
            KeyError, ValueError: if they don't fit the model.
        """
        if not self.initialized_on_receiver:
            raise RuntimeError("receive() before init_on_receiver()")
        if not self._connected_receiver:
            raise RuntimeError("receive() before connect()")
        source = self._await(timeout)
        if source is None:
            return None
        taken: list[Weights] = []
        source.take(partial(self._take, taken))
        self.acknowledge()
        # It takes what it is given to other places, perhaps: not while others wait for this one.
        if taken and self.context is not None:
            self.context.update_policy_weights_(taken[0], model_id=self._model_id)
        return in_form(taken[0], self._strategy.extract_as) if taken else None

    def _take(self, taken: list[Weights], posted: Posted) -> None:
        if posted.slot is None:
            return
        if self._live is not None:
            load_slot(self._live, posted)
        taken.append(posted.copy())

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Puts weights into the receiver's model.

        Raises:
            RuntimeError: if it is not initialised.
        """
        if not self.initialized_on_receiver:
            raise RuntimeError("apply_weights() before init_on_receiver()")
        self._strategy.apply_weights(self.model, weights, inplace)

    # --- what it knows

    @property
    def context(self) -> Any:
        """What has the model, if it was given and still is there."""
        return None if self._context is None else self._context()

    @property
    def model(self) -> Any:
        """The model: as it was given, or what the context has at its path."""
        if self._model is not None or self.context is None or self._model_id is None:
            return self._model
        return _model_of(self.context, self._model_id)

    @property
    def model_id(self) -> str | None:
        """Name, or path, of the model."""
        return self._model_id

    @property
    def worker_idx(self) -> int | None:
        """The number of this receiver; None on the sender's side."""
        return self._worker_idx

    @property
    def weights(self) -> Any:
        """The weights that the model has now, or that were given, in the form of the strategy."""
        source = self.model
        if source is None and self._groups and len(self._groups) == 1:
            source = self._groups[0].fixed
        return self._strategy.extract_weights(source)

    @property
    def strategy(self) -> str:
        """The form in which weights are returned."""
        return self._strategy.extract_as

    @property
    def strategy_str(self) -> str:
        """Another name of :attr:`strategy`, which TorchRL's trainers read."""
        return self.strategy

    @property
    def initialized_on_sender(self) -> bool:
        """Whether this is the sender's end."""
        return self._groups is not None

    @property
    def sends(self) -> bool:
        """The same, and not a copy of it in a process that was forked."""
        return self.initialized_on_sender and self._owner == os.getpid()

    @property
    def initialized_on_receiver(self) -> bool:
        """Whether this is a receiver's end."""
        return self._worker_idx is not None

    @property
    def synchronized_on_sender(self) -> bool:
        """Whether the sender's end is connected."""
        return self._connected_sender

    @property
    def synchronized_on_receiver(self) -> bool:
        """Whether the receiver's end is connected."""
        return self._connected_receiver

    @property
    def incoming(self) -> Receiver:
        """Where this receiver looks for new weights.

        Raises:
            RuntimeError: if it is not connected.
        """
        raise RuntimeError("incoming before connect()")

    @property
    def sender_transports(self) -> dict[int, Any]:
        """The ways to receivers, by number."""
        return {}

    @property
    def receiver_transport(self) -> Any:
        """The way from the sender, on a receiver's side; or None."""
        return None

    @property
    def shared_transport(self) -> Any:
        """What all receivers take weights from, if there is such a thing; or None."""
        return None

    def shutdown(self) -> None:
        """Lets go of what it holds. May be called again."""
        self._groups, self._worker_idx = None, None
        self._connected_sender = self._connected_receiver = False
        self._live = self._model = self._context = None

    def __getstate__(self) -> dict[str, Any]:
        # In another process it begins anew, as a receiver's end.
        fresh = {
            "_context": None,
            "_groups": None,
            "_live": None,
            "_model": None,
            "_worker_idx": None,
            "_connected_sender": False,
            "_connected_receiver": False,
        }
        return {**self.__dict__, **fresh}


def load_slot(live: Live, posted: Posted) -> None:
    """Copies what was put up into a module."""
    slot = posted.slot
    assert slot is not None
    if live.fits(slot.packing):
        live.load(slot.tensors(posted.since))
    else:
        model = type(live.module).__name__
        live.load(live.packing.match(slot.named(posted.since), model))
    set_extra_state(live.module, posted.extra_state())


def _index_of(config: Any) -> int:
    return getattr(config, "worker_idx", None) or 0


def _model_of(context: Any, model_id: str) -> Any:
    find = getattr(context, "get_model", None)
    return get_path(context, model_id) if find is None else find(model_id)
