"""Calls of actors in tests."""

from __future__ import annotations

import time
from typing import Any

import pytest

PATIENCE = 300.0


def get(*calls: Any) -> Any:
    """Returns the results of calls; of one call, the result itself."""
    import ray

    found = ray.get(list(calls), timeout=PATIENCE)
    return found if len(calls) > 1 else found[0]


def kill(handle: Any) -> None:
    """Kills the actor of a collector, and waits until this is known.

    ``ray.kill`` returns earlier, when the actor may still make a batch or two.
    """
    import ray

    ray.kill(handle)
    deadline = time.monotonic() + PATIENCE
    with pytest.raises(ray.exceptions.RayActorError):  # noqa: PT012
        while time.monotonic() < deadline:
            get(handle.stats.remote())
