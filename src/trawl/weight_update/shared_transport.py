"""Transport of weights to receivers by shared memory."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import select
import socket
import time
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from typing import Any

from tensordict import TensorDictBase

from trawl.weight_update.board import Board, Posted, Reader
from trawl.weight_update.packing import Packing, writer
from trawl.weight_update.shipments import by_worker
from trawl.weight_update.strategy import WeightStrategy, take_in
from trawl.weight_update.tensors import packed_extra, weights_of


class Gone(ConnectionError):
    """Raised if the other side of a transport has ended."""


class Bell:
    """One end of a connection on which each side can wake the other, and notice its death."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Bell, Bell]:
        """Returns both ends of a new connection."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return _bell, (reduction.DupFd(self._end.fileno()),)

    def ring(self) -> None:
        """Wakes the other side, or does nothing if it has ended."""
        # If the socket is full, the other side has enough to wake it.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._end.send(b"!")

    def wait(self, timeout: float | None) -> None:
        """Waits until the other side rings, but not longer than ``timeout`` seconds.

        Raises:
            Gone: if the other side has ended.
        """
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if not poll.poll(None if timeout is None else max(0.0, timeout) * 1000):
            return
        try:
            rung = self._end.recv(1 << 12)
        except BlockingIOError:
            return
        except ConnectionResetError:
            rung = b""
        if not rung:
            raise Gone

    def close(self) -> None:
        """Closes this end."""
        self._end.close()

    def __del__(self) -> None:
        self._end.close()


def _bell(descriptor: Any) -> Bell:
    return Bell(socket.socket(fileno=descriptor.detach()))


class SharedMemTransport:
    """Transport to a receiver by shared memory.

    Args:
        board: board on which weights are published; by default a new one.
        index: number of the receiver among the board's readers.
        number: number of the receiver in errors; ``index`` by default.

    The sender makes the object, and passes it to the receiver's process as an argument of
    ``multiprocessing.Process``. In that process, the object receives. If one object has to serve
    several receivers, call :meth:`register_weights` first.
    """

    def __init__(
        self, board: Board | None = None, index: int = 0, number: int | None = None
    ) -> None:
        self._board: Board | None = Board(1) if board is None else board
        self.reader: Reader = self._board.reader(index)
        self.index = index
        self.number = index if number is None else number
        self._ours: Bell | None
        self._theirs: Bell | None
        self._ours, self._theirs = Bell.pair()
        # With several receivers: their transports, and queues by which each gets its own.
        self._receivers: _Receivers | None = None
        self._queues: Mapping[int, Any] = {}
        self._end: SharedMemTransport | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._theirs is None:
            raise RuntimeError("a transport can't be sent to another process once it is connected")
        kept = ("reader", "index", "number", "_theirs", "_queues")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _board=None, _ours=None, _receivers=None, _end=None)

    # --- several receivers

    def register_weights(
        self,
        params_map: Mapping[int, TensorDictBase],
        init_queues: Mapping[int, Any],
        per_worker: bool = False,
    ) -> None:
        """Makes this the transport to several receivers.

        Args:
            params_map: first weights of each receiver, by its number. Receivers with the same
                TensorDict share one copy in shared memory.
            init_queues: queues (``multiprocessing.Queue``) by which receivers get their ends, by
                the receiver's number.
            per_worker: whether each receiver has a copy of its own, even if their weights are the
                same now.

        Raises:
            ValueError: if a receiver has no queue.
        """
        missing = sorted(set(params_map) - set(init_queues))
        if missing:
            raise ValueError(f"init_queues has no queue for receivers {missing}")
        self._receivers = _Receivers(params_map, per_worker)
        self._queues = dict(init_queues)

    @property
    def unique_weights(self) -> list[TensorDictBase]:
        """First weights that were registered, each TensorDict once.

        Raises:
            RuntimeError: if no weights were registered.
        """
        if self._receivers is None:
            raise RuntimeError("unique_weights before register_weights()")
        return self._receivers.weights

    def setup_connection_and_weights_on_sender(self) -> None:
        """Sends the first weights of all receivers, and sends each receiver its end.

        Without registered weights, this is :meth:`connect_sender`.
        """
        if self._receivers is None:
            self.connect_sender()
            return
        self._receivers.begin(self._queues)

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
        timeout: float = 60.0,
    ) -> Any:
        """Connects this end, then receives and returns the first weights.

        Args:
            worker_idx: number of the receiver, if there are several.
            weights: tensors to copy the weights into.
            model: a module to load the weights into.
            strategy: determines how weights are loaded, and in which form they are returned.
            timeout: seconds to wait for the sender, and then for the weights.

        Raises:
            ValueError: if the sender registered no such receiver.
            TimeoutError: if the sender does not come in time.
        """
        if not self._queues:
            self.connect_receiver()
        elif worker_idx is None or worker_idx not in self._queues:
            raise ValueError(
                f"worker_idx is {worker_idx}, but there are receivers {sorted(self._queues)}"
            )
        else:
            if self._receivers is not None and self._receivers.owner != os.getpid():
                # This process was forked from the sender's, so these ends are only copies.
                self._receivers.close()
                self._receivers = None
            try:
                self._end = pickle.loads(self._queues[worker_idx].get(timeout=timeout))
            except queue.Empty:
                raise TimeoutError(f"the sender of weights did not come in {timeout:g} s") from None
            self._end.connect_receiver()
        return self.receive_weights(timeout, weights=weights, model=model, strategy=strategy)

    # --- the sender

    def connect_sender(self) -> None:
        """Closes this process's copy of the receiver's end, so the receiver's death is noticed."""
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None

    def send_weights(self, weights: Any, worker_ids: Sequence[int] | None = None) -> None:
        """Sends weights without waiting until they are taken.

        Args:
            weights: weights in any form; with several receivers also a dict by their numbers.
            worker_ids: with several receivers, the numbers of those that get the weights; None
                for all.
        """
        if self._receivers is not None:
            self._receivers.send(weights, worker_ids)
            return
        _put_up(self._sending(), weights, [self])

    def send_weights_async(self, weights: Any) -> None:
        """Sends weights to all receivers, and never waits."""
        self.send_weights(weights)

    def notify(self) -> None:
        """Tells the receiver that there are new weights."""
        if self._ours is not None:
            self._ours.ring()

    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits until all receivers have taken the last weights.

        Raises:
            TimeoutError: if a receiver does not take them in time.
            ConnectionError: if a receiver has ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        self._wait_until(deadline, timeout)

    def _wait_until(self, deadline: float | None, timeout: float | None) -> None:
        if self._receivers is not None:
            for way in self._receivers.ways.values():
                way._wait_until(deadline, timeout)
            return
        board = self._sending()
        while board.taken(self.index) < board.count(self.index):
            left = _left(deadline)
            if left is not None and left <= 0:
                raise TimeoutError(f"receiver {self.number} took no weights within {timeout:.3g} s")
            assert self._ours is not None
            try:
                self._ours.wait(left)
            except Gone:
                raise ConnectionError(
                    f"receiver {self.number} has ended, and took no weights"
                ) from None

    def _sending(self) -> Board:
        if self._board is None:
            raise RuntimeError("this end of the transport receives: send by the one it was made of")
        return self._board

    # --- the receiver

    def connect_receiver(self) -> None:
        """Closes this process's copy of the sender's end, so the sender's death is noticed."""
        if self._ours is not None:
            self._ours.close()
            self._ours = None

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Receives and returns the newest weights, or None if none arrive in time.

        Raises:
            ConnectionError: if the sender has ended, and all its weights were taken.
        """
        if self._end is not None:
            return self._end.receive_weights(
                timeout, weights=weights, model=model, strategy=strategy
            )
        if not self.wait(timeout):
            return None
        into = model if model is not None else weights
        taken: list[Any] = []

        def use(posted: Posted) -> None:
            if posted.slot is None:
                return
            taken.append(take_in(posted.copy(), into, strategy))

        self.reader.take(use)
        self.send_ack()
        return taken[0] if taken else None

    def wait(self, timeout: float | None) -> bool:
        """Waits for new weights; returns False if none arrive in time.

        Raises:
            ConnectionError: if the sender has ended, and all its weights were taken.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.reader.newer:
            left = _left(deadline)
            if left is not None and left <= 0:
                return False
            if self._theirs is None:
                raise RuntimeError("this end of the transport sends: it can't receive")
            try:
                self._theirs.wait(left)
            except Gone:
                if not self.reader.newer:
                    raise ConnectionError("the sender of weights has ended") from None
        return True

    def send_ack(self, message: str = "updated") -> None:
        """Tells the sender that the weights were taken.

        Args:
            message: accepted for compatibility: the shared memory says how much was taken.
        """
        if self._theirs is not None:
            self._theirs.ring()

    def close(self) -> None:
        """Closes the ends in this process."""
        if self._receivers is not None:
            self._receivers.close()
        if self._end is not None:
            self._end.close()
        for bell in (self._ours, self._theirs):
            if bell is not None:
                bell.close()


