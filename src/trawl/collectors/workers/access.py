"""Access to the collectors of workers: calls of functions with them, and paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import isroutine
from operator import methodcaller
from typing import Any

from typing_extensions import override

from trawl.collectors.driver.access import Access
from trawl.collectors.driver.background import BackgroundCollection
from trawl.collectors.driver.lifetime import Lifetime
from trawl.collectors.workers.pool import WorkerPool
from trawl.collectors.workers.weights import WorkersWeights
from trawl.paths import first_name, get_path


class WorkerCalls:
    """Calls functions with the workers' collectors, between two batches.

    Args:
        lifetime: the time in which the collector is open.
        background: the thread of the collector.
        weights: the weights that are sent to workers.
        pool: the workers.
    """

    def __init__(
        self,
        lifetime: Lifetime,
        background: BackgroundCollection,
        weights: WorkersWeights,
        pool: WorkerPool,
    ) -> None:
        self._lifetime, self._background = lifetime, background
        self._sender, self._pool = weights.sender, pool

    def all(self, function: Any, *arguments: Any) -> list[Any]:
        """Calls a function with each worker's collector, and returns the results."""
        return self.each(function, [arguments] * len(self._pool.slots))

    def first(self, function: Any, *arguments: Any) -> Any:
        """Calls a function with the first worker's collector, and returns the result."""
        (answer,) = self.each(function, [arguments])
        return answer

    def each(self, function: Any, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a function with the collector of each worker that has an entry in ``arguments``."""
        self._lifetime.check_open(getattr(function, "__name__", "a call"))
        with self._background.held():
            results = self.call({i: (function, *own) for i, own in enumerate(arguments)})
        return list(results.values())

    def call(self, calls: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls functions with the collectors of workers, which have the newest weights then."""
        self.catch_up()
        return self._pool.call(calls)

    def catch_up(self) -> None:
        """Waits for a batch that was requested ahead, and sends updates that wait for it."""
        if self._sender.holding:
            self._pool.settle()
            self._sender.release()


class WorkersAccess(Access):
    """Gets and calls what paths lead to in the workers' collectors.

    Args:
        collector: the collector, to which the object has no strong reference.
        background: the thread of the collector.
        lifetime: the time in which the collector is open.

    Attributes:
        calls: calls functions with the workers' collectors.
    """

    calls: WorkerCalls

    def __init__(
        self, collector: Any, background: BackgroundCollection, lifetime: Lifetime
    ) -> None:
        super().__init__(collector, background)
        self._lifetime = lifetime
        self._buffered = collector.config.replay_buffer is not None

    @override
    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> list[Any]:
        count = self.collector.num_workers
        args = [()] * count if list_of_args is None else list(list_of_args)
        kwargs = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
        for given in (args, kwargs):
            if len(given) != count:
                raise ValueError(f"Expected {count} argument entries, got {len(given)}")
        self._lifetime.check_open("map_fn()")
        if self._is_of_buffer(method_name):
            return super().map_fn(method_name, args, kwargs)
        calls = [(method_name, *own) for own in zip(args, kwargs, strict=True)]
        return self.calls.each(call_path, calls)

    @override
    def get_distant_attr(self, attr: str) -> list[Any]:
        if self._is_of_buffer(attr):
            return [get_path(self.collector, attr)] * self.collector.num_workers
        return self.calls.all(get_distant, attr)

    @override
    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        if first_name(attr_path) != "env":
            return super().cascade_execute(attr_path, *args, **kwargs)
        return self.calls.all(methodcaller("cascade_execute", attr_path, *args, **kwargs))

    @override
    def getattr_policy(self, attr: str) -> Any:
        return self.calls.first(methodcaller("getattr_policy", attr))

    @override
    def getattr_env(self, attr: str) -> Any:
        return self.calls.first(methodcaller("getattr_env", attr))

    def _is_of_buffer(self, path: str) -> bool:
        """Returns True if a path leads to the replay buffer, which exists once for all workers."""
        return self._buffered and first_name(path) == "replay_buffer"


def _has_workers(collector: Any) -> bool:
    parts = getattr(collector, "parts", None)
    return isinstance(getattr(parts, "access", None), WorkersAccess)


def call_path(collector: Any, path: str, args: Any, kwargs: Any) -> Any:
    """Calls the method at path ``path`` of a worker's collector, or of each of its own workers."""
    if _has_workers(collector):
        count = collector.num_workers
        return collector.map_fn(path, [args] * count, [kwargs] * count)
    (result,) = collector.map_fn(path, [args], [kwargs])
    return result


def get_distant(collector: Any, path: str) -> Any:
    """Returns the attribute at a path of a worker's collector.

    If the collector has workers of its own, a path that begins with ``env`` leads to theirs.
    """
    if _has_workers(collector) and first_name(path) == "env":
        return collector.get_distant_attr(path)
    return get_path(collector, path)


class WorkerEnv:
    """The environment of a worker, as far as it can be used from the process of the driver.

    Attributes are copies, and methods are called in the worker, which answers once it has finished
    its batch. Each access is a message to the worker.

    Args:
        ask: function that calls a function with the worker's collector, and returns its result.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        # The object itself may be copied and shown without a message.
        if name.startswith("__") or name == "_ask":  # not set yet in a copy
            raise AttributeError(name)
        is_method, value = self._ask(_look_up, name)
        return partial(self._call, name) if is_method else value

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._ask(_call_env, name, args, kwargs)

    def __repr__(self) -> str:
        return str(self._ask(_show_env))


def _look_up(collector: Any, name: str) -> tuple[bool, Any]:
    """Returns an attribute of the environment; for a method, which can't be sent, None."""
    found = getattr(collector.env, name)
    is_method = isroutine(found) or isinstance(found, partial)
    return is_method, None if is_method else found


def _call_env(collector: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return getattr(collector.env, name)(*args, **kwargs)


def _show_env(collector: Any) -> str:
    return repr(collector.env)
