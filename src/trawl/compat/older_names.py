"""Warnings for older names of the collectors, which the stubs of public modules have."""

from __future__ import annotations

import warnings

_warned: set[str] = set()


def warn_of(name: str, new: str) -> None:
    """Warns that a name is an older one when it is first used.

    Args:
        name: the older name.
        new: the name that it stands for.
    """
    if name not in _warned:
        _warned.add(name)
        # The caller is the `__getattr__` of the module in which the user looked the name up.
        warnings.warn(
            f"{name} is an older name of {new}: use the new name", DeprecationWarning, stacklevel=3
        )
