"""Versions of installed packages, which files on disk record."""

from __future__ import annotations

import platform
from importlib import metadata

_TRAWL = "trawl-rl"
_PACKAGES = {
    "trawl": _TRAWL,
    "torch": "torch",
    "gymnasium": "gymnasium",
    "tensordict": "tensordict",
}


def version(distribution: str = _TRAWL) -> str:
    """Returns the version of a package, by default of Trawl; ``"unknown"`` if it isn't installed.

    Args:
        distribution: name of the package on PyPI.
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that produce the data, by name."""
    found = {name: version(distribution) for name, distribution in _PACKAGES.items()}
    return {**found, "python": platform.python_version()}
