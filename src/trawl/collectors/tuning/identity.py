"""Identity of environments, policies and machines across runs of a program."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import platform
import re
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trawl.collectors.tuning.space import usable_cores
from trawl.versions import version

_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Objects within objects beyond this depth are not looked at.
_DEPTH = 8


class UnidentifiedError(Exception):
    """Raised for an object that can't be recognised in another run of the program."""


def digest_of(*values: Any) -> str | None:
    """Returns a digest that equal values have in every run; None if a value has no identity.

    Examples:
        >>> digest_of("CartPole-v1", {"sync": True}) == digest_of("CartPole-v1", {"sync": True})
        True
        >>> digest_of("CartPole-v1") == digest_of("Pendulum-v1")
        False
    """
    try:
        found = [_describe(value, _DEPTH) for value in values]
    except UnidentifiedError:
        return None
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def machine() -> dict[str, Any]:
    """Returns facts about this machine and the installed versions on which speeds depend."""
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "trawl": version(),
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _describe(value: Any, depth: int) -> Any:
    """Returns plain data that identifies a value.

    Raises:
        UnidentifiedError: if the value, or a part of it, has no identity.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth == 0:
        raise UnidentifiedError
    deeper = depth - 1
    if isinstance(value, enum.Enum | torch.device | torch.dtype):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _describe(each, deeper) for name, each in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [_describe(each, deeper) for each in items]
    if isinstance(value, nn.Module):
        return _module(value)
    return _callable(value, deeper)


def _callable(value: Any, depth: int) -> Any:
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return ["partial", *(_describe(part, depth) for part in parts)]
    if isinstance(value, types.MethodType):
        return [_describe(value.__self__, depth), _name(value.__func__)]
    if isinstance(value, types.FunctionType):
        cells = [_cell(cell, depth) for cell in value.__closure__ or ()]
        defaults = [_describe(each, depth) for each in value.__defaults__ or ()]
        keywords = _describe(value.__kwdefaults__, depth)
        return [_name(value), _code(value.__code__), cells, defaults, keywords]
    if isinstance(value, types.BuiltinFunctionType):
        return _name(value)
    if isinstance(value, type):
        functions = (each for each in vars(value).values() if hasattr(each, "__code__"))
        return [_name(value), [_code(each.__code__) for each in functions]]
    if hasattr(value, "__dict__"):
        return [_describe(type(value), depth), _describe(vars(value), depth)]
    raise UnidentifiedError


def _cell(cell: types.CellType, depth: int) -> Any:
    try:
        return _describe(cell.cell_contents, depth)
    except ValueError:  # the cell is empty
        return None


def _module(module: nn.Module) -> Any:
    """Returns a module's structure, without its weights."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    shapes = [[name, list(each.shape), str(each.dtype), str(each.device)] for name, each in tensors]
    return [_name(type(module)), _ADDRESS.sub("", repr(module)), shapes]


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def _code(code: types.CodeType) -> str:
    """Returns a digest of a function's code that doesn't depend on its place in a file."""
    parts = [code.co_code.hex(), [_constant(each) for each in code.co_consts], list(code.co_names)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _code(value)
    # The order of a set of texts differs from run to run.
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)
