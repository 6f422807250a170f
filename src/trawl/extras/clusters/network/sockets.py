"""Addresses of this machine, and options of its connections."""

from __future__ import annotations

import ipaddress
import select
import socket
import struct

# Number of keepalive probes within the time that the other end may take to answer one of them.
_PROBES = 10
LOOPBACK = "127.0.0.1"
# Size of Linux's `tcp_info` up to `tcpi_bytes_received`, which is its last field then.
_TCP_INFO_BYTES = 136


def own_address(host: str, port: int) -> str:
    """Returns the address of this machine in the network through which it reaches a host."""
    family, _, _, _, place = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # This sends nothing: for UDP, it only looks up the route.
        probe.connect(place)
        return str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Returns True if an address is a loopback address, which no other machine can reach."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def listening(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on one address only.

    Raises:
        OSError: if the address is in use, or is not an address of this machine.
    """
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
        found.listen(4096)
    except OSError as error:
        found.close()
        raise OSError(error.errno, f"can't listen on {host}:{port}: {error.strerror}") from None
    return found


def keep_alive(end: socket.socket, seconds: float, strictly: bool = False) -> None:
    """Turns on TCP keepalive: while nothing is sent, the kernel probes the other end.

    Args:
        end: a TCP connection.
        seconds: seconds without an answer after which the kernel closes the connection.
        strictly: True to close the connection also if the other end does not acknowledge sent data
            for that long. Pass False if the other end may leave data unread.
    """
    every = max(1, int(seconds / _PROBES))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Systems other than Linux lack some of these options, and close the connection later.
    options = {
        "TCP_KEEPIDLE": every,
        "TCP_KEEPINTVL": every,
        "TCP_KEEPCNT": max(1, round(seconds / every) - 1),
    }
    if strictly:
        # The kernel checks this limit only at each probe, and the limit overrides TCP_KEEPCNT.
        options["TCP_USER_TIMEOUT"] = int(1000 * (seconds - every / 2))
    for name, value in options.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def received_bytes(end: socket.socket) -> int:
    """Returns the number of bytes that have come over a TCP connection, read or not."""
    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    count: int = struct.unpack("Q", info[-8:])[0]
    return count


def is_readable(end: socket.socket) -> bool:
    """Returns True if a connection has bytes to read, or has ended."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(0))
