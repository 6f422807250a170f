"""Schemes for workers, and for other actors, in a Ray cluster."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.backends.ray_cluster import import_ray
from trawl.weight_update.channel import Channel, Inbox, Outbox, WeightMessage
from trawl.weight_update.layout import FlatLayout
from trawl.weight_update.prepared import PreparedUpdate
from trawl.weight_update.process_group import GroupWeightSyncScheme
from trawl.weight_update.store import Version
from trawl.weight_update.transports import TransportBackend

_STORE = "object_store"
_BACKENDS = (_STORE, "gloo")
# Concurrent calls of the messenger for each receiver: one that waits for weights, one for an
# acknowledgement, and one more.
_CALLS = 3


class RayMessage(WeightMessage):
    """Message whose weights are in Ray's object store; :attr:`data` is a reference to them."""

    @override
    def opened(self) -> Any:
        import ray

        from trawl.backends.ray_wire import writable

        return writable(ray.get(self.data))


class RayWeightSyncScheme(GroupWeightSyncScheme, backends=("ray",)):
    """Puts weights once into Ray's object store, where all workers read them.

    The sender writes the weights once, however many workers there are. Ray copies them once to
    each node, and all workers of a node read the same memory. Without a collector, pass the scheme
    to your own actors as an argument of one of their methods. An actor notices when the sender
    ends. With the object store, the sender does not notice when an actor ends, so give
    ``wait_async`` a time-out.

    Args:
        strategy: the form in which weights are returned.
        backend: ``"object_store"``, or ``"gloo"`` to send the weights to each receiver: through the
            collector's connection to it, or else through a process group of two.
        timeout: with ``"gloo"`` and without a collector, seconds that a sender and a receiver wait
            for each other when they connect.

    Raises:
        ValueError: for another ``backend``.

    Example:
        >>> from trawl.weight_update import RayWeightSyncScheme
        >>> RayWeightSyncScheme().strategy
        'tensordict'
    """

    def __init__(
        self, strategy: str = "tensordict", backend: str = "object_store", *, timeout: float = 300.0
    ) -> None:
        super().__init__(strategy)
        if backend not in _BACKENDS:
            raise ValueError(
                f"backend must be one of {', '.join(map(repr, _BACKENDS))}, but it is {backend!r}. "
                "(Weights are sent in CPU memory: 'nccl' has no use here)"
            )
        self.backend = backend
        self.timeout = timeout
        # With the object store, without a collector: the actor that keeps the newest messages.
        self._messenger: Any = None
        self._written = np.empty(0, dtype=np.uint8)

    @property
    def connection_info_name(self) -> str:
        """Name of the actor by which transports for this model find each other."""
        return f"connection_info_{self._model_id or 'policy'}"

    @override
    def create_transport(
        self,
        *,
        remote_actor: Any = None,
        worker_idx: int | None = None,
        remote_collector: Any = None,
        **options: Any,
    ) -> TransportBackend:
        """Returns a :class:`RayTransport` to an actor of the user's own.

        Args:
            remote_actor: handle of the actor.
            worker_idx: number of the receiver.
            remote_collector: older name of ``remote_actor``.
            **options: further arguments of the transport.
        """
        actor = remote_collector if remote_actor is None else remote_actor
        own = {"backend": self.backend, "connection_info_name": self.connection_info_name}
        from trawl.weight_update.ray_transport import RayTransport

        return RayTransport(remote_actor=actor, worker_idx=worker_idx, **{**own, **options})

    @override
    def _meeting(self) -> tuple[str, int, float]:
        return import_ray().util.get_node_ip_address(), 0, self.timeout

    @override
    def _new_channels(self, workers: Sequence[int]) -> dict[int, Channel]:
        if self.backend != _STORE:
            return super()._new_channels(workers)
        calls = _CALLS * len(workers) + 1
        # The actor ends with the sender.
        options = {"num_cpus": 0, "max_concurrency": calls, "max_restarts": 0}
        actor = import_ray().remote(_Messenger).options(**options)
        self._messenger = actor.remote(list(workers))
        return {worker: RayChannel(worker, self._messenger) for worker in workers}

    @override
    def _join(self, worker: int) -> Inbox:
        if self.backend != _STORE:
            return super()._join(worker)
        ray, messenger = import_ray(), self._messenger

        def receive_all() -> None:
            with contextlib.suppress(Exception):
                while (message := ray.get(messenger.next.remote(worker, True))) is not None:
                    inbox.put(message)
            inbox.end()

        first = ray.get(messenger.next.remote(worker, False))
        inbox = Inbox(first, lambda count: messenger.acknowledge.remote(worker, count))
        threading.Thread(target=receive_all, daemon=True).start()
        return inbox

    @override
    def shutdown(self) -> None:
        super().shutdown()
        self._messenger = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_written": np.empty(0, dtype=np.uint8)}

    @override
    def _buffer(self, nbytes: int) -> NDArray[np.uint8]:
        if self.backend != _STORE:
            return super()._buffer(nbytes)
        # Ray copies the memory into its store at once, so it can be reused. Writing to used memory
        # takes half as long as writing to new memory.
        if self._written.nbytes != nbytes:
            self._written = np.empty(nbytes, dtype=np.uint8)
        return self._written

    @override
    def _message(self, layout: FlatLayout, buffer: Any, extra: bytes) -> WeightMessage:
        if self.backend != _STORE:
            return super()._message(layout, buffer, extra)
        # The messages hold the reference, so Ray keeps the weights as long as they may be read.
        return RayMessage(0, None, layout, import_ray().put(buffer), extra)


