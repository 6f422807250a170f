"""Versions of what is installed."""

from __future__ import annotations

import platform
from importlib import metadata

_PACKAGES = {
    "trawl": "trawl-rl",
    "torch": "torch",
    "gymnasium": "gymnasium",
    "tensordict": "tensordict",
}


def version(distribution: str) -> str:
    """The version of a distribution; "unknown" if it runs from source, not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def versions() -> dict[str, str]:
    """Versions of all that a dataset depends on, by name."""
    found = {name: version(distribution) for name, distribution in _PACKAGES.items()}
    return {**found, "python": platform.python_version()}
