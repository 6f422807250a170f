"""Carriers, which bring the messages of workers, including large arrays, to the driver.

The driver controls a worker over TCP connections (:mod:`trawl.backends.control`). The messages that
a worker sends may be large, so a carrier sends them through an existing library.
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
        """Sends a message; returns once the caller may change the message's memory.

        Raises:
            RuntimeError: if the driver is gone.
        """

    def secure(self) -> None:  # noqa: B027 (most carriers need nothing)
        """Waits until all sent messages are sure to arrive, even if this process dies.

        Raises:
            RuntimeError: if the driver is gone.
        """

    def abandon(self) -> None:  # noqa: B027
        """Ends all current and later waits, because the driver is gone. Any thread may call it."""

    def close(self) -> None:  # noqa: B027
        """Releases all resources."""


class Inlet(ABC):
    """Driver's end of a carrier, for one worker."""

    @abstractmethod
    def receive(self) -> Frame:
        """Waits for the next message of the worker, and returns it.

        Raises:
            RuntimeError: if the worker is gone.
            AuthenticationError: if the message did not come from the worker.
        """

    def abandon(self) -> None:  # noqa: B027
        """Ends a pending :meth:`receive`, if possible, because the worker is out of reach."""

    def close(self) -> None:  # noqa: B027
        """Releases all resources."""


MakeOutlet = Callable[[Address], Outlet]


class Carrier(ABC):
    """Makes the connections over which workers send messages to this process."""

    @abstractmethod
    def open(self, address: Address, store: Any) -> None:
        """Starts the carrier for a backend.

        Args:
            address: address of the backend's store. The prefixes of all workers begin with its
                prefix.
            store: the store.
        """

    @abstractmethod
    def invite(self, index: int, address: Address) -> MakeOutlet:
        """Prepares the connection of a worker.

        Args:
            index: number of the worker.
            address: address at which this process meets the worker.

        Returns:
            A function that makes the worker's end. It is pickled, and called in the worker.
        """

    @abstractmethod
    def admit(self, address: Address) -> Inlet:
        """Waits until the worker has connected, and returns this process's end.

        Raises:
            Exception: if the worker does not connect.
        """

    def close(self) -> None:  # noqa: B027
        """Releases all resources."""
