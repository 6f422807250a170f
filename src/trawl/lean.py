"""Importing tensordict in half of the time, in processes that are Trawl's own.

Tensordict tells PyTorch's compiler what it need not look into. That alone imports the compiler,
which takes longer than tensordict itself, and a process that collects hardly ever compiles. Here
the compiler is told when somebody imports it.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"
# Functions of `torch.compiler` that take a function, give it back, and import the compiler.
_MARKS = ("allow_in_graph", "assume_constant_result")


def import_lean() -> None:
    """Imports tensordict without the compiler, unless one of the two is there already.

    It changes `torch.compiler` for as long as it takes: for a process's beginning, while nothing
    else is under way.
    """
    if "tensordict" in sys.modules or _COMPILER in sys.modules:
        return
    # Nearly all that imports make stays for good, and is not worth looking through for garbage.
    collecting = gc.isenabled()
    gc.disable()
    try:
        _import_without_compiler()
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def _import_without_compiler() -> None:
    import torch.compiler

    later: list[tuple[Callable[[Any], Any], Any]] = []
    marks = {name: getattr(torch.compiler, name) for name in _MARKS}

    def postponed(mark: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def note(function: Any) -> Any:
            later.append((mark, function))
            return function

        return note

    for name, mark in marks.items():
        setattr(torch.compiler, name, postponed(mark))
    finder = _Finder(later)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("tensordict.nn")
    finally:
        for name, mark in marks.items():
            setattr(torch.compiler, name, mark)


class _Finder(MetaPathFinder):
    """Sees that the compiler is imported, and has it told then what was to be said."""

    def __init__(self, later: list[tuple[Callable[[Any], Any], Any]]) -> None:
        self._later = later

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _COMPILER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Telling(spec.loader, self._later)
        return spec


class _Telling(Loader):
    """Loads the compiler as another loader does, and then makes calls."""

    def __init__(self, loader: Loader, later: list[tuple[Callable[[Any], Any], Any]]) -> None:
        self._loader, self._later = loader, later

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for mark, function in self._later:
            mark(function)
