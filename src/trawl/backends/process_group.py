"""Workers that are ranks of process groups: each with this process in a group of two.

So a rank that dies can be replaced, and no other is concerned.
"""

from __future__ import annotations

import pickle
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from typing_extensions import override

from trawl.backends.launch import Launcher
from trawl.backends.lifeline import Lifeline, Lifelines, Line
from trawl.backends.network import LOOPBACK, is_loopback, listening, own_address
from trawl.backends.order_line import Meeting, OrderLine, Orders
from trawl.backends.remote import RemoteBackend, RemoteWorker
from trawl.backends.remote_packing import Packed
from trawl.backends.remote_rank import Rank

# Much of it has no types.
dist: Any = torch.distributed
NAMES = ("gloo", "nccl", "mpi", "ucc")
# A message begins with a tensor of a size that both sides know: this one, or one up to the other in
# which the message before would have had room, as they are often alike. What is small is in it.
_FRAME, _LARGEST_FRAME = 2048, 1 << 18
# What it is, whether buffers are in it too, bytes of all that is, bytes of the pickle, how many
# buffers there are, and the size that the next message begins with; then the buffers' sizes.
_HEAD = struct.Struct("!B?QQIQ")
FOREVER = timedelta(days=3650)
# Seconds in which what listens to workers is to end with them.
_LISTENING = 2.0
# What a rank says of itself in the store before it joins; or what is said of it.
STATE, _COMING, _GONE = "state", b"coming", b"gone"
# What it is to do, by a function of the address that it has.
_TASK = "task"


@dataclass(frozen=True)
class Address:
    """Where ranks meet: a TCP store, and names in it.

    Attributes:
        host: its host.
        port: its port.
        timeout: seconds that ranks wait for each other.
        prefix: what names of this meeting begin with.
    """

    host: str
    port: int
    timeout: float
    prefix: str

    def client(self) -> Any:
        """A connection to the store."""
        limit = timedelta(seconds=self.timeout)
        return dist.TCPStore(self.host, self.port, None, False, limit, False)

    def names(self) -> Any:
        """The same, for the names of this meeting alone."""
        return dist.PrefixStore(self.prefix, self.client())

    def link(self, rank: int) -> Link:
        """A connection to the other rank of two; waits for it."""
        store = self.names()
        if rank == 0:
            # It may be known before, that nobody comes.
            if store.get(STATE) != _COMING:
                raise RuntimeError("its process has ended")
        else:
            store.set(STATE, _COMING)
        options = dist.ProcessGroupGloo._Options()
        own = own_address(self.host, self.port)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
        options._timeout = timedelta(seconds=self.timeout)
        options._threads = 1
        return Link(dist.ProcessGroupGloo(store, rank, 2, options), 1 - rank)


Task = Callable[[Address], int]


class Link:
    """A connection between two ranks.

    Args:
        group: the process group of both.
        peer: the other one's rank.
    """

    def __init__(self, group: Any, peer: int) -> None:
        self._group = group
        self._peer = peer
        self._sent = torch.empty(_FRAME, dtype=torch.uint8)
        self._received = torch.empty(_FRAME, dtype=torch.uint8)

    def send(self, packed: Packed) -> None:
        """Sends a message; what it refers to may change after that. One thread may at a time.

        Raises:
            RuntimeError: if the other rank is gone.
        """
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
        """The next message; waits for it.

        Raises:
            RuntimeError: if the other rank is gone.
        """
        self._take(self._received)
        data, room = self._received.numpy().tobytes(), len(self._received)
        verb, inside, total, nbytes, count, following = _HEAD.unpack_from(data)
        if total > room:
            rest = torch.empty(total - room, dtype=torch.uint8)
            self._take(rest)
            data += rest.numpy().tobytes()
        if following != room:
            self._received = torch.empty(following, dtype=torch.uint8)
        sizes = struct.unpack_from(f"!{count}Q", data, _HEAD.size)
        begin = _HEAD.size + 8 * count
        body, begin = data[begin : begin + nbytes], begin + nbytes
        buffers = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for buffer in buffers:
            if inside:
                buffer.numpy()[:] = np.frombuffer(data, np.uint8, len(buffer), begin)
                begin += len(buffer)
            else:
                self._take(buffer)
        return Packed(verb, body, [buffer.numpy() for buffer in buffers])

    def _take(self, tensor: Tensor) -> None:
        self._group.recv([tensor], self._peer, 0).wait(FOREVER)


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
            f"backend={name!r} can't be used: batches and weights are sent in CPU memory, both "
            "ways at a time, which is what 'gloo' is for"
        )


# --- on a rank


