"""Docstrings as the documentation's Markdown wants them.

Griffe extensions (see ``mkdocs.yml``). Docstrings refer to other names by ``:class:`` and the
like, which ``help()`` shows well and Markdown doesn't know: here they become links, where the name
is in the reference.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import griffe

from trawl.collectors.arguments import described

ROLE = re.compile(r":(?:class|meth|func|attr|mod|exc|data):`(?P<short>~?)(?P<path>[\w.]+)`")
LITERAL = re.compile(r"::$", flags=re.MULTILINE)


class Parts(griffe.Extension):
    """Shows methods of parts, which a class assigns by ``of_part``, like its own."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        _replace_parts(pkg, loader)


def _replace_parts(found: griffe.Module | griffe.Class, loader: griffe.GriffeLoader) -> None:
    for name, member in list(found.members.items()):
        if member.is_alias:
            continue
        if isinstance(member, (griffe.Module, griffe.Class)):
            _replace_parts(member, loader)
        value = getattr(member, "value", None)
        if not (isinstance(value, griffe.ExprCall) and str(value.function) == "of_part"):
            continue
        method = loader.modules_collection[value.arguments[1].canonical_path]
        own = griffe.Function(
            name,
            lineno=member.lineno,
            endlineno=member.endlineno,
            parameters=method.parameters,
            returns=method.returns,
            docstring=method.docstring,
        )
        found.set_member(name, own)


class Described(griffe.Extension):
    """Adds what ``describe`` adds to a docstring, except for options, which have pages."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        for decorator in obj.decorators if obj.is_class else ():
            call = decorator.value
            if isinstance(call, griffe.ExprCall) and str(call.function) == "describe":
                module, _, name = call.arguments[0].canonical_path.rpartition(".")
                arguments = getattr(importlib.import_module(module), name)
                names = ("create_env_fn", "policy")
                obj.docstring.value = described(obj.docstring.value, arguments, names, options=True)


class Roles(griffe.Extension):
    """Turns roles into links."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            home = obj.path if obj.is_class or obj.is_module else obj.path.rpartition(".")[0]
            text = ROLE.sub(lambda role: _link(role, home), obj.docstring.value)
            obj.docstring.value = LITERAL.sub(":", text)


def _link(role: re.Match[str], home: str) -> str:
    path, shown = role["path"], role["path"]
    if role["short"]:
        shown = path.rpartition(".")[2]
    if "." not in path:
        path = f"{home}.{path}"
    return f'<autoref optional identifier="{path}"><code>{shown}</code></autoref>'
