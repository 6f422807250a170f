"""Reads the entries of a docstring's sections."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cache
from textwrap import dedent

# The end of the first sentence: what follows begins with a capital letter, or with code.
_FIRST = re.compile(r"\.\s+(?=[A-Z`0-9-])")


@cache
def entries(text: str | None, title: str) -> Mapping[str, Sequence[str]]:
    """Returns the lines of each entry of a section, by its name, which the first line has."""
    pattern = rf"^{title}:\n((?:    .*\n?|\n)+)"
    section = re.search(pattern, inspect.cleandoc(text or ""), re.MULTILINE)
    found: dict[str, list[str]] = {}
    for line in dedent(section[1]).strip().splitlines() if section else ():
        name = re.match(r"(\w+): ", line)
        if name:
            found[name[1]] = []
        if found:
            next(reversed(found.values())).append(line)
    return found


def first_sentence(entry: Sequence[str]) -> str:
    """Returns the first sentence of an entry, without the name and the full stop.

    Examples:
        >>> first_sentence(["size: number of rows. It is", "    rounded up."])
        'number of rows'
    """
    text = " ".join(line.strip() for line in entry).partition(": ")[2]
    return _FIRST.split(text, maxsplit=1)[0].rstrip(".")
