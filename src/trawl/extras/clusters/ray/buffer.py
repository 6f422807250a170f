"""Replay buffer in an actor of a Ray cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from trawl.backends.failure import Failure
from trawl.extras.clusters.network.frames import Frame, pack_code, pack_for_ray
from trawl.extras.clusters.ray.cluster import (
    Connection,
    Placement,
    connect,
    import_ray,
    with_defaults,
)

# Arguments of the buffer that may be functions. The actor calls these functions in its process.
_MADE_THERE = ("storage", "sampler", "writer")
# Number of workers' batches whose names the actor remembers, to detect repeated batches.
_REMEMBERED = 10_000
_TRANSPORTS = ("auto", "ray")
# Iterations over the buffer that may go on at a time.
_MOST_PASSES = 100
# Parts of a buffer, which stay in the actor.
_PARTS = ("storage", "sampler", "writer", "transform")


# Stands for the buffer among the results of its methods, and remains the same object when pickled.
_ITSELF = Ellipsis


class RayBufferPart:
    """Part of a replay buffer in an actor, such as its sampler.

    Its attributes are values from the actor, and its methods are called there.

    Args:
        ask: function that calls a method of the actor.
        name: name of the part.
    """

    def __init__(self, ask: Callable[..., Any], name: str) -> None:
        self._ask, self._name = ask, name

    def __getattr__(self, name: str) -> Any:
        return _attribute(self.__dict__.get("_ask"), name, f"{self.__dict__.get('_name')}.{name}")

    def __repr__(self) -> str:
        return f"<{self._name} of a replay buffer in a Ray actor>"


def _attribute(ask: Callable[..., Any] | None, name: str, path: str) -> Any:
    """Returns the value at a path of the buffer, or a function that calls the method there."""
    if ask is None or name.startswith("_"):
        raise AttributeError(name)
    found, value = ask("attribute", path)
    if not found:
        raise AttributeError(f"the replay buffer in the actor has no attribute {path!r}")
    return partial(ask, "call", path) if value is None else value[0]


class RayBufferClient:
    """Client of a replay buffer in an actor.

    A client can be pickled, and used anywhere in the cluster. It has all public attributes and
    methods of the buffer: values come from the actor, and methods are called there. The storage,
    the sampler, the writer and the transform stay in the actor, and are reached in the same way.
    Paths, such as that of ``dumps``, are paths on the actor's machine.

    Args:
        actor: handle of the actor.

    Attributes:
        service_backend: ``"ray"``.
    """

    service_backend = "ray"

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        # Part of the name of each batch that workers write. Pickled copies have the same value.
        # If a worker and its replacement both send a batch, both use the same name, and the batch
        # is stored once.
        self._writer = uuid.uuid4().hex
        self._order: tuple[int, int] | None = None

    def _ask(self, name: str, *args: Any, **kwargs: Any) -> Any:
        ray = import_ray()
        frame = pack_for_ray((name, args, kwargs), copy=False)
        try:
            answer = ray.get(self._actor.call.remote(frame)).content()
        except ray.exceptions.RayActorError as error:
            raise ConnectionError(f"the replay buffer's actor is gone: {error}") from error
        if isinstance(answer, Failure):
            raise answer.error("the replay buffer's actor")
        return answer

    # --- writing

    def write_as(self, number: int) -> None:
        """Names the following batches after a request, so that each batch is stored only once.

        Args:
            number: number of the request that the worker carries out.
        """
        self._order = number, 0

    def extend(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Adds a batch and returns the indices of its entries (None after :meth:`write_as`)."""
        if self._order is None:
            return self._ask("extend", data, *args, **kwargs)
        number, part = self._order
        self._order = number, part + 1
        return self._ask("extend_once", (self._writer, number, part), data)

    def add(self, data: Any) -> Any:
        """Adds an entry and returns its index."""
        return self._ask("add", data)

    def empty(self) -> None:
        """Removes all entries."""
        self._ask("empty")

    def update_priority(self, index: Any, priority: Any) -> None:
        """Sets the priorities of entries."""
        self._ask("update_priority", index, priority)

    def update_tensordict_priority(self, data: Any) -> None:
        """Sets the priorities of sampled entries to those in the sampled batch."""
        self._ask("update_tensordict_priority", data)

    # --- reading

    def sample(self, *args: Any, **kwargs: Any) -> Any:
        """Samples a batch, whose tensors are writable and use the memory that Ray delivered."""
        return self._ask("sample", *args, **kwargs)

    def __len__(self) -> int:
        return int(self._ask("__len__"))

    def __getitem__(self, index: Any) -> Any:
        return self._ask("__getitem__", index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._ask("__setitem__", index, value)

    def __iter__(self) -> Iterator[Any]:
        """Yields samples: a pass over the entries if the sampler draws without replacement."""
        if self.batch_size is None:
            raise RuntimeError("a replay buffer needs a batch_size to be iterated over")
        number = self._ask("begin_pass")
        while (found := self._ask("next_of_pass", number)) is not None:
            yield found[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in _PARTS:
            return RayBufferPart(self._ask, name)
        found = _attribute(self._ask, name, name)
        if not isinstance(found, partial):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            result = found(*args, **kwargs)
            # Such as that of append_transform.
            return self if result is _ITSELF else result

        return call

    @property
    def write_count(self) -> int:
        """Number of entries written so far, including those that were overwritten later."""
        return int(self._ask("get", "write_count"))

    @property
    def batch_size(self) -> int | None:
        """Number of entries in a sampled batch; None if the buffer was made without one."""
        size: int | None = self._ask("get", "batch_size")
        return size

    def stats(self) -> dict[str, Any]:
        """Returns ``size``, ``write_count`` and the buffer's own ``stats()``, if it has any."""
        found: dict[str, Any] = self._ask("stats")
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the buffer."""
        state: dict[str, Any] = self._ask("state_dict")
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the buffer's state from :meth:`state_dict`."""
        self._ask("load_state_dict", state_dict)

    # --- others

    @property
    def is_alive(self) -> bool:
        """True if the actor answers."""
        try:
            self._ask("get", "made")
        except ConnectionError:
            return False
        return True

    def client(self) -> RayBufferClient:
        """Returns another client of the same buffer."""
        return RayBufferClient(self._actor)

    def clients(self, count: int) -> list[RayBufferClient]:
        """Returns several clients of the same buffer."""
        return [self.client() for _ in range(count)]


class RayReplayBuffer(RayBufferClient):
    """A TorchRL replay buffer in a Ray actor.

    Collectors write to the buffer, and learners sample from it. The actor ends when :meth:`close`
    is called, or when this object is garbage-collected. Copies of this object in other processes
    of the cluster are clients, which do not end the actor.

    Args:
        *args: arguments of the buffer.
        replay_buffer_cls: class of the buffer; by default TorchRL's ``ReplayBuffer``.
        ray_init_config: arguments of ``ray.init``, if this process is not connected to a cluster.
        remote_config: options of the actor, such as ``num_cpus`` (0 by default), ``memory`` and
            ``resources``.
        placement_timeout: maximum time in seconds to wait until the cluster has these resources;
            None for no limit.
        transport: ``"ray"`` or ``"auto"``. With both, data goes through Ray's object store.
        transport_options: None, because this transport has no options.
        delayed_init: True to make the buffer only when it is first used.
        **kwargs: more arguments of the buffer. Pass functions that make the ``storage``, the
            ``sampler`` and the ``writer``; the actor calls these functions.

    Raises:
        ImportError: if Ray is not installed, or if TorchRL is not installed and
            ``replay_buffer_cls`` is None.
        ValueError: if ``transport`` is unknown, or ``transport_options`` is not empty.
        RuntimeError: if the cluster lacks the resources for the actor.

    Examples:
        >>> from functools import partial
        >>> from torchrl.data import LazyTensorStorage
        >>> from trawl.data import RayReplayBuffer
        >>> buffer = RayReplayBuffer(
        ...     storage=partial(LazyTensorStorage, 1000), batch_size=32
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        *args: Any,
        replay_buffer_cls: Callable[..., Any] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        remote_config: Mapping[str, Any] | None = None,
        placement_timeout: float | None = 30.0,
        transport: str = "auto",
        transport_options: Mapping[str, Any] | None = None,
        delayed_init: bool = False,
        **kwargs: Any,
    ) -> None:
        ray = import_ray()
        if transport not in _TRANSPORTS:
            raise ValueError(
                f"transport must be one of {', '.join(map(repr, _TRANSPORTS))}, but it is "
                f"{transport!r}"
            )
        if transport_options:
            raise ValueError(
                f"transport {transport!r} takes no options, but transport_options is "
                f"{dict(transport_options)}"
            )
        connect(ray_init_config)
        self._connection = Connection()
        make = pack_code((replay_buffer_cls, args, kwargs))
        # The actor mostly waits, so by default it reserves no CPU and no GPU.
        options = with_defaults({"num_cpus": 0, "num_gpus": 0, **(remote_config or {})})
        place = Placement(options, placement_timeout)
        actor = ray.remote(_BufferActor).options(**options).remote(make, list(sys.path))
        super().__init__(actor)
        self._closed = False
        if delayed_init:
            return
        try:
            self._await(place)
            self._ask("get", "made")
        except BaseException:
            self.close()
            raise

    def _await(self, place: Placement) -> None:
        """Waits until the actor has started."""
        ray = import_ray()
        begun = self._actor.begun.remote()
        while not ray.wait([begun], timeout=place.patience)[0]:
            place.check("the replay buffer's actor")

    def close(self) -> None:
        """Ends the actor, and thus the buffer. Further calls do nothing."""
        if not self.__dict__.get("_closed", True):
            self._closed = True
            if self._connection.alive:
                with contextlib.suppress(ValueError):
                    import_ray().kill(self._actor)

    def shutdown(self) -> None:
        """Alias of :meth:`close`."""
        self.close()

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> Any:
        # A copy is only a client, so that the actor does not end with the copy.
        return RayBufferClient, (self._actor,)


@contextlib.contextmanager
def _nameless_locks() -> Iterator[None]:
    """Sets the start method ``fork`` within the context, so that new locks have no names.

    With other start methods, a lock has a name in /dev/shm. The name would remain there if the
    actor was killed together with the process that should remove the name.
    """
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)


class _BufferActor:
    """Actor that holds the buffer and calls its methods."""

    def __init__(self, make: Frame, path: Sequence[str]) -> None:
        sys.path += [entry for entry in path if entry not in sys.path]
        self._make = make
        self._buffer: Any = None
        self._written: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._passes = 0
        self._iterators: OrderedDict[int, Iterator[Any]] = OrderedDict()

    def begun(self) -> None:
        """Does nothing; a reply shows that the actor has started."""

    def call(self, frame: Frame) -> Frame:
        """Calls a method of the buffer, or this actor's own version of the method."""
        try:
            return pack_for_ray(self._call(*frame.content()), copy=False)
        except Exception as error:
            return pack_for_ray(Failure.of(error))

    def _call(self, name: str, args: Any, kwargs: Any) -> Any:
        buffer = self._made()
        own = getattr(self, f"_do_{name}", None)
        return (getattr(buffer, name) if own is None else own)(*args, **kwargs)

    def _made(self) -> Any:
        if self._buffer is None:
            kind, args, kwargs = self._make.content()
            if kind is None:
                from torchrl.data import ReplayBuffer

                kind = ReplayBuffer
            with _nameless_locks():
                for name in _MADE_THERE:
                    if callable(kwargs.get(name)):
                        kwargs[name] = kwargs[name]()
                self._buffer = kind(*args, **kwargs)
        return self._buffer

    def _do_attribute(self, path: str) -> tuple[bool, tuple[Any] | None]:
        """Returns whether there is an attribute, and its value unless it is a method."""
        try:
            value = attrgetter(path)(self._buffer)
        except AttributeError:
            return False, None
        return True, None if callable(value) else (value,)

    def _do_call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        result = attrgetter(path)(self._buffer)(*args, **kwargs)
        return _ITSELF if result is self._buffer else result

    def _do_begin_pass(self) -> int:
        """Begins to iterate over the buffer, and returns the number of this iteration."""
        self._passes += 1
        self._iterators[self._passes] = iter(self._buffer)
        if len(self._iterators) > _MOST_PASSES:  # of clients that stopped before the end
            self._iterators.popitem(last=False)
        return self._passes

    def _do_next_of_pass(self, number: int) -> tuple[Any] | None:
        """Returns the next sample of an iteration, or None at its end."""
        if number not in self._iterators:
            raise RuntimeError(
                "this iteration over the replay buffer was ended, because more than "
                f"{_MOST_PASSES} others began before its end"
            )
        for sample in self._iterators[number]:
            return (sample,)
        del self._iterators[number]
        return None

    def _do_get(self, name: str) -> Any:
        return True if name == "made" else getattr(self._buffer, name)

    def _do_stats(self) -> dict[str, Any]:
        facts = {"size": len(self._buffer), "write_count": self._buffer.write_count}
        told = getattr(self._buffer, "stats", None)
        return facts if told is None else {**facts, **told()}

    def _do_extend_once(self, name: tuple[Any, ...], data: Any) -> Any:
        if name not in self._written:
            self._written[name] = self._buffer.extend(data)
            if len(self._written) > _REMEMBERED:
                self._written.popitem(last=False)
        return None
