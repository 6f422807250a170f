"""Connections between two processes that form a process group, and the store where they meet.

Anyone who can reach the store can read and change it, so the store contains only addresses and
random numbers. A key that both processes receive by other means authenticates their messages.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from trawl.backends.frames import Frame, seal, unseal
from trawl.backends.launching.authentication import NONCE_BYTES, AuthenticationError, Session
from trawl.backends.network import listening, own_address

# Much of `torch.distributed` has no type annotations.
dist: Any = torch.distributed
NAMES = ("gloo", "nccl", "mpi", "ucc")
# A message begins with a tensor whose size both sides know. The size lies between these two limits.
# It is large enough for the previous message, because consecutive messages are often alike. If the
# previous message exceeded the upper limit, the size is the lower limit.
_FRAME, _LARGEST_FRAME = 2048, 1 << 18
# Head of a message: its verb, whether the buffers follow the pickle directly, the total size
# without separate buffers, the size of the sealed pickle, the number of buffers, and the size of
# the first tensor of the next message. Sizes are in bytes. The sizes of the buffers follow.
_HEAD = struct.Struct("!B?QQIQ")
# Maximum size of a message in bytes, which is more than the memory of any machine.
_MOST = 1 << 48
FOREVER = timedelta(days=3650)
# Name and values of the state of a rank in the store. The rank sets `_COMING` before it joins; the
# driver sets `GONE` if it no longer expects the rank.
STATE, _COMING, GONE = "state", b"coming", b"gone"
# Prefix of the names of the ranks' random numbers in the store.
_NONCE = "nonce"


@dataclass(frozen=True)
class Address:
    """Meeting point of two ranks: a TCP store, and a prefix of names in it.

    Attributes:
        host: host of the store.
        port: port of the store.
        timeout: seconds that the ranks wait for each other.
        prefix: prefix of the names that belong to this meeting.
        key: the key that only the two ranks know.
    """

    host: str
    port: int
    timeout: float
    prefix: str
    key: bytes = field(default=b"", repr=False)

    def client(self) -> Any:
        """Returns a new connection to the store."""
        limit = timedelta(seconds=self.timeout)
        return dist.TCPStore(self.host, self.port, None, False, limit, False)

    def names(self) -> Any:
        """Returns a new connection to the store that sees only the names of this meeting."""
        return dist.PrefixStore(self.prefix, self.client())

    def open_session(self, rank: int) -> Session:
        """Waits for the other rank; returns the session that authenticates their messages.

        Args:
            rank: the rank of this process: 0 for the driver, or 1.

        Raises:
            RuntimeError: if the other rank does not join.
        """
        store, own = self.names(), os.urandom(NONCE_BYTES)
        # Anyone can change the store. If these numbers are changed, the ranks reject each other's
        # messages.
        store.set(f"{_NONCE}/{rank}", own)
        if rank == 0:
            # If the other rank will not join, the state shows this early.
            if store.get(STATE) != _COMING:
                raise RuntimeError("its process has ended")
            return Session(self.key, _NONCE, (store.get(f"{_NONCE}/1"), own), client=False)
        session = Session(self.key, _NONCE, (own, store.get(f"{_NONCE}/0")), client=True)
        store.set(STATE, _COMING)
        return session

    def link(self, rank: int) -> Link:
        """Waits for the other rank; returns a connection to it."""
        session = self.open_session(rank)
        options = dist.ProcessGroupGloo._Options()
        own = own_address(self.host, self.port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = timedelta(seconds=self.timeout)
        options._threads = 1
        group = dist.ProcessGroupGloo(self.names(), rank, 2, options)
        return Link(group, 1 - rank, session)


class Link:
    """Connection between two ranks.

    Args:
        group: the process group of the two ranks.
        peer: the rank of the other process.
        session: the session that authenticates the messages.
    """

    def __init__(self, group: Any, peer: int, session: Session) -> None:
        self._group = group
        self._peer = peer
        self._session = session
        self._sent = torch.empty(_FRAME, dtype=torch.uint8)
        self._received = torch.empty(_FRAME, dtype=torch.uint8)

    def send(self, frame: Frame) -> None:
        """Sends a message. Only one thread may send at a time.

        Memory that the message refers to may change after the call returns.

        Raises:
            RuntimeError: if the other rank is gone.
        """
        frame = seal(frame, self._session)
        sizes = [len(view) for view in frame.buffers]
        total = _HEAD.size + 8 * len(sizes) + len(frame.body)
        inside = total + sum(sizes) <= _LARGEST_FRAME
        total += sum(sizes) if inside else 0
        following = max(_FRAME, 1 << (total - 1).bit_length()) if inside else _FRAME
        head = _HEAD.pack(frame.verb, inside, total, len(frame.body), len(sizes), following)
        parts = [head, struct.pack(f"!{len(sizes)}Q", *sizes), frame.body]
        whole = over(bytearray().join([*parts, *frame.buffers] if inside else parts))
        room = len(self._sent)
        self._sent[:total] = whole[:room]
        tensors = [self._sent, *([whole[room:]] if total > room else [])]
        tensors += [] if inside else [over(view) for view in frame.buffers]
        works = [self._group.send([one], self._peer, 0) for one in tensors]
        for work in works:
            work.wait(FOREVER)
        if following != room:
            self._sent = torch.empty(following, dtype=torch.uint8)

    def receive(self) -> Frame:
        """Waits for the next message and returns it.

        Raises:
            RuntimeError: if the other rank is gone.
            AuthenticationError: if the message did not come from the other rank.
        """
        self._receive_into(self._received)
        data, room = self._received.numpy().tobytes(), len(self._received)
        verb, inside, total, nbytes, count, following = _HEAD.unpack_from(data)
        begin = _HEAD.size + 8 * count
        # An unknown process may be in the group, and the tag can be checked only after memory has
        # been allocated. Therefore the sizes are checked first.
        _check(begin + nbytes <= total <= _MOST and _FRAME <= following <= _LARGEST_FRAME)
        if total > room:
            rest = torch.empty(total - room, dtype=torch.uint8)
            self._receive_into(rest)
            data += rest.numpy().tobytes()
        if following != room:
            self._received = torch.empty(following, dtype=torch.uint8)
        sizes = struct.unpack_from(f"!{count}Q", data, _HEAD.size)
        _check(begin + nbytes + sum(sizes) <= (total if inside else _MOST))
        body, begin = data[begin : begin + nbytes], begin + nbytes
        buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for buffer in buffers:
            if inside:
                buffer.numpy()[:] = np.frombuffer(data, np.uint8, len(buffer), begin)
                begin += len(buffer)
            else:
                self._receive_into(buffer)
        frame = Frame(verb, body, [buffer.numpy() for buffer in buffers])
        return unseal(frame, self._session)

    def nudge(self) -> None:
        """Sends a byte to a rank that is out of reach.

        The kernel can't deliver the byte, and gives up the connection after some time. A thread
        that waits for a message then wakes up.
        """
        with contextlib.suppress(RuntimeError):
            self._group.send([torch.zeros(1, dtype=torch.uint8)], self._peer, 0)

    def _receive_into(self, tensor: Tensor) -> None:
        self._group.recv([tensor], self._peer, 0).wait(FOREVER)


def _check(possible: bool) -> None:
    if not possible:
        raise AuthenticationError(
            "the received bytes are not a valid message: the other end did not send them"
        )


def over(memory: Any) -> Tensor:
    """Returns a tensor over memory, or over a copy if the memory is read-only."""
    readonly = isinstance(memory, memoryview) and memory.readonly
    return torch.frombuffer(bytearray(memory) if readonly else memory, dtype=torch.uint8)


def check_name(name: str) -> None:
    """Checks the name of a kind of process group; only ``"gloo"`` can be used.

    Raises:
        ValueError: if PyTorch has no such process group (the error names the available ones), or if
            the name is not ``"gloo"``.
    """
    there = [one for one in NAMES if getattr(dist, f"is_{one}_available", bool)()]
    if name not in there:
        raise ValueError(
            f"backend={name!r}: this build of PyTorch has no such process group; it has "
            f"{', '.join(map(repr, there))}"
        )
    if name != "gloo":
        raise ValueError(
            f"backend={name!r} can't be used, because batches and weights are sent from CPU "
            "memory in both directions at the same time: use 'gloo'"
        )


def hosted_store(host: str, port: int, timeout: float) -> tuple[Any, int]:
    """Starts a TCP store in this process; returns the store and its port.

    Args:
        host: the address to listen on.
        port: the port to listen on; 0 for any free port.
        timeout: seconds that a request to the store may wait.

    Raises:
        OSError: if the port is in use.
    """
    found = listening(host, port)
    port = found.getsockname()[1]
    limit = timedelta(seconds=timeout)
    descriptor = found.detach()
    store = dist.TCPStore(host, port, None, True, limit, False, master_listen_fd=descriptor)
    return store, port
