"""Base class of the schemes that send weights from a learner to the policies that collect."""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, Protocol, get_args, runtime_checkable

from trawl.paths import get_local
from trawl.weights.groups import (
    PreparedUpdate,
    ReceiverGroups,
    WeightHost,
    receivers_of,
)
from trawl.weights.layout import ModuleWeights
from trawl.weights.store import Receiver, Version, WeightUpdate
from trawl.weights.strategy import WeightStrategy, check_strategy
from trawl.weights.tensors import Weights

#: Backends for which :meth:`WeightSyncScheme.from_backend` makes a scheme.
WeightSyncBackend = Literal[
    "none",
    "direct",
    "shared",
    "thread",
    "process",
    "multiprocessing",
    "distributed",
    "rpc",
    "ray",
]

# The class of each backend's schemes, in `trawl.weight_update`.
_SCHEMES = {
    **dict.fromkeys(("none", "direct"), "NoWeightSyncScheme"),
    **dict.fromkeys(("shared", "thread"), "SharedMemWeightSyncScheme"),
    **dict.fromkeys(("process", "multiprocessing"), "MultiProcessWeightSyncScheme"),
    "rpc": "RPCWeightSyncScheme",
    "distributed": "DistributedWeightSyncScheme",
    "ray": "RayWeightSyncScheme",
}


