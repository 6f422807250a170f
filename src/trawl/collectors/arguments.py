"""The constructor arguments of collectors, as editors, type checkers and ``help()`` see them.

Each option is declared once, in a configuration dataclass. The dataclasses here add the arguments
that are not options. They are never instantiated: their constructors only show which arguments
the collectors accept.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from trawl.collectors.config import CollectorConfig, PolicyLike
from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.options import meanings
from trawl.docstrings import entries
from trawl.envs.types import DeviceLike, EnvKwargs, EnvSources

Parameters = ParamSpec("Parameters")
Class = TypeVar("Class", bound=type)
Constructor = Callable[..., None]
Factory = Callable[[], Any]

_OPTIONS = re.compile(r"^( +)\*\*options:.*(?:\n\1 +.*)*", re.MULTILINE)


@dataclass(frozen=True)
class CollectorArguments(CollectorConfig):
    """The arguments of a :class:`~trawl.collectors.Collector`.

    Attributes:
        backend: place where the collector runs. ``"direct"`` (the default) collects in this
            process. ``"process"`` (the default with ``num_collectors``), ``"ray"``, ``"rpc"``,
            ``"distributed"`` and ``"submitit"`` collect in workers, and so do the places that other
            packages add. With workers, the constructor returns an instance of the backend's
            collector class, which is not a ``Collector``.
        backend_options: mapping of the options that only the backend's collector class has.
        num_collectors: number of workers, if ``create_env_fn`` is not a list.
        sync: True if all workers together make each batch. By default, each batch comes from one
            worker.
    """

    create_env_fn: EnvSources
    policy: PolicyLike | None = None
    backend: (
        Literal["direct", "process", "multiprocessing", "ray", "rpc", "distributed", "submitit"]
        | None
    ) = field(default=None, kw_only=True)
    backend_options: Mapping[str, Any] | None = field(default=None, kw_only=True)
    num_collectors: int | None = field(default=None, kw_only=True)
    sync: bool | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class AsyncArguments(MultiConfig):
    """The arguments of a collector with workers; some may be lists, with an entry per worker.

    Attributes:
        create_env_fn: a list with the environment of each worker, in any form that
            :class:`~trawl.collectors.Collector` accepts; or one environment for all workers.
        policy: the policy, of which every worker gets a copy; or a list with a policy for each
            worker.

    Raises:
        TypeError: if an argument is unknown or has the wrong type.
        ValueError: if a value is out of range, or arguments contradict each other.
        WorkerError: if a worker can't make its environment or policy. The error is also an
            instance of the original exception's type.
    """

    create_env_fn: EnvSources
    policy: PolicyLike | Sequence[PolicyLike | None] | None = None
    # These types are wider than in the configuration, because the values may be lists, which
    # WorkerSetups splits among the workers.
    frames_per_batch: int | Sequence[int] = field(kw_only=True)  # type: ignore[assignment]
    policy_factory: Factory | Sequence[Factory | None] | None = field(  # type: ignore[assignment]
        default=None, kw_only=True
    )
    device: DeviceLike | Sequence[DeviceLike | None] | None = field(  # type: ignore[assignment]
        default=None, kw_only=True
    )
    storing_device: DeviceLike | Sequence[DeviceLike | None] | None = field(  # type: ignore[assignment]
        default=None, kw_only=True
    )
    env_device: DeviceLike | Sequence[DeviceLike | None] | None = field(  # type: ignore[assignment]
        default=None, kw_only=True
    )
    policy_device: DeviceLike | Sequence[DeviceLike | None] | None = field(  # type: ignore[assignment]
        default=None, kw_only=True
    )
    create_env_kwargs: EnvKwargs | Sequence[EnvKwargs | None] | None = field(  # type: ignore[assignment]
        default=None, kw_only=True
    )


@dataclass(frozen=True)
class MultiArguments(AsyncArguments):
    """The arguments of a collector with several workers on this machine."""

    create_env_fn: EnvSources | Sequence[EnvSources]  # type: ignore[assignment]


@dataclass(frozen=True)
class MultiCollectorArguments(MultiArguments):
    """The arguments of a :class:`~trawl.collectors.MultiCollector`.

    Attributes:
        sync: True if all workers together make each batch; False if each batch comes from one
            worker.

    Raises:
        TypeError: if an argument is unknown or has the wrong type, or ``sync`` is missing.
    """

    sync: bool = field(kw_only=True)


def accepts(
    arguments: Callable[Parameters, Any],
) -> Callable[[Constructor], Callable[Concatenate[Any, Parameters], None]]:
    """Declares to type checkers which arguments a constructor takes.

    Args:
        arguments: a dataclass whose constructor takes these arguments.
    """

    def declare(constructor: Constructor) -> Constructor:
        return constructor

    return declare


def describe(arguments: type[Any]) -> Callable[[Class], Class]:
    """Returns a class decorator that makes ``help()`` and ``inspect.signature`` show the arguments.

    The class docstring gets what the dataclass says; see :func:`described`.

    Args:
        arguments: a dataclass whose constructor takes the same arguments as the class.
    """

    def decorate(cls: Class) -> Class:
        signature = inspect.signature(arguments).replace(return_annotation=inspect.Signature.empty)
        cls.__signature__ = signature  # type: ignore[attr-defined]
        if cls.__doc__:
            cls.__doc__ = described(cls.__doc__, arguments, signature.parameters)
        return cls

    return decorate


def described(text: str, arguments: type[Any], names: Iterable[str], options: bool = False) -> str:
    """Returns the docstring of a class with what the dataclass of its arguments says.

    Entries of arguments that it lacks replace the entry for ``**options``. The errors of the
    constructor follow, if it names none.

    Args:
        text: the docstring.
        arguments: the dataclass.
        names: the arguments.
        options: True to keep the entry for ``**options``, too.
    """
    own, said = entries(text, "Args"), meanings(arguments)
    lines = [line for name in names if name not in own for line in said.get(name, ())]
    errors = {} if entries(text, "Raises") else meanings(arguments, "Raises")

    def section(found: re.Match[str]) -> str:
        indent = found[1]
        shown = [*(f"{indent}{line}" for line in lines), *([found[0]] if options else [])]
        if errors:
            shown += ["", f"{indent[4:]}Raises:"]
            shown += [f"{indent}{line}" for error in errors.values() for line in error]
        return "\n".join(shown)

    return _OPTIONS.sub(section, text, count=1)
