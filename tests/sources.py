"""The library's modules as syntax trees, for tests of rules that hold for all of them."""

import ast
import functools
from pathlib import Path

import trawl

ROOT = Path(trawl.__file__).parent


def _module_of(path: Path) -> str:
    """The name of the module in a file."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@functools.cache
def tree_of(name: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(FILES[name].read_text())
