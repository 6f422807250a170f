"""Imports tensordict in half the time.

On import, tensordict marks some of its functions for PyTorch's compiler. Marking a function imports
the compiler, which takes longer to import than tensordict itself. A process that collects rarely
compiles anything. Therefore, this module postpones the marks until the compiler is imported.

Without this module, importing ``trawl.collectors`` in a fresh interpreter takes twice the CPU time.
The benchmark ``first_batch`` in ``benchmarks/multi`` measures the effect on the start of workers.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_TENSORDICT, _COMPILER = "tensordict", "torch._dynamo"
# Functions of `torch.compiler` that mark a function and return it. They import the compiler.
_MARKS = ("allow_in_graph", "assume_constant_result")

# Calls to make once the compiler is imported.
_Later = list[tuple[Callable[[Any], Any], Any]]


def import_lean() -> None:
    """Makes the import of tensordict skip the compiler.

    Importing ``trawl`` calls this function. If tensordict or the compiler is already imported, it
    does nothing.

    During the import of tensordict, ``torch.compiler`` is patched. No other thread can need it
    then: whoever compiles has imported the compiler.
    """
    there = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if not there and _TENSORDICT not in sys.modules and _COMPILER not in sys.modules:
        sys.meta_path.insert(0, _Finder(_TENSORDICT, _without_compiler))


class _Finder(MetaPathFinder):
    """Import hook that executes one module, once, within a context manager."""

    def __init__(self, name: str, around: Callable[[], Any]) -> None:
        self._name, self._around = name, around

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._around)
        return spec


class _Loader(Loader):
    """Loads a module with another loader, and executes the module within a context manager."""

    def __init__(self, loader: Loader, around: Callable[[], Any]) -> None:
        self._loader, self._around = loader, around

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        with self._around():
            self._loader.exec_module(module)


@contextmanager
def _without_compiler() -> Iterator[None]:
    with _no_garbage():
        import torch.compiler

        if _COMPILER in sys.modules:
            yield
            return
        later: _Later = []
        marks = {name: getattr(torch.compiler, name) for name in _MARKS}
        for name, mark in marks.items():
            setattr(torch.compiler, name, _postponed(mark, later))
        sys.meta_path.insert(0, _Finder(_COMPILER, lambda: _applied(later)))
        try:
            yield
        finally:
            for name, mark in marks.items():
                setattr(torch.compiler, name, mark)


def _postponed(mark: Callable[[Any], Any], later: _Later) -> Callable[[Any], Any]:
    def note(function: Any) -> Any:
        if _COMPILER in sys.modules:
            return mark(function)
        later.append((mark, function))
        return function

    return note


@contextmanager
def _applied(later: _Later) -> Iterator[None]:
    yield
    for mark, function in later:
        mark(function)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Turns off garbage collection, because nearly all objects that imports create persist."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
