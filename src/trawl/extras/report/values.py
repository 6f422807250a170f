"""Checks and texts of values from a record, which may come from a stranger."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from trawl.extras.cli.errors import shown

# Larger integers can't be converted to floats exactly, and no figure of a collection needs them.
_LARGEST = 2**63


def is_number(value: object) -> TypeGuard[float]:
    """Returns True for a finite number of moderate size that is not a bool."""
    if type(value) is int:
        return abs(value) < _LARGEST
    return type(value) is float and math.isfinite(value)


def as_text(value: Any) -> str:
    """Returns a value as text for a table.

    Examples:
        >>> [as_text(value) for value in (None, True, 12000, 0.25, "a", [1, 2])]
        ['none', 'yes', '12,000', '0.25', 'a', '[1, 2]']
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"
    return shown(value)
