"""What a message from a worker costs: over Trawl's connections, a process group (gloo), and RPC.

    python benchmarks/messages.py            # half a minute
    python benchmarks/messages.py --quick    # a glance

A worker, which is a process of this machine, answers each request with a message of a size. All
three take turns, and the median of the turns counts. The process group and RPC carry a tensor and
nothing else; a message of Trawl's is an object with an array in it, and is authenticated.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import rpc

from trawl.backends import Message, Port, Service
from trawl.extras.clusters.launching.launch import LaunchPlan, LocalLauncher
from trawl.extras.clusters.network.backend import RemoteBackend

# Sizes of messages in bytes, each with the number of messages in a turn.
SIZES = {1 << 10: 400, 1 << 20: 60, 64 << 20: 4}
ROUNDS = 15
HOST = "127.0.0.1"


class Carrier(ABC):
    """One way of a message from a worker to this process."""

    name: str

    @abstractmethod
    def ask(self, size: int) -> Any:
        """Asks the worker for a message of a size, and returns it."""

    @abstractmethod
    def close(self) -> None:
        """Ends the worker."""


class Answering(Service):
    """The worker of Trawl's."""

    busy = False

    def __init__(self, port: Port) -> None:
        self._port = port
        self._arrays = {size: np.ones(size, np.uint8) for size in SIZES}

    def handle(self, content: int) -> None:
        """Answers a request."""
        self._port.send({"array": self._arrays[content]})

    def work(self) -> None:
        """There is nothing to do."""

    def close(self) -> None:
        """There is nothing to close."""


class Trawl(Carrier):
    """Trawl's connections."""

    name = "Trawl"

    def __init__(self) -> None:
        self._backend = RemoteBackend(LaunchPlan(LocalLauncher()))
        self._worker = self._backend.launch(0, Answering)

    def ask(self, size: int) -> Any:
        self._worker.send(size)
        (event,) = self._backend.wait()
        assert isinstance(event, Message), event
        return event.content

    def close(self) -> None:
        self._backend.close()


def group_of_two(rank: int, port: int) -> Any:
    """Joins the process group."""
    dist.init_process_group("gloo", f"tcp://{HOST}:{port}", world_size=2, rank=rank)


def answer_group(port: int) -> None:
    """The worker of the process group."""
    group_of_two(1, port)
    tensors = {size: torch.ones(size, dtype=torch.uint8) for size in SIZES}
    request = torch.zeros(1, dtype=torch.int64)
    while True:
        dist.recv(request, 0)
        if not int(request):
            return
        dist.send(tensors[int(request)], 0)


class Group(Carrier):
    """A process group of two."""

    name = "process group (gloo)"

    def __init__(self, port: int) -> None:
        self._process = multiprocessing.get_context("spawn").Process(
            target=answer_group, args=(port,), daemon=True
        )
        self._process.start()
        group_of_two(0, port)

    def ask(self, size: int) -> Any:
        dist.send(torch.tensor([size]), 1)
        found = torch.empty(size, dtype=torch.uint8)
        dist.recv(found, 1)
        return found

    def close(self) -> None:
        dist.send(torch.tensor([0]), 1)
        self._process.join()
        dist.destroy_process_group()


_tensors: dict[int, torch.Tensor] = {}


def node(rank: int, port: int) -> None:
    """Joins RPC; the worker stays until all leave."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{HOST}:{port}")
    rpc.init_rpc(f"node{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank:
        rpc.shutdown()


def answer_call(size: int) -> torch.Tensor:
    """The worker of RPC."""
    if size not in _tensors:
        _tensors[size] = torch.ones(size, dtype=torch.uint8)
    return _tensors[size]


class Rpc(Carrier):
    """``torch.distributed.rpc`` with its defaults."""

    name = "torch.distributed.rpc"

    def __init__(self, port: int) -> None:
        self._process = multiprocessing.get_context("spawn").Process(target=node, args=(1, port))
        self._process.start()
        node(0, port)

    def ask(self, size: int) -> Any:
        return rpc.rpc_sync("node1", answer_call, (size,))

    def close(self) -> None:
        rpc.shutdown()
        self._process.join()


def main(quick: bool = False) -> None:
    """Measures all, and prints a line for each size.

    Args:
        quick: True to take one turn each, with few messages.
    """
    from clusters.peers import free_port

    makes = (Trawl, partial(Group, free_port()), partial(Rpc, free_port()))
    carriers: list[Carrier] = [make() for make in makes]
    for size, most in SIZES.items():
        count = min(most, 3) if quick else most
        taken: dict[str, list[float]] = {carrier.name: [] for carrier in carriers}
        for number in range(2 if quick else ROUNDS + 1):
            for carrier in carriers if number % 2 else reversed(carriers):
                began = time.perf_counter()
                for _ in range(count):
                    carrier.ask(size)
                taken[carrier.name].append((time.perf_counter() - began) / count)
        # The first round is to warm up.
        texts = (f"{name} {1e3 * statistics.median(own[1:]):.2f} ms" for name, own in taken.items())
        print(f"{size:>10,} bytes: {', '.join(texts)}", flush=True)
    for carrier in carriers:
        carrier.close()


if __name__ == "__main__":
    main("--quick" in sys.argv[1:])