class _Receivers:
    """Transports to several receivers; those with the same weights share their memory.

    Args:
        params_map: first weights of each receiver, by its number.
        per_worker: True if no receivers share their memory.
    """

    def __init__(self, params_map: Mapping[int, TensorDictBase], per_worker: bool) -> None:
        self.owner = os.getpid()
        self.weights = list({id(one): one for one in params_map.values()}.values())
        self._first = dict(params_map)
        groups: dict[int, list[int]] = {}
        for worker, weights in params_map.items():
            groups.setdefault(worker if per_worker else id(weights), []).append(worker)
        self._boards: list[tuple[Board, list[SharedMemTransport]]] = []
        for workers in groups.values():
            board = Board(len(workers))
            ways = [SharedMemTransport(board, i, worker) for i, worker in enumerate(workers)]
            self._boards.append((board, ways))
        self.ways = {way.number: way for _, ways in self._boards for way in ways}

    def close(self) -> None:
        """Closes the ends of all transports in this process."""
        for way in self.ways.values():
            way.close()

    def begin(self, queues: Mapping[int, Any]) -> None:
        """Sends the first weights, and sends each receiver its end."""
        for board, ways in self._boards:
            _put_up(board, self._first[ways[0].number], ways)
        for worker, way in self.ways.items():
            # A queue would pickle it later, when this end may be closed already.
            queues[worker].put(bytes(reduction.ForkingPickler.dumps(way)))
            way.connect_sender()

    def send(self, weights: Any, worker_ids: Sequence[int] | None) -> None:
        """Sends weights to receivers: the same to all, or each its own.

        Raises:
            ValueError: if a receiver is unknown, or there are no weights for it.
        """
        own = by_worker(weights)
        chosen = list(own or self.ways) if worker_ids is None else list(worker_ids)
        unknown = sorted(set(chosen) - set(self.ways)) + sorted(set(chosen) - set(own or chosen))
        if unknown:
            raise ValueError(f"there are no receivers, or no weights for receivers, {unknown}")
        if own:
            for worker in chosen:
                self.ways[worker].send_weights(own[worker])
            return
        for board, ways in self._boards:
            _put_up(board, weights, [way for way in ways if way.number in chosen])


def _put_up(board: Board, weights: Any, ways: Sequence[SharedMemTransport]) -> None:
    """Publishes weights on a board, once for all transports in ``ways``."""
    if not ways:
        return
    given = weights_of(weights)
    packing = board.packing or Packing(given.tensors, given.tensors)
    write = writer(packing, packing.match(given.tensors, "of the receiver"))
    board.post(packing, write, packed_extra(given.extra), None, [way.index for way in ways])
    for way in ways:
        way.notify()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()