class ProcessGroupRank(Rank):
    """A rank's end of its connection.

    Args:
        link: the connection.
        orders: by what it has its orders.
        lifeline: what tells that the driver is out of reach, if that has to be told.
    """

    def __init__(self, link: Link, orders: Orders, lifeline: Lifeline | None) -> None:
        super().__init__(orders, lifeline)
        self._link = link

    @override
    def begin(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self.receive(self._link.receive())
        except RuntimeError:
            self.lose()

    @override
    def transmit(self, packed: Packed) -> None:
        self._link.send(packed)


def run_rank_at(address: Address) -> int:
    """Joins the driver that waits at an address, and works for it; gives the exit status."""
    task: Task = pickle.loads(address.names().get(_TASK))
    return task(address)


def _join_group(meeting: Meeting, line: Line | None, address: Address) -> int:
    """What a rank is to do: it is in a process group with the driver."""
    lifeline = None if line is None else line.connect(address.prefix)
    orders = meeting.connect()
    return ProcessGroupRank(address.link(1), orders, lifeline).live()


# --- in the driver


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


class ProcessGroupBackend(RemoteBackend):
    """Workers that are ranks of process groups.

    Args:
        launcher: what starts them.
        host: address of this machine at which they find it.
        port: port there; None for any that is free.
        timeout: seconds that a rank may take to join.
        prefix: what names in the store begin with.
        store: whether the store is made here; otherwise it is there already.
        link_timeout: seconds for which a worker's machine may be out of reach; None: for ever.
    """

    def __init__(
        self,
        launcher: Launcher,
        host: str = LOOPBACK,
        port: int | None = None,
        timeout: float = 300.0,
        prefix: str = "trawl",
        store: bool = True,
        link_timeout: float | None = None,
    ) -> None:
        super().__init__(launcher)
        self._prefix = prefix
        self._launches: dict[int, int] = {}
        self._threads: dict[MetWorker, threading.Thread] = {}
        self._store: Any = None
        self._lifelines: Lifelines | None = None
        if store:
            self._store, port = hosted_store(host, port or 0, timeout)
        self._where = host, port or 0, timeout
        if self._store is None:
            self._store = Address(*self._where, prefix).client()
        self._own_address = own_address(host, self.port)
        self._link_timeout = link_timeout
        # No link leads from this machine to itself.
        if link_timeout is not None and not is_loopback(self._own_address):
            self._lifelines = Lifelines(self._own_address, link_timeout)

    @property
    def port(self) -> int:
        """The port at which ranks find this process."""
        return self._where[1]

    @override
    def _new_worker(self, index: int) -> RemoteWorker:
        address, orders = self._new_address(index), self._new_orders()
        self._set_task(address, partial(_join_group, orders.meeting, self._line))
        return _Rank(index, self, orders, address)

    def _new_address(self, index: int) -> Address:
        """Where the next rank for a worker meets this process."""
        launches = self._launches[index] = self._launches.get(index, -1) + 1
        return Address(*self._where, prefix=f"{self._prefix}/{index + 1}/{launches}")

    def _new_orders(self) -> OrderLine:
        """By what the next rank is to have its orders."""
        return OrderLine(self._own_address, self._where[2], self._link_timeout)

    def _set_task(self, address: Address, task: Task) -> None:
        """Says what the rank that comes to an address is to do."""
        self._store.set(f"{address.prefix}/{_TASK}", pickle.dumps(task))

    @property
    def _line(self) -> Line | None:
        """Where the lifelines of workers lead to, if they are to have any."""
        return None if self._lifelines is None else self._lifelines.line

    @override
    def _let_go(self) -> None:
        deadline = time.monotonic() + _LISTENING
        for worker, thread in self._threads.items():
            # One that is out of reach is listened to until the system gives up its connection.
            if not worker.out_of_reach:
                thread.join(max(0.0, deadline - time.monotonic()))
        if self._lifelines is not None:
            self._lifelines.close()
        self._store = None

    def meet(self, worker: MetWorker, name: str, listen: Callable[[], None]) -> None:
        """Runs what listens to a worker, which has this name; and holds its lifeline."""
        if self._lifelines is not None:
            self._lifelines.watch(name, worker.lose)
        living = {other: thread for other, thread in self._threads.items() if thread.is_alive()}
        self._threads = {**living, worker: threading.Thread(target=listen, daemon=True)}
        self._threads[worker].start()

    def give_up(self, name: str, linked: bool) -> None:
        """Nothing more comes from a worker; if it was not met, nobody comes to the meeting."""
        if self._lifelines is not None:
            self._lifelines.forget(name)
        if not linked and self._store is not None:
            self._store.set(f"{name}/{STATE}", _GONE)


class MetWorker(RemoteWorker):
    """A worker that this process meets at an address.

    Args:
        index: its number.
        backend: where it lives.
        orders: by what it has its orders.
        address: where it is met.
    """

    def __init__(
        self, index: int, backend: ProcessGroupBackend, orders: OrderLine, address: Address
    ) -> None:
        super().__init__(index, backend, orders)
        self._group = backend
        self._address = address
        if not backend.launcher.replaces:
            self._who = f"(rank {index + 1}, which somebody else started) "

    @override
    def begin(self) -> None:
        run = partial(run_rank_at, self._address)
        self._process = self._backend.launcher.start(self.index, run, self.exited)
        self._group.meet(self, self._address.prefix, self._listen)

    @override
    def let_go(self) -> None:
        super().let_go()
        self._group.give_up(self._address.prefix, self._linked)

    @abstractmethod
    def _listen(self) -> None:
        """Meets it, and takes in what it sends, until its end."""

    def _missed(self, error: Exception) -> None:
        """It was not met."""
        seconds = self._address.timeout
        self.cut(f"did not join within {seconds:g} s (timeout): {_first_line(error)}")


class _Rank(MetWorker):
    @override
    def _listen(self) -> None:
        try:
            link = self._address.link(0)
            self.orders.meet()
        except Exception as error:
            self._missed(error)
            return
        self.linked()
        talk = threading.Thread(target=self._talk, args=(link,), daemon=True)
        talk.start()
        while self.ended is None:
            try:
                packed = link.receive()
            except RuntimeError:
                break
            self.heard(packed)
        # The connection is closed when no thread has it any more. That takes threads of its own:
        # the program must not end in the middle of it.
        self.put(None)
        talk.join(5.0)
        del link
        self.cut()

    def _talk(self, link: Link) -> None:
        while (packed := self._outbox.get()) is not None:
            try:
                link.send(packed)
            except RuntimeError:
                break


def _first_line(error: BaseException) -> str:
    """What an exception says, without what comes after."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
