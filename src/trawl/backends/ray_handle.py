"""Class of a worker's actor, with methods for the backend and for holders of its handle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trawl.backends.ray_actor import CONCURRENCY, RayActor

_BACKEND = "backend"


def actor_class(methods: Iterable[str]) -> Any:
    """Makes the class of actors whose handles have methods of the worker's service.

    The class is sent to actors by value, because no module contains it.

    Calls of these methods run in a separate thread, so they never keep the backend waiting. If the
    actor's ``max_concurrency`` is 1, Ray begins these calls in the order in which a caller makes
    them.

    Args:
        methods: names of methods. Each call goes to the service as a
            :class:`~trawl.backends.base.HandleCall`, except ``shutdown``, which ends the worker.
    """
    import ray

    grouped = ray.method(concurrency_group=_BACKEND)
    own = {name: _method(name) for name in methods}
    own |= {name: grouped(getattr(RayActor, name)) for name in RayActor.of_backend}
    kind = type("RayWorkerActor", (RayActor,), own)
    return ray.remote(concurrency_groups={_BACKEND: CONCURRENCY})(kind)


def _method(name: str) -> Any:
    if name == "shutdown":

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.backend_end()

    else:

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self.backend_ask(name, args, kwargs)

    call.__name__ = call.__qualname__ = name
    return call
