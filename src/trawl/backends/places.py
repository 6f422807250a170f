"""The places where workers can run, by name.

Other packages declare theirs in the group ``trawl.places``; see the page "Your own place".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trawl.backends.base import Backend
from trawl.checks import is_portable
from trawl.registry import Registry

#: Function without arguments that makes a backend, for one collector.
Place = Callable[[], Backend]


def forked() -> Backend:
    """Makes a backend whose workers are forked from a server; on other systems, spawned ones."""
    return _processes("forkserver")


def spawned() -> Backend:
    """Makes a backend whose workers are fresh interpreters."""
    return _processes("spawn")


def _processes(start_method: str) -> Backend:
    if is_portable():
        from trawl.backends.portable import PortableBackend

        return PortableBackend()
    from trawl.backends.processes.backend import ProcessBackend

    return ProcessBackend(start_method)


PLACES: Registry[Place] = Registry(
    "trawl.places",
    {
        "forkserver": "trawl.backends.places:forked",
        "spawn": "trawl.backends.places:spawned",
        "inline": "trawl.backends.inline:InlineBackend",
        "portable": "trawl.backends.portable:PortableBackend",
    },
    callable,
    "a function or a class",
)


def check_place(name: str, value: Any) -> str | Place:
    """Checks an option that takes a place: its name, or a function that makes its backend.

    Raises:
        ValueError: if there is no place of this name.
        TypeError: if the value is neither text nor a function.
        ImportError: if the place of another package can't be loaded.
    """
    if isinstance(value, str):
        if PLACES.get(value) is None:
            raise ValueError(
                f"{name} must be one of {', '.join(map(repr, PLACES))}, or a function that makes a "
                f"backend, but it is {value!r}"
            )
    elif not callable(value):
        raise TypeError(
            f"{name} must be the name of a place, or a function that makes a backend, but it is "
            f"{value!r}"
        )
    found: str | Place = value
    return found


def backend_at(place: str | Place) -> Backend:
    """Returns a new backend of a place.

    Raises:
        TypeError: if the place's function makes something else.
    """
    backend = (PLACES[place] if isinstance(place, str) else place)()
    if not isinstance(backend, Backend):
        raise TypeError(f"a place must make a Backend, but {place!r} made {backend!r}")
    return backend
