"""Carrier that uses ``torch.distributed.rpc`` over TensorPipe. Each worker is a node.

``torch.distributed.rpc`` is in maintenance mode upstream, and treats a group of nodes as a whole.
Here, each node knows only the driver and itself, so a node that dies can be replaced without
affecting the others.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from torch.futures import Future
from typing_extensions import override

from trawl.backends.carrier import Carrier, Inlet, MakeOutlet, Outlet
from trawl.backends.frames import Frame, seal, unseal
from trawl.backends.launching.authentication import Session
from trawl.backends.link import Address, dist, over
from trawl.backends.network import interface_at, own_address

DRIVER = "COLLECTOR_DRIVER"
#: Default options of the agents. TensorPipe's other transport, shared memory, polls for messages
#: without a pause in each process, which would take processor time from the workers.
DEFAULT_TENSORPIPE_OPTIONS = {
    "num_worker_threads": 16,
    "_transports": ["uv"],
    "_channels": ["basic"],
}
# TensorPipe's names for the entries in the store that describe the driver's agent.
_OF_DRIVER = (f"addrs/{DRIVER}", "names/_ALL_WORKER_INFOS", "names/0", "rpcIsStaticGroup")
# Number of bytes up to which copying a message is faster than waiting until the driver has it.
_COPIED = 1 << 18


@dataclass(frozen=True)
class Node:
    """Node in the RPC framework: the driver or a worker.

    Attributes:
        number: number of the node in RPC; the driver has number 0.
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
                "torch.distributed.rpc is already in use in this process, and a process can use "
                "it only once at a time: close the collector that uses it, or call "
                "torch.distributed.rpc.shutdown()"
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
    """Context within which an agent listens on an address, unless the user named an interface.

    By default, an agent listens on the address to which this machine's name resolves, which may be
    in another network.
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


# --- on a node

_outlet: _RpcOutlet | None = None


class _RpcOutlet(Outlet):
    """Node's end of its connection to the driver.

    The node makes no calls. Instead, the driver calls the node for its next message, and the call
    returns when there is a message. If nodes connected to the driver, the driver's agent would stop
    listening as soon as one of them died while connecting.
    """

    def __init__(
        self, number: int, name: str, options: Mapping[str, Any], address: Address
    ) -> None:
        global _outlet
        self._asked: SimpleQueue[Future[Any] | None] = SimpleQueue()
        self._question: Future[Any] | None = None
        _outlet = self
        Node(number, name, address, options).agent(address.names())
        self._session = address.open_session(1)

    def ask(self) -> Future[Any]:
        """Returns a future for the next message to the driver."""
        question: Future[Any] = Future()
        self._asked.put(question)
        return question

    @override
    def send(self, frame: Frame) -> None:
        self.secure()
        frame = seal(frame, self._session)
        question, self._question = self._question, None
        assert question is not None
        tensors = [over(view) for view in frame.buffers]
        small = sum(map(len, tensors)) <= _COPIED
        answer = [one.clone() for one in tensors] if small else tensors
        question.set_result((frame.verb, frame.body, answer))
        if not small:
            self.secure()

    @override
    def secure(self) -> None:
        # When the driver asks for the next message, it has received this one.
        self._question = self._question or self._asked.get()
        if self._question is None:
            raise RuntimeError("the driver is gone")

    @override
    def abandon(self) -> None:
        self._asked.put(None)

    @override
    def close(self) -> None:
        global _outlet
        _outlet = None
        _shut_down()


def _from_node() -> Future[Any]:
    return Future() if _outlet is None else _outlet.ask()


# The same as `torch.distributed.rpc.functions.async_execution`: no thread waits for the answer.
_from_node._wrapped_async_rpc_function = _from_node  # type: ignore[attr-defined]


# --- in the driver


class RpcCarrier(Carrier):
    """Carries messages over ``torch.distributed.rpc``, which a process can use only once at a time.

    Args:
        options: arguments of ``TensorPipeRpcBackendOptions``.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = {**DEFAULT_TENSORPIPE_OPTIONS, **(options or {})}
        self._numbers = itertools.count(1)
        self._nodes: dict[str, Node] = {}
        self._membership = threading.Lock()
        self._agent: Any = None

    @override
    def open(self, address: Address, store: Any) -> None:
        self._store = store
        self._own: Any = dist.PrefixStore(f"{address.prefix}/driver", store)
        self._agent = Node(0, DRIVER, address, self._options).agent(self._own)

    @override
    def invite(self, index: int, address: Address) -> MakeOutlet:
        number = next(self._numbers)
        theirs = dist.PrefixStore(address.prefix, self._store)
        for name in _OF_DRIVER:
            theirs.set(name, self._own.get(name))
        # A replacement gets a new name, because an agent never forgets the address of a name.
        again = address.prefix.rsplit("/", 1)[1]
        name = f"COLLECTOR_NODE_{index + 1}" + (f"_{again}" if again != "0" else "")
        self._nodes[address.prefix] = Node(number, name, address)
        return partial(_RpcOutlet, number, name, self._options)

    @override
    def admit(self, address: Address) -> Inlet:
        from torch._C._distributed_rpc import WorkerInfo

        node = self._nodes.pop(address.prefix)
        session = address.open_session(0)
        info = WorkerInfo(node.name, node.number)
        with self._membership:
            if self._agent is None:
                raise RuntimeError("this backend is closed")
            name = f"addrs/{node.name}"
            self._own.set(name, address.names().get(name))
            self._agent._update_group_membership(info, [], {}, True)
        return _RpcInlet(info, session, self._dismiss)

    def _dismiss(self, info: Any) -> None:
        with self._membership:
            if self._agent is not None:
                self._agent._update_group_membership(info, [], {}, False)

    @override
    def close(self) -> None:
        with self._membership:
            found, self._agent = self._agent, None
        if found is not None:
            _shut_down()
        # These references keep the store alive, and the store keeps its port.
        self._own = self._store = None


class _RpcInlet(Inlet):
    def __init__(self, info: Any, session: Session, dismiss: Callable[[Any], None]) -> None:
        self._info = info
        self._session = session
        self._dismiss = dismiss
        self._answers: SimpleQueue[Future[Any] | None] = SimpleQueue()

    @override
    def receive(self) -> Frame:
        from torch.distributed import rpc

        # If the worker's machine is out of reach, a wait for the future itself would never end.
        asked = rpc.rpc_async(self._info, _from_node, timeout=0)
        asked.add_done_callback(self._answers.put)
        answer = self._answers.get()
        if answer is None:
            raise RuntimeError("the node is out of reach")
        verb, body, tensors = answer.wait()
        return unseal(Frame(verb, body, [tensor.numpy() for tensor in tensors]), self._session)

    @override
    def abandon(self) -> None:
        self._answers.put(None)

    @override
    def close(self) -> None:
        self._dismiss(self._info)


def _shut_down() -> None:
    import torch.distributed.rpc

    api: Any = torch.distributed.rpc.api
    if api._is_current_rpc_agent_set():
        api.shutdown(graceful=False)
