"""Reads the entries of a docstring's ``Attributes`` section."""

from __future__ import annotations

import inspect
import re
from textwrap import dedent

_ATTRIBUTES = re.compile(r"^Attributes:\n((?:    .*\n?|\n)+)", re.MULTILINE)
# The end of the first sentence: what follows begins with a capital letter, or with code.
_FIRST = re.compile(r"\.\s+(?=[A-Z`0-9-])")


def attributes(text: str | None) -> dict[str, list[str]]:
    """Returns the lines of each entry, by the name of the attribute, which the first line has."""
    section = _ATTRIBUTES.search(inspect.cleandoc(text or ""))
    found: dict[str, list[str]] = {}
    for line in dedent(section[1]).splitlines() if section else ():
        name = re.match(r"(\w+): ", line)
        if name:
            found[name[1]] = []
        if found:
            next(reversed(found.values())).append(line)
    return found


def first_sentence(entry: list[str]) -> str:
    """Returns the first sentence of an entry, without the name and the full stop.

    Examples:
        >>> first_sentence(["size: number of rows. It is", "    rounded up."])
        'number of rows'
    """
    text = " ".join(line.strip() for line in entry).partition(": ")[2]
    return _FIRST.split(text, maxsplit=1)[0].rstrip(".")
