"""Versions of installed packages."""

from __future__ import annotations

import platform

from trawl.versions import version

_PACKAGES = {
    "trawl": "trawl-rl",
    "torch": "torch",
    "gymnasium": "gymnasium",
    "tensordict": "tensordict",
}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that produce the data, by name."""
    found = {name: version(distribution) for name, distribution in _PACKAGES.items()}
    return {**found, "python": platform.python_version()}
