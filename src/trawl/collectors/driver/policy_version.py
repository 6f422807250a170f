"""Functions that advance a policy's version, and write it into frames."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDictBase

from trawl.envs.transforms import PolicyVersion


def version_tracker(option: Any) -> Any:
    """Returns the version counter for ``track_policy_version``; None if versions aren't tracked.

    TorchRL's ``PolicyVersion`` is accepted, too.
    """
    if isinstance(option, bool) or option is None:
        return PolicyVersion() if option else None
    if not (hasattr(option, "increment_version") and hasattr(option, "version")):
        raise TypeError(
            "track_policy_version must be a bool or a PolicyVersion, but it is "
            f"{type(option).__name__}: {option!r}"
        )
    return option


@contextmanager
def next_version(tracker: PolicyVersion | None) -> Iterator[None]:
    """Context that advances a policy's version, and restores the old version after an exception."""
    if tracker is None:
        yield
        return
    before = tracker.version
    tracker.increment_version()
    try:
        yield
    except BaseException:
        tracker.version = before
        raise


def stamp(batch: TensorDictBase, version: int | str, after: bool = True) -> None:
    """Writes the version into every frame of ``batch``.

    Args:
        batch: frames that were all collected with this version.
        version: the version.
        after: whether to write the version under ``"next"`` too.
    """
    for place in (batch, batch.get("next") if after else None):
        if place is not None:
            place.set("policy_version", _filled(batch, version))


def _filled(batch: TensorDictBase, version: int | str) -> Any:
    if isinstance(version, int):
        return torch.full(batch.shape, version, dtype=torch.int64, device=batch.device)
    stack: Any = version
    for size in reversed(batch.shape):
        stack = [stack] * size
    return NonTensorStack.from_list(stack) if isinstance(stack, list) else stack
