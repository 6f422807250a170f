"""Versions of installed packages, which files on disk record."""

from __future__ import annotations

from importlib import metadata

_TRAWL = "trawl-rl"


def version(distribution: str = _TRAWL) -> str:
    """Returns the version of a package, by default of Trawl; ``"unknown"`` if it isn't installed.

    Args:
        distribution: name of the package on PyPI.
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
