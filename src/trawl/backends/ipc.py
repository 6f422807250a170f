"""Messages between two processes of one machine, with file descriptors attached.

A message is a packet, which arrives whole or not at all, even if the other side dies. The packet
consists of a header, descriptors, and a pickle. A large pickle goes through its own shared memory,
and the packet then contains only the descriptor of that memory. If a message has more descriptors
than fit into a packet, packets that contain only descriptors precede it.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

from trawl.backends.memory import SharedMemory, map_once

# Size of the pickle, number of the message's descriptors, and whether the pickle is in shared
# memory, whose descriptor comes last. A size of 0 marks a packet that only brings descriptors for
# the message that follows.
_HEADER = struct.Struct("!QIB")
_MOST_INLINE = 16_384
# Linux allows 253 per packet.
_MOST_DESCRIPTORS = 250
_ROOM = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array("i").itemsize)

_Packet = tuple[bytes, Sequence[int]]


class Closed(Exception):
    """Raised if the other side of a connection is gone."""


def connection_pair() -> tuple[IpcConnection, socket.socket]:
    """Makes a connection; returns this process's end, and the socket for another process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return IpcConnection(ours), theirs


class IpcConnection:
    """One end of a connection.

    Args:
        end: a socket that :func:`connection_pair` made; this object closes it.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        # Packets that the socket had no room for, with duplicates of their descriptors.
        self._kept: deque[_Packet] = deque()

    def fileno(self) -> int:
        """Returns the socket's descriptor, for polling; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def full(self) -> bool:
        """True if packets are kept for :meth:`flush`."""
        return bool(self._kept)

    def send(self, content: Any, fds: Sequence[int] = ()) -> None:
        """Sends a message, with copies of descriptors. Waits until the socket has room for it.

        Raises:
            Closed: if the other side is gone.
        """
        packets, _memory = _pack(content, fds)
        for packet in packets:
            self._send_packet(packet, 0)

    def post(self, content: Any, fds: Sequence[int] = ()) -> None:
        """Sends a message without waiting; keeps packets for :meth:`flush` if there is no room.

        If both sides waited for room while neither received, they would wait forever.

        Raises:
            Closed: if the other side is gone.
        """
        packets, _memory = _pack(content, fds)
        for data, attached in packets:
            try:
                if self.flush():
                    self._send_packet((data, attached), socket.MSG_DONTWAIT)
                    continue
            except BlockingIOError:
                pass
            self._kept.append((data, [os.dup(fd) for fd in attached]))

    def flush(self) -> bool:
        """Sends as many of the kept packets as there is room for; returns True if none are left.

        Raises:
            Closed: if the other side is gone.
        """
        while self._kept:
            try:
                self._send_packet(self._kept[0], socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            _close_all(self._kept.popleft()[1])
        return True

    def receive(self, wait: bool = True) -> tuple[Any, list[int]]:
        """Returns the next message, and its descriptors, which the caller must close.

        Args:
            wait: whether to wait for a message.

        Raises:
            Closed: if the other side is gone, and all its messages have been received.
            BlockingIOError: if there is no message now, and ``wait`` is False.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        fds: list[int] = []
        try:
            data = self._receive_packet(flags, fds)
            while not (header := _HEADER.unpack_from(data))[0]:
                data = self._receive_packet(flags & ~socket.MSG_DONTWAIT, fds)
            size, count, apart = header
            if len(fds) != count + apart:
                raise OSError(
                    "too many open files: file descriptors sent with a message were lost. Raise "
                    "the limit on open files (ulimit -n)"
                )
            pickled = map_once(fds.pop(), size) if apart else memoryview(data)[_HEADER.size :]
            return pickle.loads(pickled), fds
        except BaseException:
            _close_all(fds)
            raise

    def close(self) -> None:
        """Closes this end."""
        while self._kept:
            _close_all(self._kept.popleft()[1])
        self._socket.close()

    def __del__(self) -> None:
        if hasattr(self, "_kept") and hasattr(self, "_socket"):
            self.close()

    def _send_packet(self, packet: _Packet, flags: int) -> None:
        data, fds = packet
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            # The program may have restored the default of SIGPIPE, which ends the process.
            self._socket.sendmsg([data], attached, flags | socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error
        except OSError as error:
            if self._socket.fileno() < 0:
                raise Closed from error
            raise

    def _receive_packet(self, flags: int, fds: list[int]) -> bytes:
        """Receives one packet, and adds its descriptors to ``fds``."""
        while True:
            # If the other side ended without reading everything, the socket reports that once,
            # before the data that the other side had sent.
            try:
                data, attached, _, _ = self._socket.recvmsg(
                    _HEADER.size + _MOST_INLINE, _ROOM, flags
                )
                break
            except ConnectionResetError:
                continue
            except OSError as error:
                # If this object is in a reference cycle, the garbage collector may have closed the
                # socket first.
                if self._socket.fileno() < 0:
                    raise Closed from error
                raise
        for _, _, packed in attached:
            numbers = array("i")
            numbers.frombytes(packed[: len(packed) - len(packed) % numbers.itemsize])
            fds.extend(numbers)
        if not data:
            raise Closed
        return data


def _pack(content: Any, fds: Sequence[int]) -> tuple[list[_Packet], SharedMemory | None]:
    """Returns the packets of a message, and memory that must be kept until they are sent."""
    data = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    size, count, memory = len(data), len(fds), None
    if size > _MOST_INLINE:
        memory = SharedMemory.new(size)
        memory.buffer[:] = data
        data, fds = b"", [*fds, memory.fd]
    packets: list[_Packet] = []
    while len(fds) > _MOST_DESCRIPTORS:
        packets.append((_HEADER.pack(0, 0, False), fds[:_MOST_DESCRIPTORS]))
        fds = fds[_MOST_DESCRIPTORS:]
    packets.append((_HEADER.pack(size, count, memory is not None) + data, fds))
    return packets, memory


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
