"""Types of the options of collectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

#: A TensorDict module, an ``nn.Module`` or a function.
PolicyLike = Callable[..., Any]
#: A bool that turns a function on or off, or keyword arguments with which the function is called.
Switch = bool | Mapping[str, Any]


class SupportsWrite(Protocol):
    """A sink, which stores batches on disk."""

    def write(self, batch: Any, /) -> Any:
        """Stores a batch."""

    def close(self, *, complete: bool) -> Any:
        """Finishes the stored data."""


class SupportsStop(Protocol):
    """An interruptor, which can end a batch early."""

    def collection_stopped(self) -> bool:
        """Returns True if the batch should end."""


class SupportsVersion(Protocol):
    """A counter of a policy's versions, such as :class:`~trawl.collectors.PolicyVersion`."""

    @property
    def version(self) -> Any:
        """The current version."""

    def increment_version(self) -> Any:
        """Advances to the next version."""