class _Messenger:
    """Actor that keeps the newest message to each receiver.

    Args:
        numbers: numbers of the receivers.
    """

    def __init__(self, numbers: Sequence[int]) -> None:
        self._outboxes = {number: Outbox(number) for number in numbers}

    def put(self, number: int, message: WeightMessage) -> None:
        """Sets the message that a receiver gets next, unless it is older than the last one."""
        self._outboxes[number].put(message)

    def next(self, number: int, wait: bool) -> WeightMessage | None:
        """Returns the message that a receiver gets next, or None; see :meth:`Outbox.next`."""
        return self._outboxes[number].next(wait)

    def acknowledge(self, number: int, count: int) -> None:
        """Notes that a receiver has received the messages up to number ``count``."""
        self._outboxes[number].acknowledge(count)

    def wait_ack(self, number: int, count: int, timeout: float | None) -> bool:
        """Waits until a receiver has received messages up to ``count``; False on a time-out."""
        try:
            self._outboxes[number].wait_ack(timeout, count)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Notes that nothing more will be sent."""
        for outbox in self._outboxes.values():
            outbox.close()


class RayChannel(Channel):
    """Channel through an actor, with the weights in Ray's object store.

    Args:
        number: number of the receiver.
        messenger: handle of the actor.
    """

    def __init__(self, number: int, messenger: Any) -> None:
        self._number = number
        self._messenger = messenger
        self._newest: WeightMessage | None = None

    @override
    def connect_sender(self) -> None:
        pass

    @override
    def send(self, message: WeightMessage) -> None:
        # Ray may reorder calls, so each message includes the newest weights.
        self._newest = message.after(self._newest)
        self._messenger.put.remote(self._number, self._newest)

    @override
    def wait_ack(self, timeout: float | None = None) -> None:
        if self._newest is None:
            return
        ref = self._messenger.wait_ack.remote(self._number, self._newest.count, timeout)
        if not import_ray().get(ref):
            raise TimeoutError(f"receiver {self._number} took no weights within {timeout:.3g} s")

    @override
    def close(self) -> None:
        with contextlib.suppress(Exception):
            # The connection to Ray may be gone.
            import_ray().get(self._messenger.close.remote())


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Sends weights to the module of TorchRL's ``RayModuleTransform``, which has its own actor.

    Pass the scheme to the transform, which connects it to its actor::

        scheme = RayModuleTransformScheme()
        transform = RayModuleTransform(module=module, weight_sync_scheme=scheme, ...)
        env = TransformedEnv(base_env, transform)
        collector = Collector(
            env, policy, weight_sync_schemes={"transform_module": scheme}, frames_per_batch=100
        )
        collector.update_policy_weights_(new_weights, model_id="transform_module")

    Each update must include the weights, because only the actor has the module. An update returns
    once the actor has taken the weights.

    Args:
        strategy: the form in which weights are returned.
        backend: as in :class:`RayWeightSyncScheme`.
    """

    model_is_elsewhere: ClassVar[bool] = True

    def __init__(self, strategy: str = "tensordict", backend: str = "object_store") -> None:
        super().__init__(strategy, backend)
        self._transform: Any = None

    def _set_transform(self, transform: Any) -> None:
        # TorchRL's transform calls this method, then init_on_sender() and connect().
        self._transform = transform

    @override
    def init_on_sender(
        self,
        *,
        model_id: str = "transform_module",
        context: Any = None,
        model: Any = None,
        weights: Any = None,
        devices: Sequence[Any] | None = None,
        params_map: Any = None,
        device_map_fn: Any = None,
        num_workers: int | None = None,
        ray_transform: Any = None,
    ) -> None:
        """Makes this scheme the sender's end; the transform's actor is its only receiver.

        Args:
            model_id: name of the module.
            context: not used.
            model: a module whose weights are sent if an update has none.
            weights: weights that are sent if an update has none.
            devices: not used.
            params_map: not used.
            device_map_fn: not used.
            num_workers: not used: there is one receiver.
            ray_transform: the transform, if it was not made with this scheme.

        Raises:
            ValueError: if there is no transform.
            RuntimeError: if the scheme was initialised before.
        """
        if ray_transform is not None:
            self._transform = ray_transform
        if self._transform is None:
            raise ValueError(
                "RayModuleTransformScheme needs a transform: make RayModuleTransform with "
                "weight_sync_scheme=, or give ray_transform="
            )
        super().init_on_sender(model_id=model_id, model=model, weights=weights, num_workers=1)

    @override
    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        if not self.initialized_on_sender:
            super().connect(worker_idx=worker_idx, weights=weights)
            return
        super().connect(worker_idx=worker_idx)
        import_ray().get(self._actor._init_weight_sync_scheme.remote(self, self._model_id))
        if weights is not None:
            self.send(weights)

    @property
    def _actor(self) -> Any:
        return self._transform._actor

    @override
    def init_on_receiver(
        self,
        *,
        model_id: str = "transform_module",
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
    ) -> None:
        module = getattr(context, "module", None) if model is None else model
        super().init_on_receiver(model_id=model_id, model=module, worker_idx=0)

    @override
    def commit(self, prepared: Sequence[PreparedUpdate], version: Version) -> None:
        super().commit(prepared, version)
        if prepared:
            import_ray().get(self._actor._receive_weights_scheme.remote())

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_transform": None}
