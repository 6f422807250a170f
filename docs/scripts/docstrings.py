"""Docstrings as the documentation's Markdown wants them.

A Griffe extension (see ``mkdocs.yml``). Docstrings refer to other names by ``:class:`` and the
like, which ``help()`` shows well and Markdown doesn't know: here they become links, where the name
is in the reference.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|meth|func|attr|mod|exc|data):`(?P<short>~?)(?P<path>[\w.]+)`")
LITERAL = re.compile(r"::$", flags=re.MULTILINE)


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
