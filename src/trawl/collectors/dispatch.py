"""Selects where a ``Collector`` runs, from ``backend=`` and the arguments that go with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextvars import copy_context
from dataclasses import fields
from pkgutil import resolve_name
from typing import Any, Final

from trawl.backends.places import PLACES
from trawl.checks import check_bool
from trawl.collectors.config import CollectorConfig
from trawl.envs.types import is_list
from trawl.supported import DIRECT_BACKEND

DIRECT: Final = "direct"
_ARGUMENTS = ("backend", "backend_options", "num_collectors", "sync")
_PROCESS = ("process", "multiprocessing")
_RAY = "ray"
_REMOTE = ("rpc", "distributed", "submitit")
# The collector class of each backend. The classes are named, not imported, because their modules
# import ``Collector``, whose module imports this one.
_CLASSES = {
    "process": "trawl.collectors.multi:MultiCollector",
    _RAY: "trawl.collectors.distributed:RayCollector",
    "rpc": "trawl.collectors.distributed:RPCCollector",
    "distributed": "trawl.collectors.distributed:DistributedCollector",
    "submitit": "trawl.collectors.distributed:DistributedCollector",
}
_RESERVED = ("backend_options", "num_collectors", "num_workers", "sync")


def backend_arguments(options: dict[str, Any], allowed: bool) -> dict[str, Any]:
    """Removes the backend's arguments from ``options``, and returns those that are not None.

    Args:
        options: keyword arguments of the constructor; modified in place.
        allowed: True if the class accepts the arguments (subclasses of ``Collector`` don't).

    Raises:
        TypeError: if the class does not accept the arguments, or ``num_collectors`` is no integer.
        ValueError: if ``num_collectors`` is not positive.
    """
    given = {name: options.pop(name) for name in _ARGUMENTS if name in options}
    given = {name: value for name, value in given.items() if value is not None}
    if given and not allowed:
        raise TypeError(f"only Collector itself takes {', '.join(given)}")
    count = given.get("num_collectors")
    if count is not None:
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"num_collectors must be a positive integer, but it is {count!r}")
        if count < 1:
            raise ValueError(f"num_collectors must be a positive integer, but it is {count}")
    return given


def chosen_backend(given: Mapping[str, Any]) -> str:
    """Returns the backend that the arguments ask for.

    Raises:
        ValueError: if the backend is unknown, or another argument can't be used with it.
    """
    count = given.get("num_collectors")
    backend, source = given.get("backend"), ""
    if backend is None and (backend := _backend_of_context()) is not None:
        source = " (chosen by an enclosing torchrl.service_backend)"
    if backend is None:
        backend = DIRECT if count is None else "process"
    if backend not in (DIRECT, *_PROCESS, *_CLASSES) and PLACES.get(backend) is None:
        names = ", ".join(map(repr, (DIRECT, *_CLASSES, *PLACES)))
        raise ValueError(f"unknown backend {backend!r}{source}: the backends are {names}")
    if backend != DIRECT:
        return "process" if backend in _PROCESS else str(backend)
    if count is not None and count > 1:
        raise ValueError(f"backend 'direct'{source} takes at most one collector, not {count}")
    for name in ("sync", "backend_options"):
        if name in given:
            raise DIRECT_BACKEND.error(name, given[name], against=f"backend 'direct'{source}")
    return DIRECT


def _backend_of_context() -> str | None:
    """Returns the backend that an enclosing ``torchrl.service_backend`` chooses, or None.

    TorchRL has no public function that returns the backend. TorchRL's context variable is found by
    name, and exists only if TorchRL was imported.
    """
    for variable, value in copy_context().items():
        if variable.name == "torchrl_service_backend" and value is not None:
            process, backend = value
            # A forked process inherits the variable, but the choice is only for the parent process.
            return str(backend) if process == os.getpid() else None
    return None


def elsewhere(args: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Makes a collector with workers if the arguments ask for one; otherwise returns None.

    Raises:
        TypeError, ValueError: if the arguments are invalid, or contradict each other.
    """
    own = dict(options)
    given = backend_arguments(own, allowed=True)
    backend = chosen_backend(given)
    if backend == DIRECT:
        return None
    if len(args) > 2:
        raise TypeError(
            "Collector takes at most 2 positional arguments (create_env_fn, policy), but got "
            f"{len(args)}: pass the others by name"
        )
    named = dict(zip(("create_env_fn", "policy"), args, strict=False))
    for name, value in named.items():
        if own.setdefault(name, value) is not value:
            raise ValueError(f"{name} was passed twice")
    extra = given.get("backend_options", {})
    if not isinstance(extra, Mapping):
        raise TypeError(f"backend_options must be a mapping, but it is {extra!r}")
    extra = dict(extra)
    if "num_workers" in own:
        raise TypeError(
            "Collector takes num_collectors instead of num_workers: pass "
            f"num_collectors={own['num_workers']}"
        )
    _check_extra(extra, own)
    own = {name: value for name, value in own.items() if not _is_default(name, value)}
    if "create_env_fn" not in own:
        raise TypeError("Collector needs the argument create_env_fn")
    factories = _factories(own.pop("create_env_fn"), given.get("num_collectors"))
    check_bool("sync", given.get("sync"))
    sync = bool(given.get("sync", False))
    if backend in _REMOTE:
        # By default, workers run on this machine, except with submitit.
        own_launcher = "submitit" if backend == "submitit" else "mp"
        if extra.setdefault("launcher", own_launcher) != own_launcher == "submitit":
            raise ValueError(
                f"backend='submitit' and backend_options['launcher']={extra['launcher']!r} "
                "contradict each other"
            )
    if backend not in _CLASSES:
        own["start_method"] = backend
    cls = resolve_name(_CLASSES.get(backend, _CLASSES["process"]))
    return cls(factories, own.pop("policy", None), sync=sync, **own, **extra)


def _check_extra(extra: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    for name in extra:
        if name in _RESERVED:
            own = "num_collectors" if name == "num_workers" else name
            raise ValueError(
                f"backend_options contains {name!r}, which is reserved: pass {own} to Collector "
                "itself"
            )
        if name in options:
            raise ValueError(f"duplicate argument {name!r}: it is also in backend_options")


def _is_default(name: str, value: Any) -> bool:
    """Returns True if the value is the option's default.

    Defaults are not passed to the backend's class, which may not have the option.
    """
    default = {field.name: field.default for field in fields(CollectorConfig)}
    return name in default and (value is default[name])


def _factories(create_env_fn: Any, count: int | None) -> list[Any]:
    if is_list(create_env_fn):
        if not create_env_fn:
            raise ValueError("create_env_fn must not be an empty list")
        if count not in (None, len(create_env_fn)):
            raise ValueError(
                f"num_collectors={count} does not match create_env_fn, a list of "
                f"{len(create_env_fn)} entries"
            )
        return list(create_env_fn)
    return [create_env_fn] * (count or 1)
