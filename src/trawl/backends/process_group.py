"""Workers that are ranks of process groups. Each forms a group of two with this process.

Therefore a rank that dies can be replaced without affecting the others.
"""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from typing_extensions import override

from trawl.backends.authentication import KEY_BYTES, AuthenticationError, derived_key
from trawl.backends.launch import Launcher
from trawl.backends.lifeline import Lifeline, Lifelines, Line
from trawl.backends.link import GONE, STATE, Address, Link, hosted_store
from trawl.backends.listener import Listener
from trawl.backends.network import LOOPBACK, is_loopback, own_address
from trawl.backends.order_line import OrderLine, Orders
from trawl.backends.remote import RemoteBackend, RemoteWorker
from trawl.backends.remote_packing import MESSAGE, Packed, pack
from trawl.backends.remote_rank import ORDERS, Rank, Task

# Seconds that threads that listen to workers may take to end after the workers.
_LISTENING = 2.0

# --- on a rank


class ProcessGroupRank(Rank):
    """Rank's end of its connection to the driver.

    Args:
        link: the connection.
        orders: the connection for orders.
        lifeline: the connection that detects an unreachable driver, or None.
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


def _join_group(
    line: Line | None, link_timeout: float | None, address: Address, orders: Orders
) -> int:
    """Runs a rank in a process group with the driver; returns the exit status."""
    orders.ask_now_and_then(link_timeout)
    lifeline = None if line is None else line.connect(address.prefix, address.key)
    return ProcessGroupRank(address.link(1), orders, lifeline).live()


# --- in the driver


class ProcessGroupBackend(RemoteBackend):
    """Backend whose workers are ranks of process groups.

    Args:
        launcher: starts the workers' processes.
        host: address of this machine at which workers find the store.
        port: port of the store; None for any that is free.
        timeout: seconds that a rank may take to join.
        prefix: prefix of the names in the store.
        store: True if this process makes the store; False if it exists already.
        link_timeout: seconds that a worker's machine may be out of reach; None for no limit.
        secret: the secret from which the workers' keys are derived; by default random. It must be
            given if the launcher can't pass the keys to the workers.
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
        secret: bytes | None = None,
    ) -> None:
        self._secret = os.urandom(KEY_BYTES) if secret is None else secret
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
        self._link_timeout = link_timeout
        self._listener = Listener(own_address(host, self.port))
        # There is no link to cut between this machine and itself.
        if link_timeout is not None and not is_loopback(self._listener.host):
            self._lifelines = Lifelines(self._listener, link_timeout)
        # Last, as `__del__` must not close a backend that got no port.
        super().__init__(launcher)

    @property
    def port(self) -> int:
        """Port at which ranks find the store."""
        return self._where[1]

    @override
    def _new_worker(self, index: int) -> RemoteWorker:
        address = self._new_address(index)
        task = partial(_join_group, self._line, self._link_timeout)
        return _Rank(index, self, self._new_orders(address, task), address)

    def _new_address(self, index: int) -> Address:
        """Returns the address at which the next rank for a worker meets this process."""
        launches = self._launches[index] = self._launches.get(index, -1) + 1
        prefix = f"{self._prefix}/{index + 1}/{launches}"
        return Address(*self._where, prefix, derived_key(self._secret, prefix))

    def _new_orders(self, address: Address, task: Task) -> OrderLine:
        """Returns the connection for the orders of the next rank; the first order is its task."""
        orders = OrderLine(self._listener, address.prefix, address.key, address.timeout)
        orders.send(pack(MESSAGE, task))
        return orders

    @property
    def _line(self) -> Line | None:
        """Address of the lifelines of workers, or None if they have none."""
        return None if self._lifelines is None else self._lifelines.line

    @override
    def _let_go(self) -> None:
        deadline = time.monotonic() + _LISTENING
        for worker, thread in self._threads.items():
            # For a worker out of reach, the thread ends when the kernel gives up the connection.
            if not worker.out_of_reach:
                thread.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()
        self._store = None

    def meet(self, worker: MetWorker, address: Address, listen: Callable[[], None]) -> None:
        """Runs a thread that listens to a worker at an address, and watches its lifeline."""
        if self._lifelines is not None:
            self._lifelines.watch(address.prefix, address.key, worker.lose)
        # Only now may the worker come: with its first order it connects its lifeline.
        place = f"{self._listener.host} {self._listener.port}"
        self._store.set(f"{address.prefix}/{ORDERS}", place)
        living = {other: thread for other, thread in self._threads.items() if thread.is_alive()}
        self._threads = {**living, worker: threading.Thread(target=listen, daemon=True)}
        self._threads[worker].start()

    def give_up(self, name: str, linked: bool) -> None:
        """Gives up a worker: forgets its lifeline, and ends the wait for it if it never joined."""
        if self._lifelines is not None:
            self._lifelines.forget(name)
        if not linked and self._store is not None:
            self._store.set(f"{name}/{STATE}", GONE)


class MetWorker(RemoteWorker):
    """Worker that this process meets at an address.

    Args:
        index: number of the worker.
        backend: backend of the worker.
        orders: the connection for orders.
        address: the address of the meeting.
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
        self._process = self._backend.launcher.start(self.index, self._address, self.exited)
        self._group.meet(self, self._address, self._listen)

    @override
    def let_go(self) -> None:
        super().let_go()
        self._group.give_up(self._address.prefix, self._linked)

    @abstractmethod
    def _listen(self) -> None:
        """Waits until the worker joins, then receives its messages until its end."""

    def _missed(self, error: Exception) -> None:
        """Reports that the worker did not join."""
        seconds = self._address.timeout
        self.cut(f"did not join within {seconds:g} s (timeout): {_first_line(error)}")


class _Rank(MetWorker):
    @override
    def _listen(self) -> None:
        try:
            self.orders.meet()
            link = self._address.link(0)
        except Exception as error:
            self._missed(error)
            return
        self.linked()
        talk = threading.Thread(target=self._talk, args=(link,), daemon=True)
        talk.start()
        why = None
        while self.ended is None:
            try:
                packed = link.receive()
            except AuthenticationError as error:
                why = f"was given up: {error}"
                break
            except RuntimeError:
                break
            self.heard(packed)
        # The connection closes when no thread refers to it any more. Its own threads take part in
        # that, so the program must not end in the middle of it.
        self.put(None)
        talk.join(5.0)
        del link
        self.cut(why)

    def _talk(self, link: Link) -> None:
        while (packed := self._outbox.get()) is not None:
            try:
                link.send(packed)
            except RuntimeError:
                break


def _first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its type if there is none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
