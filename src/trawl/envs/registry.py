"""Gymnasium's registered environments, taken along to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gymnasium


def parent_registry() -> dict[str, Any]:
    """The Gymnasium environments that were registered here, beside Gymnasium's own."""
    return {
        name: replace(spec)
        for name, spec in gymnasium.registry.items()
        if not str(spec.entry_point).startswith("gymnasium.")
    }


def register(specs: Mapping[str, Any]) -> None:
    """Registers environments that another process knew, unless they are known here."""
    for name, spec in specs.items():
        gymnasium.registry.setdefault(name, spec)
