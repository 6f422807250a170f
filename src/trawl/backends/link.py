"""Connections between two processes by a process group of both, and the store where they meet.

The store is open to all who reach it, so it has addresses and random numbers only; a key that both
processes have from elsewhere authenticates their messages.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from trawl.backends.authentication import NONCE_BYTES, AuthenticationError, Session
from trawl.backends.network import listening, own_address
from trawl.backends.remote_packing import Packed, seal, unseal

# Much of it has no types.
dist: Any = torch.distributed
NAMES = ("gloo", "nccl", "mpi", "ucc")
# A message begins with a tensor of a size that both sides know: this one, or one up to the other in
# which the message before would have had room, as they are often alike. What is small is in it.
_FRAME, _LARGEST_FRAME = 2048, 1 << 18
# What it is, whether buffers are in it too, bytes of all that is, bytes of the sealed pickle, how
# many buffers there are, and the size that the next message begins with; then the buffers' sizes.
_HEAD = struct.Struct("!B?QQIQ")
# No message is as large: its memory has more bytes than any machine.
_MOST = 1 << 48
FOREVER = timedelta(days=3650)
# What a rank says of itself in the store before it joins; or what is said of it.
STATE, _COMING, GONE = "state", b"coming", b"gone"
# The random number of each rank there.
_NONCE = "nonce"


@dataclass(frozen=True)
class Address:
    """A place where two ranks meet: a TCP store, and names in it.

    Attributes:
        host: its host.
        port: its port.
        timeout: seconds that ranks wait for each other.
        prefix: what names of this meeting begin with.
        key: the key that both ranks know, and nobody else.
    """

    host: str
    port: int
    timeout: float
    prefix: str
    key: bytes = field(default=b"", repr=False)

    def client(self) -> Any:
        """A connection to the store."""
        limit = timedelta(seconds=self.timeout)
        return dist.TCPStore(self.host, self.port, None, False, limit, False)

    def names(self) -> Any:
        """Connects to the store, for the names of this meeting alone."""
        return dist.PrefixStore(self.prefix, self.client())

    def meet(self, rank: int) -> Session:
        """Waits for the other rank; returns what authenticates messages to and from it.

        Args:
            rank: the rank of this process: 0 for the driver, or 1.

        Raises:
            RuntimeError: if nobody comes.
        """
        store, own = self.names(), os.urandom(NONCE_BYTES)
        # Anybody may change what is there. The ranks don't understand each other then.
        store.set(f"{_NONCE}/{rank}", own)
        if rank == 0:
            # It may be known before, that nobody comes.
            if store.get(STATE) != _COMING:
                raise RuntimeError("its process has ended")
            return Session(self.key, _NONCE, (store.get(f"{_NONCE}/1"), own), client=False)
        session = Session(self.key, _NONCE, (own, store.get(f"{_NONCE}/0")), client=True)
        store.set(STATE, _COMING)
        return session

    def link(self, rank: int) -> Link:
        """Returns a connection to the other rank of two; waits for it."""
        session = self.meet(rank)
        options = dist.ProcessGroupGloo._Options()
        own = own_address(self.host, self.port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = timedelta(seconds=self.timeout)
        options._threads = 1
        group = dist.ProcessGroupGloo(self.names(), rank, 2, options)
        return Link(group, 1 - rank, session)


class Link:
    """A connection between two ranks.

    Args:
        group: the process group of both.
        peer: the other one's rank.
        session: what authenticates the messages.
    """

    def __init__(self, group: Any, peer: int, session: Session) -> None:
        self._group = group
        self._peer = peer
        self._session = session
        self._sent = torch.empty(_FRAME, dtype=torch.uint8)
        self._received = torch.empty(_FRAME, dtype=torch.uint8)

    def send(self, packed: Packed) -> None:
        """Sends a message; what it refers to may change after that. One thread may at a time.

        Raises:
            RuntimeError: if the other rank is gone.
        """
        packed = seal(packed, self._session)
        sizes = [len(view) for view in packed.buffers]
        total = _HEAD.size + 8 * len(sizes) + len(packed.body)
        inside = total + sum(sizes) <= _LARGEST_FRAME
        total += sum(sizes) if inside else 0
        following = max(_FRAME, 1 << (total - 1).bit_length()) if inside else _FRAME
        head = _HEAD.pack(packed.verb, inside, total, len(packed.body), len(sizes), following)
        parts = [head, struct.pack(f"!{len(sizes)}Q", *sizes), packed.body]
        whole = over(bytearray().join([*parts, *packed.buffers] if inside else parts))
        room = len(self._sent)
        self._sent[:total] = whole[:room]
        tensors = [self._sent, *([whole[room:]] if total > room else [])]
        tensors += [] if inside else [over(view) for view in packed.buffers]
        works = [self._group.send([one], self._peer, 0) for one in tensors]
        for work in works:
            work.wait(FOREVER)
        if following != room:
            self._sent = torch.empty(following, dtype=torch.uint8)

    def receive(self) -> Packed:
        """Returns the next message; waits for it.

        Raises:
            RuntimeError: if the other rank is gone.
            AuthenticationError: if it did not send what came.
        """
        self._take(self._received)
        data, room = self._received.numpy().tobytes(), len(self._received)
        verb, inside, total, nbytes, count, following = _HEAD.unpack_from(data)
        begin = _HEAD.size + 8 * count
        # A stranger may be in the group, and the tag comes last.
        _check(begin + nbytes <= total <= _MOST and _FRAME <= following <= _LARGEST_FRAME)
        if total > room:
            rest = torch.empty(total - room, dtype=torch.uint8)
            self._take(rest)
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
                self._take(buffer)
        packed = Packed(verb, body, [buffer.numpy() for buffer in buffers])
        return unseal(packed, self._session)

    def _take(self, tensor: Tensor) -> None:
        self._group.recv([tensor], self._peer, 0).wait(FOREVER)


def _check(possible: bool) -> None:
    if not possible:
        raise AuthenticationError("what came is no message: the other end did not send it")


def over(memory: Any) -> Tensor:
    """A tensor over memory; over a copy of it, if that can't be written to."""
    readonly = isinstance(memory, memoryview) and memory.readonly
    return torch.frombuffer(bytearray(memory) if readonly else memory, dtype=torch.uint8)


def check_name(name: str) -> None:
    """Refuses a kind of process group that isn't there.

    Raises:
        ValueError: naming those that are.
    """
    there = [one for one in NAMES if getattr(dist, f"is_{one}_available", bool)()]
    if name not in there:
        raise ValueError(
            f"backend={name!r}: this PyTorch has no such process group; it has "
            f"{', '.join(map(repr, there))}"
        )
    if name != "gloo":
        raise ValueError(
            f"backend={name!r} can't be used: batches and weights are sent from CPU memory in both "
            "directions at the same time; use 'gloo'"
        )


def hosted_store(host: str, port: int, timeout: float) -> tuple[Any, int]:
    """A TCP store of this process, and its port.

    Args:
        host: the address that it listens at.
        port: the port there; 0 for any that is free.
        timeout: seconds that who asks it for something waits.

    Raises:
        OSError: if the port is in use.
    """
    found = listening(host, port)
    port = found.getsockname()[1]
    limit = timedelta(seconds=timeout)
    descriptor = found.detach()
    store = dist.TCPStore(host, port, None, True, limit, False, master_listen_fd=descriptor)
    return store, port