@runtime_checkable
class TransportBackend(Protocol):
    """Interface of a transport to one receiver."""

    def send_weights(self, weights: Any) -> None:
        """Sends weights, in any form."""

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Receives and returns the newest weights, or None if none arrive in time.

        Args:
            timeout: seconds to wait; None for no limit.
            weights: a TensorDict or dict of tensors to copy the received weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.
        """


class WeightSyncScheme(ABC):
    """Sends the weights of a model from one sender to receivers in other processes.

    A collector uses its schemes by itself. Between your own processes, use a scheme like this::

        scheme = SharedMemWeightSyncScheme()
        scheme.init_on_sender(model=learner, num_workers=2)
        ...                             # start the processes, with the scheme as an argument
        scheme.connect()
        scheme.send()                   # whenever the learner has new weights

        # in process number i
        scheme.init_on_receiver(model=actor, worker_idx=i)
        scheme.connect()
        scheme.receive()                # waits for new weights, and loads them

    Args:
        strategy: the form in which weights are returned: ``"tensordict"`` or ``"state_dict"``.

    Raises:
        ValueError: for another strategy.
    """

    # Where the class of the scheme's transports is, whose module is imported when one is asked for.
    transport: ClassVar[str] = ""
    # True if neither the collector that has the scheme nor its workers have the model.
    model_is_elsewhere: ClassVar[bool] = False

    def __init__(self, strategy: str = "tensordict") -> None:
        check_strategy("strategy", strategy)
        self._strategy = WeightStrategy(strategy)
        self._model_id: str | None = None
        self._model: Any = None
        self._context: weakref.ref[Any] | None = None
        self._worker_idx: int | None = None
        self._host: WeightHost | None = None
        #: Function of the collector that :meth:`send` calls with the model's name, the weights and
        #: the receivers, while the collector lives; None if the scheme belongs to no collector.
        self.on_send: Callable[[str, Any, Any], None] | None = None
        self._groups: ReceiverGroups | None = None
        self._connected_sender = False
        # The sender's ends of channels by receiver, and the receiver's end. There are no channels
        # if a collector carries the weights.
        self._channels: dict[int, Any] = {}
        self._inbox: Any = None
        self._live: ModuleWeights | None = None
        self._owner = os.getpid()

    @staticmethod
    def from_backend(backend: WeightSyncBackend, **options: Any) -> WeightSyncScheme:
        """Returns a new scheme for a backend.

        Args:
            backend: ``"none"`` or ``"direct"``, ``"shared"`` or ``"thread"``, ``"process"`` or
                ``"multiprocessing"``, ``"ray"``, ``"distributed"`` or ``"rpc"``.
            **options: arguments of the scheme.

        Raises:
            ValueError: for another backend.
        """
        if backend not in get_args(WeightSyncBackend):
            names = ", ".join(get_args(WeightSyncBackend))
            raise ValueError(f"backend must be one of {names}, but it is {backend!r}")
        scheme: WeightSyncScheme = resolve_name(f"trawl.weight_update:{_SCHEMES[backend]}")(
            **options
        )
        return scheme

    # --- for subclasses, which need not override methods that are not abstract

    @abstractmethod
    def _open(self, workers: Sequence[int]) -> None:
        """Makes the stores of receivers and, without a collector, channels to the receivers."""

    @abstractmethod
    def _join(self, worker: int) -> Any:
        """Returns the receiver's end of a channel: a :class:`Receiver` that can also wait."""

    def _check_fork(self) -> None:  # noqa: B027 (most receivers can be in any process)
        """Raises an error if a receiver can't be in a process forked from the sender's process."""

    def _set_model(self, model_id: str, model: Any, context: Any) -> None:
        self._model_id, self._model = model_id, model
        self._context = None if context is None else weakref.ref(context)

    @property
    def context(self) -> Any:
        """Collector that has the model; None if there was none, or it no longer exists."""
        return None if self._context is None else self._context()

    @property
    def model(self) -> Any:
        """Model that was given, or else the model of the context at the path ``model_id``."""
        if self._model is not None or self.context is None or self._model_id is None:
            return self._model
        return _model_of(self.context, self._model_id)

    @property
    def model_id(self) -> str | None:
        """Name, or path, of the model."""
        return self._model_id

    @property
    def strategy(self) -> str:
        """Form in which weights are returned."""
        return self._strategy.extract_as

    #: Another name of :attr:`strategy`, which TorchRL's trainers read.
    strategy_str = strategy

    @property
    def worker_idx(self) -> int | None:
        """Number of this receiver; None on the sender's side."""
        return self._worker_idx

    @property
    def initialized_on_receiver(self) -> bool:
        """True if this is a receiver's end."""
        return self._worker_idx is not None

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Loads weights into the receiver's model.

        Raises:
            RuntimeError: if the scheme is not initialised.
        """
        if not self.initialized_on_receiver:
            raise RuntimeError("call init_on_receiver() before apply_weights()")
        self._strategy.apply_weights(self.model, weights, inplace)

    def prepare_weights(
        self,
        weights: Any,
        model_id: str = "policy",
        strategy: WeightStrategy | None = None,
        context: Any = None,
    ) -> Any:
        """Returns weights in the form in which they are sent, without copying them.

        Args:
            weights: weights in any form; the path of a model of the context; or None for the
                current weights of the model.
            model_id: name of the model that the weights belong to.
            strategy: determines the form; by default, the strategy of this scheme.
            context: the collector that has the model; by default, the context of this scheme.

        Raises:
            RuntimeError: if there are no weights to return.
            TypeError: if weights are in no known form.
        """
        form = strategy or self._strategy
        owner = self.context if context is None else context
        if isinstance(weights, str):
            model_id, weights = weights, None
        if weights is None:
            weights = self._model if owner is None else _model_of(owner, model_id)
        if weights is None:
            raise RuntimeError(
                f"there are no weights of {model_id!r} to prepare: pass them, or a context that "
                "has the model"
            )
        return form.extract_weights(weights)

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
        """Makes this scheme the sending end.

        Args:
            model_id: name, or path, of the model.
            context: the collector that has the model. The scheme keeps only a weak reference.
            model: the model itself; its current weights are sent each time.
            weights: a TensorDict or dict of tensors to send in place of a model's weights.
            devices: device of each receiver's model. Only the number of devices is used, as the
                number of receivers. Receivers copy weights to their devices themselves.
            params_map: weights of the receivers, keyed by receiver number.
            device_map_fn: function that is called with a receiver's number and the model or
                ``weights``, and returns the weights for this receiver.
            num_workers: number of receivers.

        Raises:
            RuntimeError: if the scheme was initialised before.
            TypeError: if more than one of ``model``, ``weights`` and ``params_map`` is given.
            ValueError: if the arguments contradict each other on the number of receivers.
        """
        if self.initialized_on_sender or self.initialized_on_receiver:
            raise RuntimeError("this weight-sync scheme is already initialised")
        given = {"model": model, "weights": weights, "params_map": params_map}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise TypeError(f"pass only one of {', '.join(names)}")
        self._set_model(model_id, model, context)
        source = weights if params_map is not None or weights is not None else self.model
        count = receivers_of(num_workers, devices, params_map, context)
        self._begin(ReceiverGroups.of(source, params_map, device_map_fn, count))

    def _begin(self, groups: ReceiverGroups) -> None:
        self._groups = groups
        self._owner = os.getpid()
        self._open(groups.workers)

    def attach(self, host: WeightHost, model_id: str, collector: Any) -> bool:
        """Makes this scheme the sending end for the workers of a collector, and connects it.

        If :meth:`init_on_sender` was called with weights or a model, they remain the source of the
        weights in place of the collector's policy.

        Returns:
            True if the scheme keeps a source of its own.

        Raises:
            RuntimeError: if the scheme is already in use.
            ValueError: if the scheme was initialised for other receivers than the workers.
        """
        in_use = self._host is not None or self._connected_sender
        if in_use or self.initialized_on_receiver or (self._groups is not None and not self.sends):
            raise RuntimeError(
                f"the weight-sync scheme of {model_id!r} is already in use: each collector needs "
                "a scheme of its own"
            )
        groups, model = self.receivers, self._model
        keeps = groups.have_sources
        theirs = ReceiverGroups(host.groups(model_id))
        if keeps and groups.workers != theirs.workers:
            raise ValueError(
                f"the weight-sync scheme of {model_id!r} was initialised for receivers "
                f"{groups.workers}, but the workers of the collector are {theirs.workers}"
            )
        self.shutdown()
        self._host = host
        self._set_model(model_id, model, collector)
        self._begin(groups if keeps else theirs)
        self.connect()
        return keeps

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """Connects this end. Call this once on each side, after all processes have been started.

        Args:
            worker_idx: the receiver's number, if it was not passed before.
            weights: weights to send at once, on the sender's side.

        Raises:
            RuntimeError: if the scheme is not initialised, or is already connected, or if
                ``worker_idx`` is passed to the sender's end.
        """
        if self._connected_sender or self._inbox is not None:
            raise RuntimeError("this weight-sync scheme is already connected")
        if self.initialized_on_sender:
            if worker_idx is not None:
                raise RuntimeError(f"worker_idx={worker_idx} is for receivers, not for the sender")
            self._connected_sender = True
            try:
                if weights is not None:  # a receiver that connects now starts with them
                    self.send(weights)
            finally:
                for channel in self._channels.values():
                    channel.connect_sender()
            return
        if not self.initialized_on_receiver:
            raise RuntimeError("call init_on_sender() or init_on_receiver() before connect()")
        if worker_idx is not None:
            self._worker_idx = worker_idx
        self._inbox = self._join(self._worker_idx or 0)

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Sends weights without waiting for receivers; :meth:`wait_async` waits for them.

        If the scheme belongs to a collector, it calls the collector's ``update_policy_weights_``,
        and raises the same errors.

        Args:
            weights: weights in any form (a module, a TensorDict, a dict). To send each receiver its
                own weights, pass a dict keyed by receiver number. None sends the model's current
                weights.
            worker_ids: numbers of the receivers that get the weights; None for all.

        Raises:
            RuntimeError: if the scheme is not connected, or there are no weights to send.
            ValueError: if a receiver is unknown, a shape differs, or a dtype can't be cast.
            KeyError: if names don't fit.
            TypeError: if weights are in no known form.
        """
        if not self.initialized_on_sender:
            raise RuntimeError("call init_on_sender() before send()")
        if self.on_send is not None and self.context is not None:
            # The collector counts versions, and limits how far workers may lag behind.
            self.on_send(self._model_id or "", weights, worker_ids)
            return
        if not self._connected_sender:
            raise RuntimeError("call connect() before send()")
        self.commit(self.prepare(weights, self.receivers.chosen(worker_ids)), None)

    def send_async(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None
    ) -> None:
        """Calls :meth:`send`, which never waits."""
        self.send(weights, worker_ids)

    def wait_async(
        self, timeout: float | None = None, worker_ids: int | Sequence[int] | None = None
    ) -> None:
        """Waits until receivers have received the last weights.

        The call doesn't wait for workers of a collector: each of them loads the weights before it
        begins its next batch.

        Args:
            timeout: seconds to wait; None for no limit.
            worker_ids: numbers of the receivers; None for all.

        Raises:
            TimeoutError: if a receiver does not receive the weights in time.
            ConnectionError: if a receiver has ended.
        """
        if not self._connected_sender:
            raise RuntimeError("call connect() before wait_async()")
        deadline = None if timeout is None else time.monotonic() + timeout
        for worker in self.receivers.chosen(worker_ids):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if worker in self._channels:
                self._channels[worker].wait_ack(left)

    def prepare(self, weights: Any, workers: Sequence[int]) -> list[PreparedUpdate]:
        """Checks weights, and returns them ready for :meth:`commit`. Sends and changes nothing.

        Raises:
            RuntimeError: if there are no weights to send.
            ValueError: if a shape differs, a dtype can't be cast, or no receiver would get weights.
            KeyError: if names don't fit.
            TypeError: if weights are in no known form.
        """
        return list(self.receivers.prepare(weights, workers))

    def create_transport(self, **options: Any) -> TransportBackend:
        """Returns a new transport to one receiver, for a program that sends weights itself.

        Args:
            **options: arguments of the transport's class.

        Raises:
            NotImplementedError: if this scheme has no kind of transport.
            TypeError: for any other argument.
        """
        if not self.transport:
            raise NotImplementedError(f"{type(self).__name__} has no transport of its own")
        transport: TransportBackend = resolve_name(self.transport)(**options)
        return transport

    def commit(self, prepared: Sequence[PreparedUpdate], version: Version) -> None:
        """Sends prepared weights without waiting until they are received."""
        for update in prepared:
            self.receivers.publish(update, version)

    @property
    def receivers(self) -> ReceiverGroups:
        """The receivers, in groups. There are none before :meth:`init_on_sender`."""
        return ReceiverGroups() if self._groups is None else self._groups

    # --- the receiver

    def init_on_receiver(
        self,
        *,
        model_id: str = "policy",
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        """Makes this scheme the receiving end.

        Args:
            model_id: name, or path, of the model.
            context: the collector that has the model. New weights are passed to its
                ``update_policy_weights_``. The scheme keeps only a weak reference.
            model: the model itself, into which weights are loaded.
            worker_idx: number of this receiver; by default, the worker number of the context, or 0.

        Raises:
            RuntimeError: if the scheme is already initialised, or if this process was forked from
                the sender's process and the scheme does not support that.
        """
        if self.initialized_on_sender and not self.sends:
            # This is a copy of the sender's end, in a forked process.
            self._check_fork()
            self.__dict__.update(self.__getstate__())
        if self.initialized_on_sender or self.initialized_on_receiver:
            raise RuntimeError("this weight-sync scheme is already initialised")
        self._set_model(model_id, model, context)
        self._live = None if model is None else ModuleWeights(model)
        if worker_idx is None:
            worker_idx = getattr(getattr(context, "config", None), "worker_idx", None)
        self._worker_idx = worker_idx or 0

    def receive(self, timeout: float | None = None) -> Any:
        """Receives the newest weights, and loads them into the model.

        Args:
            timeout: seconds to wait for new weights; 0 to return at once, None for no limit.

        Returns:
            The weights, in the form of :attr:`strategy`; None if there are no new weights.

        Raises:
            RuntimeError: if the scheme is not initialised or connected.
            ConnectionError: if the sender has ended, and all its weights have been received.
            KeyError, ValueError: if the weights don't fit the model.
        """
        if not self.initialized_on_receiver:
            raise RuntimeError("call init_on_receiver() before receive()")
        if self._inbox is None:
            raise RuntimeError("call connect() before receive()")
        inbox = self._inbox
        if not inbox.wait(timeout):
            return None
        received: list[Weights] = []

        def use(update: WeightUpdate) -> None:
            if update.slot is not None:
                if self._live is not None:
                    update.load(self._live)
                received.append(update.copy())

        inbox.receive(use)
        # The context may forward the weights, so it gets them after the channel is released.
        if received and self.context is not None:
            self.context.update_policy_weights_(received[0], model_id=self._model_id)
        return received[0].in_form(self.strategy) if received else None

    # --- state

    @property
    def weights(self) -> Any:
        """Current weights of the model, or the given weights, in the form of :attr:`strategy`."""
        source = self.model
        if source is None and self._groups is not None and len(self._groups) == 1:
            source = next(iter(self._groups)).fixed
        return self._strategy.extract_weights(source)

    @property
    def initialized_on_sender(self) -> bool:
        """True if this is the sender's end, or a copy of it in a forked process."""
        return self._groups is not None

    @property
    def sends(self) -> bool:
        """True if this is the sender's end, and not a copy of it in a forked process."""
        return self.initialized_on_sender and self._owner == os.getpid()

    @property
    def synchronized_on_sender(self) -> bool:
        """True if the sender's end is connected."""
        return self._connected_sender

    @property
    def synchronized_on_receiver(self) -> bool:
        """True if the receiver's end is connected."""
        return self._inbox is not None

    @property
    def incoming(self) -> Receiver:
        """Source of new weights for this receiver.

        Raises:
            RuntimeError: if the scheme is not connected.
        """
        if self._inbox is None:
            raise RuntimeError("call connect() before reading incoming")
        inbox: Receiver = self._inbox
        return inbox

    @property
    def sender_transports(self) -> dict[int, Any]:
        """Channels to receivers, by the numbers of the receivers."""
        return dict(self._channels) if self.initialized_on_sender else {}

    @property
    def receiver_transport(self) -> Any:
        """Receiver's end of the channel from the sender; None if this end has no such channel."""
        return self._inbox

    @property
    def shared_transport(self) -> Any:
        """Object from which all receivers get weights; None if they have no common source."""
        return None

    def shutdown(self) -> None:
        """Releases all resources. May be called more than once."""
        for channel in self._channels.values():
            channel.close()
        self._channels = {}
        self.__dict__.update(_fresh())

    def __getstate__(self) -> dict[str, Any]:
        # In another process, the scheme starts uninitialised, and can become a receiver's end.
        return {**self.__dict__, **_fresh()}


def _fresh() -> dict[str, Any]:
    """Returns the attributes of a scheme that is not initialised."""
    names = ("_context", "_groups", "_host", "_inbox", "_live", "_model", "_worker_idx", "on_send")
    return {**dict.fromkeys(names), "_connected_sender": False}


def _model_of(context: Any, model_id: str) -> Any:
    find = getattr(context, "get_model", None)
    return get_local(context, model_id) if find is None else find(model_id)
