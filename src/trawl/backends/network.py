"""Addresses of this machine."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

# How often the other system is asked in the time in which it is to answer once.
_PROBES = 10
LOOPBACK = "127.0.0.1"
# Of Linux: asks for the address of an interface, which comes after so many bytes.
_SIOCGIFADDR, _NAME, _BEFORE = 0x8915, 16, 20


def own_address(host: str, port: int) -> str:
    """The address of this machine in the network in which a host is."""
    family, _, _, _, place = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent by that.
        probe.connect(place)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether an address is of this machine for itself, so that no link leads to it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def interface_at(address: str) -> str | None:
    """The name of the network interface that has an IPv4 address; None if none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME}s{_NAME}x", name.encode()[: _NAME - 1])
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
            except OSError:
                # It has none.
                continue
            if socket.inet_ntoa(answer[_BEFORE : _BEFORE + 4]) == address:
                return name
    return None


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at an address, and at no other.

    Raises:
        OSError: if it is in use.
    """
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
        found.listen(4096)
    except OSError as error:
        found.close()
        raise OSError(
            error.errno, f"{host}:{port} can't be listened at: {error.strerror}"
        ) from None
    return found


def ask_now_and_then(end: socket.socket, seconds: float) -> int:
    """Has the system ask the other end's whether it is there, while nothing is sent.

    Args:
        end: a TCP connection.
        seconds: without an answer, after which it is closed.

    Returns:
        Seconds between two questions.
    """
    every = max(1, int(seconds / _PROBES))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Others than Linux have not all of these, and then close it later.
    for name, value in (
        ("TCP_KEEPIDLE", every),
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", max(1, round(seconds / every) - 1)),
    ):
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return every
