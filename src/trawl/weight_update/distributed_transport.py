"""Transport of weights to another rank of the user's own process group."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from tensordict import TensorDictBase

from trawl.weight_update.strategy import WeightStrategy, take_in
from trawl.weight_update.tensors import weights_of

# Time-out for calls of PyTorch that need one, where the caller wants none.
_LONG = timedelta(days=365)


class DistributedTransport:
    """Sends weights by ``torch.distributed``, in the default process group of this process.

    Each side makes a transport. The sender is rank 0, and passes the rank of the receiver; the
    receiver passes no rank. The process group carries the tensors. Through the store, if there is
    one, the receiver learns that weights were sent, and the sender that they were taken.

    Args:
        weights_buffer: a TensorDict with the names, shapes and dtypes of the weights, the same on
            both sides. Weights are sent from this buffer, and received into it.
        store: a store of ``torch.distributed`` that both sides are connected to.
        rank: rank of the receiver, on the sender's side.
        sync: whether ``send_weights`` waits until the weights are taken.

    Raises:
        RuntimeError: if this process has no process group.

    Example:
        >>> from trawl.weight_update import DistributedTransport
        >>> def learner(weights, store):
        ...     transport = DistributedTransport(weights_buffer=weights, store=store, rank=1)
        ...     transport.send_weights(weights)
        >>> def actor(weights, store, policy):
        ...     transport = DistributedTransport(weights_buffer=weights, store=store)
        ...     transport.receive_weights(timeout=10, model=policy)
    """

    def __init__(
        self,
        *,
        weights_buffer: TensorDictBase,
        store: Any = None,
        rank: int | None = None,
        sync: bool = True,
    ) -> None:
        if not torch.distributed.is_initialized():
            raise RuntimeError(
                "DistributedTransport needs a process group: call "
                "torch.distributed.init_process_group() before"
            )
        self.weights_buffer = weights_buffer
        self.rank = rank
        self.sync = sync
        self._store = store
        receiver = torch.distributed.get_rank() if rank is None else rank
        self._prefix = f"trawl/weights/{receiver}"
        self._count = self._taken = 0
        self._under_way: list[Any] = []

    # --- the sender

    def send_weights(self, weights: Any) -> None:
        """Sends weights, in any form; with ``sync``, waits as :meth:`wait_ack` does."""
        self.send_weights_async(weights)
        if self.sync:
            self.wait_ack()

    def send_weights_async(self, weights: Any) -> None:
        """Sends weights without waiting for the receiver.

        Weights that were passed to an earlier call are sent completely first.
        """
        self._finish()
        if self._store is not None:
            self._store.set(f"{self._prefix}/sent/{self._count}", b"")
        self._count += 1
        self._send(weights)

    def send_initial_weights(self, weights: Any) -> None:
        """Sends weights for :meth:`receive_initial_weights`, without the store."""
        self._finish()
        self._send(weights)
        self._finish()

    def setup_connection_and_weights_on_sender(self) -> None:
        """Sends the contents of the buffer as the first weights."""
        self.send_initial_weights(self.weights_buffer)

    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits until the receiver has the last weights; without a store, until they are sent.

        Raises:
            TimeoutError: if the receiver takes longer than ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._store is not None and self._taken < self._count:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._told(f"{self._prefix}/taken/{self._taken}", left):
                raise TimeoutError(f"rank {self.rank} took no weights within {timeout:.3g} s")
            self._taken += 1
        self._finish()

    def _send(self, weights: Any) -> None:
        WeightStrategy().apply_weights(self.weights_buffer, weights)
        if self.rank is None:
            raise RuntimeError("this end of the transport receives: give the sender's a rank")
        for tensor in self._tensors():
            # Keeps the tensor alive until it is sent.
            sent = tensor.contiguous()
            self._under_way.append((torch.distributed.isend(sent, self.rank), sent))

    def _finish(self) -> None:
        for work, _ in self._under_way:
            work.wait()
        self._under_way = []

    # --- the receiver

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Receives and returns the next weights, or None if none arrive in time.

        Args:
            timeout: seconds to wait; None waits as long as it takes.
            weights: tensors to copy the weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.

        Raises:
            ValueError: if ``timeout`` is given without a store.
        """
        if self._store is None:
            if timeout is not None:
                raise ValueError(
                    f"timeout={timeout} needs a store, by which the receiver hears of weights"
                )
        elif not self._told(f"{self._prefix}/sent/{self._count}", timeout):
            return None
        count, self._count = self._count, self._count + 1
        found = self._received(model if model is not None else weights, strategy)
        if self._store is not None:
            self._store.set(f"{self._prefix}/taken/{count}", b"")
        return found

    def receive_initial_weights(self) -> Any:
        """Receives the first weights into the buffer, and returns them."""
        return self._received(None, None)

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Receives and returns the first weights.

        Args:
            worker_idx: accepted for compatibility: the rank identifies the receiver.
            weights: tensors to copy the weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.
        """
        return self._received(model if model is not None else weights, strategy)

    def _received(self, into: Any, strategy: WeightStrategy | None) -> Any:
        for tensor in self._tensors():
            found = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            torch.distributed.recv(found, 0)
            tensor.copy_(found)
        return take_in(weights_of(self.weights_buffer.clone()), into, strategy)

    # --- both

    def _tensors(self) -> list[torch.Tensor]:
        """Returns the tensors of the buffer, in the same order on both sides."""
        named = weights_of(self.weights_buffer).tensors
        return [named[name].data for name in sorted(named)]

    def _told(self, key: str, timeout: float | None) -> bool:
        """Waits for a key of the store, and deletes it; returns False if it is not set in time."""
        store = self._store
        assert store is not None
        limit = _LONG if timeout is None else timedelta(seconds=max(timeout, 0.001))
        # PyTorch prints each wait that fails, so a call that should not wait only checks.
        if timeout == 0 and not store.check([key]):
            return False
        if not _waited(lambda: store.wait([key], limit)):
            return False
        store.delete_key(key)
        return True


def _waited(wait: Callable[[], None]) -> bool:
    try:
        wait()
    except torch.distributed.DistStoreError as error:
        if "timeout" in str(error).lower():
            return False
        raise
    return True
