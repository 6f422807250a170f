"""Types of the options of collectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

#: A TensorDict module, an ``nn.Module`` or a function.
PolicyLike = Callable[..., Any]
#: Whether to do something, or how: the keyword arguments of the function that does it.
Switch = bool | Mapping[str, Any]


class SupportsWrite(Protocol):
    """A sink: what stores batches on disk."""

    def write(self, batch: Any, /) -> Any:
        """Stores a batch."""

    def close(self, *, complete: bool) -> Any:
        """Finishes what was stored."""


class SupportsStop(Protocol):
    """An interruptor: what ends a batch early."""

    def collection_stopped(self) -> bool:
        """Tells whether the batch is to end."""


class SupportsVersion(Protocol):
    """A counter of the versions of a policy, as :class:`~trawl.collectors.PolicyVersion` is."""

    @property
    def version(self) -> Any:
        """The current version."""

    def increment_version(self) -> Any:
        """Goes on to the next version."""
