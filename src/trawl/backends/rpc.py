"""Workers that are nodes of ``torch.distributed.rpc``, over TensorPipe.

``torch.distributed.rpc`` is in maintenance mode upstream, and treats a group of nodes as a whole.
Here each node knows only the driver and itself, so a node that dies can be replaced without
affecting the others.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from trawl.backends.authentication import AuthenticationError, Session
from trawl.backends.launch import Launcher
from trawl.backends.lifeline import Lifeline, Line
from trawl.backends.link import FOREVER, Address, dist, over
from trawl.backends.network import LOOPBACK, interface_at, own_address
from trawl.backends.order_line import OrderLine, Orders
from trawl.backends.process_group import MetWorker, ProcessGroupBackend
from trawl.backends.remote import RemoteWorker
from trawl.backends.remote_packing import Packed, seal, unseal
from trawl.backends.remote_rank import Rank

DRIVER = "COLLECTOR_DRIVER"
#: Default options of the agents. TensorPipe's other transport, shared memory, polls for messages
#: without a pause in each process, which would take time from the workers.
DEFAULT_TENSORPIPE_OPTIONS = {
    "num_worker_threads": 16,
    "_transports": ["uv"],
    "_channels": ["basic"],
}
# TensorPipe's names for the entries in the store that describe the driver's agent.
_OF_DRIVER = (f"addrs/{DRIVER}", "names/_ALL_WORKER_INFOS", "names/0", "rpcIsStaticGroup")
_END = "end"
# Most bytes for which a copy takes less time than the wait until the driver has them.
_COPIED = 1 << 18


@dataclass(frozen=True)
class Node:
    """Node of RPC.

    Attributes:
        number: number of the node in RPC; the driver's is 0.
        name: name of the node in RPC.
        address: the address where the node meets the driver.
        options: arguments of ``TensorPipeRpcBackendOptions``.
    """

    number: int
    name: str
    address: Address
    options: Mapping[str, Any] = field(default_factory=dict)

    def agent(self, store: Any) -> Any:
        """Starts this process's agent, which knows the nodes that the store names.

        Raises:
            RuntimeError: if this process has an agent already.
        """
        import torch.distributed.autograd
        import torch.distributed.rpc

        rpc: Any = torch.distributed.rpc
        api = rpc.api
        if api._is_current_rpc_agent_set():
            raise RuntimeError(
                "torch.distributed.rpc is in use in this process already, and can be once only: "
                "close the collector that has it, or call torch.distributed.rpc.shutdown()"
            )
        options = rpc.TensorPipeRpcBackendOptions(**self.options)
        agent = rpc.TensorPipeAgent(store, self.name, self.number, None, options, {}, [])
        dist.autograd._init(self.number)
        # The agent listens from here on.
        with _at_interface(own_address(self.address.host, self.address.port)):
            api._init_rpc_states(agent)
        return agent


@contextmanager
def _at_interface(address: str) -> Iterator[None]:
    """Context within which an agent listens at an address, unless the user named an interface.

    By default it would listen at the address of this machine's name, which may be in another
    network.
    """
    name, there = "TP_SOCKET_IFNAME", interface_at(address)
    before = os.environ.get(name)
    if before is None and there is not None:
        os.environ[name] = there
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def _call(to: Any, function: Any, *arguments: Any) -> Any:
    from torch.distributed import rpc

    return rpc.rpc_async(to, function, args=arguments, timeout=0)


def _tensors(packed: Packed) -> list[Tensor]:
    return [over(view) for view in packed.buffers]


def _received(verb: int, body: bytes, tensors: Sequence[Tensor]) -> Packed:
    return Packed(verb, body, [tensor.numpy() for tensor in tensors])


# --- on a node

_rank: RpcRank | None = None


class RpcRank(Rank):
    """Node's end of its connection to the driver.

    The node makes no calls. The driver asks it for its next message, and gets the answer when there
    is one. The reason is that an agent that others connect to stops listening if one of them dies
    while it connects.

    Args:
        address: the address where the node meets the driver.
        orders: the connection for orders.
        lifeline: the connection that detects an unreachable driver, or None.
    """

    def __init__(self, address: Address, orders: Orders, lifeline: Lifeline | None) -> None:
        super().__init__(orders, lifeline)
        self._address = address
        self._session: Session
        self._lock = threading.Lock()
        self._next_number = 0
        self._early: dict[int, Packed] = {}
        self._asked: SimpleQueue[Future[Any] | None] = SimpleQueue()
        self._question: Future[Any] | None = None

    def take(self, number: int, packed: Packed) -> None:
        """Handles a message. Messages may come in any order."""
        with self._lock:
            self._early[number] = packed
            while self._next_number in self._early:
                early = self._early.pop(self._next_number)
                self._next_number += 1
                try:
                    self.receive(unseal(early, self._session))
                except AuthenticationError:
                    self.lose()

    def ask(self) -> Future[Any]:
        """Returns a future for the next message to the driver."""
        question: Future[Any] = Future()
        self._asked.put(question)
        return question

    @override
    def begin(self) -> None:
        self._session = self._address.meet(1)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Waits until the driver is gone or closes the connection, then ends the worker."""
        with contextlib.suppress(RuntimeError):
            store = self._address.client()
            store.set_timeout(FOREVER)
            store.get(f"{self._address.prefix}/{_END}")
        self.lose()

    @override
    def lose(self) -> None:
        self._asked.put(None)
        super().lose()

    @override
    def transmit(self, packed: Packed) -> None:
        self.secure()
        packed = seal(packed, self._session)
        question, self._question = self._question, None
        assert question is not None
        tensors = _tensors(packed)
        small = sum(map(len, tensors)) <= _COPIED
        answer = [one.clone() for one in tensors] if small else tensors
        question.set_result((packed.verb, packed.body, answer))
        if not small:
            self.secure()

    @override
    def secure(self) -> None:
        # When the driver asks for the next message, it has this one.
        self._question = self._question or self._asked.get()
        if self._question is None:
            raise RuntimeError("the driver is gone")


