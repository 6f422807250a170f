"""Counter of policy versions, and functions that write the version into frames."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDictBase


class PolicyVersion:
    """Counts the versions of a policy.

    Args:
        version_type: ``int`` or ``"int"`` for 0, 1, 2, …; ``str``, ``"str"`` or ``"uuid"`` for
            random identifiers.

    Attributes:
        version: the current version; it can be assigned.
        version_history: all versions so far, ending with the current one.

    Examples:
        >>> from trawl.collectors import PolicyVersion
        >>> version = PolicyVersion()
        >>> version.increment_version()
        >>> version.version
        1
    """

    def __init__(self, version_type: Any = int) -> None:
        if version_type not in (int, "int", str, "str", "uuid"):
            raise ValueError(
                f"version_type must be int, 'int', str or 'uuid', but it is {version_type!r}"
            )
        self.version_type = int if version_type in (int, "int") else str
        self.version_history: list[int | str] = []
        self.version = self._first()

    def _first(self) -> int | str:
        return 0 if self.version_type is int else str(uuid.uuid4())

    @property
    def version(self) -> int | str:
        """The current version."""
        return self._version

    @version.setter
    def version(self, value: int | str) -> None:
        self._version = value
        self.version_history.append(value)

    def increment_version(self) -> None:
        """Advances to the next version."""
        self.version = self.version + 1 if isinstance(self.version, int) else self._first()


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
