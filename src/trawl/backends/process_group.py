"""Carrier that uses process groups (gloo). Each worker forms a group of two with the driver.

Therefore a worker that dies can be replaced without affecting the others.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from trawl.backends.carrier import Carrier, Inlet, MakeOutlet, Outlet
from trawl.backends.frames import Frame
from trawl.backends.link import Address, Link


class ProcessGroupCarrier(Carrier):
    """Carries messages over process groups."""

    @override
    def open(self, address: Address, store: Any) -> None:
        pass

    @override
    def invite(self, index: int, address: Address) -> MakeOutlet:
        return _GroupOutlet

    @override
    def admit(self, address: Address) -> Inlet:
        return _GroupInlet(address.link(0))


class _GroupOutlet(Outlet):
    def __init__(self, address: Address) -> None:
        self._link = address.link(1)

    @override
    def send(self, frame: Frame) -> None:
        self._link.send(frame)


class _GroupInlet(Inlet):
    def __init__(self, link: Link) -> None:
        self._link: Link | None = link

    @override
    def receive(self) -> Frame:
        assert self._link is not None
        return self._link.receive()

    @override
    def abandon(self) -> None:
        if (link := self._link) is not None:
            link.nudge()

    @override
    def close(self) -> None:
        # The connection closes when no thread refers to it any more.
        self._link = None