def _join_rpc(
    number: int,
    name: str,
    options: Mapping[str, Any],
    line: Line | None,
    link_timeout: float | None,
    address: Address,
    orders: Orders,
) -> int:
    """Runs a node, which works for the driver that calls it; returns the exit status."""
    global _rank
    orders.ask_now_and_then(link_timeout)
    lifeline = None if line is None else line.connect(address.prefix, address.key)
    _rank = RpcRank(address, orders, lifeline)
    Node(number, name, address, options).agent(address.names())
    status = _rank.live()
    _rank = None
    _shut_down()
    return status


def _to_node(number: int, verb: int, body: bytes, tensors: list[Tensor]) -> None:
    if _rank is not None:
        _rank.take(number, _received(verb, body, tensors))


def _from_node() -> Future[Any]:
    return Future() if _rank is None else _rank.ask()


# As torch.distributed.rpc.functions.async_execution does it: no thread waits for the answer.
_from_node._wrapped_async_rpc_function = _from_node  # type: ignore[attr-defined]


# --- in the driver


def _shut_down() -> None:
    import torch.distributed.rpc

    api: Any = torch.distributed.rpc.api
    if api._is_current_rpc_agent_set():
        api.shutdown(graceful=False)


class RpcBackend(ProcessGroupBackend):
    """Backend whose workers are nodes of ``torch.distributed.rpc``; one per process at a time.

    Args:
        launcher: starts the workers' processes.
        host: address of this machine at which workers find the store.
        port: port of the store; None for any that is free.
        timeout: seconds that a node may take to join.
        prefix: prefix of the names in the store.
        store: True if this process makes the store; False if it exists already.
        link_timeout: seconds that a worker's machine may be out of reach; None for no limit.
        secret: the secret from which the workers' keys are derived; by default random. It must be
            given if the launcher can't pass the keys to the workers.
        options: arguments of ``TensorPipeRpcBackendOptions``.
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
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._membership = threading.Lock()
        self._agent: Any = None
        super().__init__(launcher, host, port, timeout, prefix, store, link_timeout, secret)
        self._numbers = itertools.count(1)
        self._options = {**DEFAULT_TENSORPIPE_OPTIONS, **(options or {})}
        node = Node(0, DRIVER, Address(*self._where, prefix=prefix), self._options)
        self._own: Any = dist.PrefixStore(f"{prefix}/driver", self._store)
        try:
            self._agent = node.agent(self._own)
        except BaseException:
            self._closed = True
            self.launcher.close()
            super()._let_go()
            self._own = None
            raise

    @override
    def _new_worker(self, index: int) -> RemoteWorker:
        address = self._new_address(index)
        number = next(self._numbers)
        theirs = dist.PrefixStore(address.prefix, self._store)
        for name in _OF_DRIVER:
            theirs.set(name, self._own.get(name))
        # A replacement has another name, as an agent never forgets the address of a name.
        again = address.prefix.rsplit("/", 1)[1]
        name = f"COLLECTOR_NODE_{index + 1}" + (f"_{again}" if again != "0" else "")
        task = partial(_join_rpc, number, name, self._options, self._line, self._link_timeout)
        return _Node(index, self, self._new_orders(address, task), Node(number, name, address))

    def admit(self, node: Node) -> Any:
        """Adds a node that has joined to the agent; returns the address for calls to the node."""
        from torch._C._distributed_rpc import WorkerInfo

        info = WorkerInfo(node.name, node.number)
        with self._membership:
            if self._agent is None:
                raise RuntimeError("this backend is closed")
            name = f"addrs/{node.name}"
            self._own.set(name, node.address.names().get(name))
            self._agent._update_group_membership(info, [], {}, True)
        return info

    def dismiss(self, info: Any) -> None:
        """Removes a node from the agent."""
        with self._membership:
            if self._agent is not None:
                self._agent._update_group_membership(info, [], {}, False)

    @override
    def _let_go(self) -> None:
        with self._membership:
            self._agent = None
        super()._let_go()
        _shut_down()
        # It keeps the store alive, and the store keeps its port.
        self._own = None


class _Node(MetWorker):
    def __init__(self, index: int, backend: RpcBackend, orders: OrderLine, node: Node) -> None:
        super().__init__(index, backend, orders, node.address)
        self._rpc = backend
        self._node = node
        self._session: Session
        self._answers: SimpleQueue[Future[Any] | None] = SimpleQueue()

    @override
    def cut(self, why: str | None = None) -> None:
        super().cut(why)
        self._answers.put(None)

    @override
    def _listen(self) -> None:
        try:
            self.orders.meet()
            self._session = self._address.meet(0)
            info = self._rpc.admit(self._node)
        except Exception as error:
            self._missed(error)
            return
        self.linked()
        talk = threading.Thread(target=self._talk, args=(info,), daemon=True)
        talk.start()
        with contextlib.suppress(RuntimeError):
            while self.ended is None and (packed := self._asked(info)) is not None:
                self.heard(packed)
        self.put(None)
        talk.join(5.0)
        self._rpc.dismiss(info)
        with contextlib.suppress(RuntimeError):
            self._address.names().set(_END, b"")
        self.cut()

    def _asked(self, info: Any) -> Packed | None:
        """Waits for the next message; returns None if there will be none."""
        # A wait for the future itself would never end if the machine is out of reach.
        _call(info, _from_node).add_done_callback(self._answers.put)
        answer = self._answers.get()
        return None if answer is None else unseal(_received(*answer.wait()), self._session)

    def _talk(self, info: Any) -> None:
        number = 0
        while (packed := self._outbox.get()) is not None:
            sealed = seal(packed, self._session)
            try:
                _call(info, _to_node, number, sealed.verb, sealed.body, _tensors(sealed))
            except RuntimeError:
                break
            number += 1
