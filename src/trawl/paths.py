"""Access to attributes by a dotted path, such as ``"policy.module[0].weight"``."""

from __future__ import annotations

import ast
import re
from typing import Any

_STEP = re.compile(r"\.?([A-Za-z_]\w*)|\[([^\]]+)\]")


def get_path(root: Any, path: str) -> Any:
    """Returns the object at ``path`` under ``root``.

    Raises:
        ValueError: if the path is malformed.
        AttributeError, KeyError, IndexError: if there is nothing at the path.
    """
    position, found = 0, root
    while position < len(path):
        match = _STEP.match(path, position)
        if match is None:
            raise ValueError(f"path {path!r} is malformed at {path[position:]!r}")
        name, index = match.groups()
        found = getattr(found, name) if name else found[ast.literal_eval(index)]
        position = match.end()
    return found


def call_path(root: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the object at ``path``, and returns the result.

    If the object is not callable, the object itself is returned.

    Raises:
        ValueError: if there are arguments, but the object is not callable.
    """
    found = get_path(root, path)
    if callable(found):
        return found(*args, **kwargs)
    if args or kwargs:
        raise ValueError(
            f"{path!r} is {type(found).__name__}, which can't be called with arguments"
        )
    return found
