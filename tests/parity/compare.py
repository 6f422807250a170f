"""Compares Trawl with the TorchRL that is installed: names, signatures, defaults, statistics.

Run by itself, it prints the differences, as the table in ``docs/from-torchrl.md`` has them::

    python tests/parity/compare.py
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from importlib import metadata
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

#: Modules whose public names are compared, in both libraries.
MODULES = ("collectors", "collectors.distributed", "collectors.utils", "weight_update")

_Parameter = inspect.Parameter
_BY_POSITION = (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (_Parameter.VAR_POSITIONAL, _Parameter.VAR_KEYWORD)
# What classes have from torch is not theirs.
_INHERITED = frozenset(dir(nn.Module)) | frozenset(dir(IterableDataset))


def installed() -> tuple[str, str]:
    """Returns the name and the version of the TorchRL that is installed."""
    for name in ("torchrl", "torchrl-nightly"):
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    raise ImportError("TorchRL is not installed")


def is_since(version: str) -> bool:
    """Whether the installed TorchRL has what a version of TorchRL added.

    The versions of ``torchrl-nightly`` are dates, and later than all others.
    """
    numbers = [tuple(map(int, re.findall(r"\d+", one)[:2])) for one in (installed()[1], version)]
    return numbers[0] >= numbers[1]


def differences() -> dict[str, tuple[str, str]]:
    """Returns what differs: by name, what TorchRL has and what Trawl has.

    Trawl may have more parameters, if they have defaults, and defaults where TorchRL has none: a
    call that TorchRL's documents allow means the same then. It may have more statistics, too.
    """
    return signatures() | statistics()


def statistics(*names: str) -> dict[str, tuple[str, str]]:
    """Returns the entries of ``stats()`` that Trawl lacks, by name.

    Args:
        *names: names of collectors; by default, of one without and one with workers.
    """
    import torchrl.collectors

    import trawl.collectors

    found = {}
    for name in names or ("Collector", "MultiSyncCollector"):
        count = 1 if name.startswith("Multi") else None
        theirs = _stats(getattr(torchrl.collectors, name), count)
        ours = _stats(getattr(trawl.collectors, name), count)
        for entry in sorted(theirs - ours):
            found[f"{name}.stats()[{entry!r}]"] = ("yes", "no")
    return found


def _stats(cls: Any, workers: int | None) -> set[str]:
    """Returns the names of a collector's statistics after its first batch."""
    source = cartpole if workers is None else [cartpole] * workers
    options = {"frames_per_batch": 4, "total_frames": 8, "track_policy_version": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = cls(source, **options)
        try:
            next(iter(collector))
            return set(collector.stats() if workers is None else collector.stats(workers="both"))
        finally:
            collector.shutdown()


def cartpole() -> Any:
    """An environment that both libraries step."""
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1")


def signatures() -> dict[str, tuple[str, str]]:
    """Returns what differs in names, parameters and defaults."""
    found: dict[str, tuple[str, str]] = {}
    compared: set[tuple[int, int]] = set()
    for module in MODULES:
        there = importlib.import_module(f"torchrl.{module}")
        here = importlib.import_module(f"trawl.{module}")
        for name in _public(there):
            if not hasattr(here, name):
                found[name] = ("yes", "no")
                continue
            for path, one, other in _members(name, getattr(there, name), getattr(here, name)):
                if other is None:
                    found.setdefault(path, ("yes", "no"))
                    continue
                # What classes inherit is compared once.
                pair = id(_plain(one)), id(_plain(other))
                if pair not in compared:
                    compared.add(pair)
                    found |= {
                        f"{path}({parameter})": (theirs, ours)
                        for parameter, theirs, ours in _between(one, other)
                    }
    return found


def _public(module: Any) -> list[str]:
    named = getattr(module, "__all__", None)
    if named is not None:
        return sorted(named)
    own = (name for name, value in vars(module).items() if _is_of(value, module))
    return sorted(name for name in own if not name.startswith("_"))


def _is_of(value: Any, module: Any) -> bool:
    return callable(value) and getattr(value, "__module__", "") == module.__name__


def _members(name: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields what is compared for a name: itself, and the members of a class."""
    if callable(one):
        yield name, one, other
    if not inspect.isclass(one):
        return
    for member in sorted(dir(one)):
        if member.startswith("_") or member in _INHERITED:
            continue
        theirs = getattr(one, member)
        if not callable(theirs):
            if not _has_attribute(other, member):
                yield f"{name}.{member}", theirs, None
            continue
        yield f"{name}.{member}", theirs, getattr(other, member, None)


def _has_attribute(cls: Any, name: str) -> bool:
    """Whether objects of a class have an attribute, also one that only objects have."""
    if hasattr(cls, name) or any(
        name in vars(base).get("__annotations__", ()) for base in cls.mro()
    ):
        return True
    config = next(
        (
            base.__annotations__.get("config")
            for base in cls.mro()
            if "config" in vars(base).get("__annotations__", ())
        ),
        None,
    )
    return config is not None and name in _option_names()


def _option_names() -> set[str]:
    from trawl.collectors import MultiConfig

    return set(inspect.signature(MultiConfig).parameters)


def _plain(value: Any) -> Any:
    return getattr(value, "__func__", value)


def _between(one: Any, other: Any) -> Iterator[tuple[str, str, str]]:
    """Yields the parameters that differ, with what each library has."""
    theirs, ours = _parameters(one), _parameters(other)
    if theirs is None or ours is None:
        return
    order = [parameter.name for parameter in ours.values() if parameter.kind in _BY_POSITION]
    at = -1
    for name, parameter in theirs.items():
        if parameter.kind in _VARIADIC:
            continue
        at += parameter.kind in _BY_POSITION
        own = ours.get(name)
        if own is None:
            yield name, _shown(parameter), "no"
        elif parameter.kind in _BY_POSITION and order[at : at + 1] != [name]:
            yield (
                name,
                f"argument {at}",
                "by name" if name not in order else f"argument {order.index(name)}",
            )
        elif parameter.default is not _Parameter.empty and not _same(parameter, own):
            yield name, _shown(parameter), _shown(own)
    for name, parameter in ours.items():
        needed = parameter.default is _Parameter.empty and parameter.kind not in _VARIADIC
        if needed and name not in theirs and not _takes_any(theirs):
            yield name, "no", "needed"


def _takes_any(parameters: Any) -> bool:
    return any(parameter.kind in _VARIADIC for parameter in parameters.values())


def _parameters(value: Any) -> Any:
    try:
        found = dict(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return None
    found.pop("self", None)
    return found


def _same(one: inspect.Parameter, other: inspect.Parameter) -> bool:
    return bool(one.default is other.default or one.default == other.default)


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.default is _Parameter.empty:
        return "needed"
    default = parameter.default
    return default.__name__ if inspect.isclass(default) else repr(default)


if __name__ == "__main__":
    print("Compared with", *installed())
    print("\n| Name | TorchRL | Trawl | Why |\n|---|---|---|---|")
    for name, (theirs, ours) in sorted(differences().items()):
        print(f"| `{name}` | {theirs} | {ours} | |")
