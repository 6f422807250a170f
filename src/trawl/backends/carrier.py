"""Carriers, which bring messages of workers, with large arrays, to the driver.

The driver tells a worker what to do over TCP connections (:mod:`trawl.backends.control`). What a
worker sends may be large, and an existing library carries it: that is what a carrier is for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from trawl.backends.frames import Frame
from trawl.backends.link import Address


class Outlet(ABC):
    """Worker's end of a carrier. Only one thread at a time uses it."""

    @abstractmethod
    def send(self, frame: Frame) -> None:
        """Sends a message, and returns once memory that it refers to may change.

        Raises:
            RuntimeError: if the driver is gone.
        """

    def secure(self) -> None:  # noqa: B027 (most carriers need nothing)
        """Waits until all sent messages are sure to arrive, whatever happens to this process.

        Raises:
            RuntimeError: if the driver is gone.
        """

    def abandon(self) -> None:  # noqa: B027
        """Ends every wait, now and later, as the driver is gone. Any thread may call it."""

    def close(self) -> None:  # noqa: B027
        """Releases all resources."""


class Inlet(ABC):
    """Driver's end of a carrier, for one worker."""

    @abstractmethod
    def receive(self) -> Frame:
        """Waits for the next message of the worker, and returns it.

        Raises:
            RuntimeError: if the worker is gone.
            AuthenticationError: if the worker did not send the message.
        """

    def abandon(self) -> None:  # noqa: B027
        """Ends :meth:`receive`, as far as possible, as the worker is out of reach."""

    def close(self) -> None:  # noqa: B027
        """Releases all resources."""


MakeOutlet = Callable[[Address], Outlet]


class Carrier(ABC):
    """Makes the connections by which messages of workers come to this process."""

    @abstractmethod
    def open(self, address: Address, store: Any) -> None:
        """Begins to work for a backend.

        Args:
            address: address of the backend's store; its prefix begins those of all workers.
            store: the store.
        """

    @abstractmethod
    def invite(self, index: int, address: Address) -> MakeOutlet:
        """Prepares for a worker.

        Args:
            index: number of the worker.
            address: address at which this process meets the worker.

        Returns:
            A function that makes the worker's end; it is pickled, and called in the worker.
        """

    @abstractmethod
    def admit(self, address: Address) -> Inlet:
        """Waits for the worker's end, and returns the one of this process.

        Raises:
            Exception: if the worker does not come.
        """

    def close(self) -> None:  # noqa: B027
        """Releases all resources."""
