"""Where a ``Collector`` is to run: the rules for ``backend=`` and its companions."""

from __future__ import annotations

import inspect
from typing import Any

from trawl.collectors.config import CollectorConfig

DIRECT = "direct"
_ARGUMENTS = ("backend", "backend_options", "num_collectors", "sync")
_KNOWN = ("process", "multiprocessing", "ray", "rpc", "distributed", "submitit")


def check_backend(allowed: bool, options: dict[str, Any]) -> None:
    """Takes the backend's arguments out of ``options``, and checks that they mean this process.

    Args:
        allowed: whether the class takes them (its subclasses don't).
        options: keyword arguments of the constructor; changed.

    Raises:
        TypeError: if a number of collectors is no integer, or the class takes no backend.
        ValueError: for another backend than ``"direct"``, or arguments that it has no use for.
    """
    given = {name: options.pop(name) for name in _ARGUMENTS if name in options}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not allowed:
        raise TypeError(f"{', '.join(given)} can be given to Collector itself only")
    count = given.get("num_collectors")
    if count is not None:
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"num_collectors must be a positive integer, but it is {count!r}")
        if count < 1:
            raise ValueError(f"num_collectors must be a positive integer, but it is {count}")
    backend = given.get("backend", DIRECT if count is None else "process")
    if backend != DIRECT:
        known = backend in _KNOWN
        why = "is not available in this release" if known else "is unknown"
        asked = f" (num_collectors={count} asks for it)" if "backend" not in given else ""
        raise ValueError(f"backend {backend!r}{asked} {why}; there is {DIRECT!r}")
    if count is not None and count > 1:
        raise ValueError(f"backend 'direct' takes at most one collector, not {count}")
    for name in ("sync", "backend_options"):
        if name in given:
            raise ValueError(f"{name} has no meaning with backend 'direct'")


def full_signature() -> inspect.Signature:
    """The signature of ``Collector``, with the options that its configuration holds."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = inspect.signature(CollectorConfig).parameters.values()
    return inspect.Signature(
        [
            inspect.Parameter("create_env_fn", kind),
            inspect.Parameter("policy", kind, default=None),
            *[option.replace(kind=keyword) for option in options],
            *[inspect.Parameter(name, keyword, default=None) for name in _ARGUMENTS],
        ]
    )
