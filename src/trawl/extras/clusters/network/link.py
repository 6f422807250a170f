"""Store where the processes of a collector meet.

Anyone who can reach the store can read and change it, so the store contains only addresses. A key
that both processes receive by other means authenticates their messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed

from trawl.extras.clusters.network.sockets import listening

# Much of `torch.distributed` has no type annotations.
dist: Any = torch.distributed
NAMES = ("gloo", "nccl", "mpi", "ucc")


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
