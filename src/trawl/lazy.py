"""Public modules whose names are imported when they are first used.

The stub of such a module, a ``.pyi`` file beside it, is the only list of its names and of the
modules that have them. Type checkers read the stub as it is.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def names_of_stub(
    module: str, warn_of: Callable[[str, str], None] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns ``__getattr__``, ``__dir__`` and ``__all__`` of a module that has a stub.

    Args:
        module: name of the module.
        warn_of: function that is called with an older name and the new one when the older one is
            looked up. The stub assigns new names to older ones.
    """
    homes, older = _homes(module)

    def look_up(name: str) -> Any:
        package = vars(sys.modules[module])
        if name in homes:
            home, original = homes[name]
            found = package[name] = getattr(importlib.import_module(home), original)
            return found
        inside = "__path__" in package and not name.startswith("_")
        if inside and find_spec(f"{module}.{name}") is not None:
            return importlib.import_module(f"{module}.{name}")
        if warn_of is not None and name in older:
            warn_of(name, older[name])
            return look_up(older[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return look_up, public_dir(module), sorted(homes)


def public_dir(module: str) -> Callable[[], list[str]]:
    """Returns ``__dir__`` of a module: the names in ``__all__``, and the loaded public modules.

    Completion in an editor or a notebook then shows no helpers that the module imports.
    """

    def names() -> list[str]:
        there = vars(sys.modules[module])
        shown = [name for name in there if name.startswith("__") or is_public(there[name])]
        return sorted({*shown, *there["__all__"]})

    def is_public(value: Any) -> bool:
        inside = isinstance(value, ModuleType) and value.__name__.startswith(f"{module}.")
        return inside and hasattr(value, "__all__")

    return names


def _homes(module: str) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Returns the module, and the name there, of each name that a stub imports; and older names."""
    spec = sys.modules[module].__spec__
    assert spec is not None
    # The loader finds the file in an archive, too.
    loader: Any = spec.loader
    stub = ast.parse(loader.get_data(f"{spec.origin}i").decode())
    homes = {
        alias.asname: (node.module, alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        if alias.asname
    }
    older = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in stub.body
        if isinstance(node, ast.Assign)
    }
    return homes, older
