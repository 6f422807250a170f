"""The way of weights to one receiver."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import time
from multiprocessing import reduction
from typing import Any, Protocol

from trawl.weight_update.board import Board, Posted, Reader
from trawl.weight_update.packing import Packing, writer
from trawl.weight_update.strategy import WeightStrategy, in_form
from trawl.weight_update.tensors import Weights, packed_extra, weights_of


class TransportBackend(Protocol):
    """What a way to a receiver can do."""

    def send_weights(self, weights: Any) -> None:
        """Sends weights, in any form."""

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Takes the newest weights; None if none came in time.

        Args:
            timeout: seconds to wait; None waits as long as it takes.
            weights: tensors to put them into.
            model: a module to put them into.
            strategy: the form in which they are returned, and how they are put there.
        """


class Gone(ConnectionError):
    """The other side of a transport has ended."""


class Bell:
    """One end of a line on which each side can wake the other, and hears when that has ended."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end

    @classmethod
    def pair(cls) -> tuple[Bell, Bell]:
        """Both ends."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def __reduce__(self) -> tuple[Any, ...]:
        return _bell, (reduction.DupFd(self._end.fileno()),)

    def ring(self) -> None:
        """Wakes the other side. If there is nobody any more, nothing happens."""
        # If there is no room, it has been rung often enough.
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self._end.send(b"!")

    def wait(self, timeout: float | None) -> None:
        """Waits until it is rung, but not longer than ``timeout`` seconds.

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
    """The way to a receiver by shared memory.

    Args:
        board: the board that weights are put up on; by default one of its own.
        index: which of the board's readers the receiver is.
        number: what the receiver is called in errors; ``index`` by default.

    The object is made by the sender, and given to the receiver's process as that is started (an
    argument of ``multiprocessing.Process``); in that process it receives.
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
        self._packing: Packing | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._theirs is None:
            raise RuntimeError("a transport can't be sent to another process once it is connected")
        kept = ("reader", "index", "number", "_theirs")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _board=None, _ours=None, _packing=None)

    # --- the sender

    def connect_sender(self) -> None:
        """From now on the receiver's end is the receiver's only: its death is noticed."""
        if self._theirs is not None:
            self._theirs.close()
            self._theirs = None

    def send_weights(self, weights: Any) -> None:
        """Puts weights up for this receiver, and doesn't wait until they are taken."""
        board = self._sending()
        given = weights_of(weights)
        if self._packing is None:
            self._packing = board.packing or Packing(given.tensors, given.tensors)
        matched = self._packing.match(given.tensors, "of the receiver")
        board.post(
            self._packing,
            writer(self._packing, matched),
            packed_extra(given.extra),
            None,
            [self.index],
        )
        self.notify()

    def send_weights_async(self, weights: Any) -> None:
        """The same: it never waits."""
        self.send_weights(weights)

    def notify(self) -> None:
        """Tells the receiver that something was put up."""
        if self._ours is not None:
            self._ours.ring()

    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits until the receiver has taken what was sent last.

        Raises:
            TimeoutError: if it does not in time.
            ConnectionError: if it has ended.
        """
        board = self._sending()
        deadline = None if timeout is None else time.monotonic() + timeout
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
        """From now on the sender's end is the sender's only: its death is noticed."""
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
        """Takes the newest weights; None if none came in time.

        Raises:
            ConnectionError: if the sender has ended, and what it sent was taken.
        """
        if not self.wait(timeout):
            return None
        into = model if model is not None else weights
        taken: list[Any] = []

        def use(posted: Posted) -> None:
            if posted.slot is None:
                return
            strategy_ = strategy or WeightStrategy()
            found = posted.copy()
            if into is not None:
                strategy_.apply_weights(into, found)
            taken.append(in_form(found, strategy_.extract_as))

        self.reader.take(use)
        self.send_ack()
        return taken[0] if taken else None

    def wait(self, timeout: float | None) -> bool:
        """Waits until there is something new; tells whether there is.

        Raises:
            ConnectionError: if the sender has ended.
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

    def send_ack(self) -> None:
        """Tells the sender that what was put up was taken."""
        if self._theirs is not None:
            self._theirs.ring()

    def close(self) -> None:
        """Closes the ends that are here."""
        for bell in (self._ours, self._theirs):
            if bell is not None:
                bell.close()


class MPTransport:
    """The way to a receiver by queues of the user's: ``multiprocessing.Queue``, for example.

    Args:
        weight_queue: takes weights to the receiver (``put`` and ``get``).
        ack_queue: takes the receiver's answers back, or None if there are none.
        timeout: seconds that are waited for weights or an answer, if a call names no others.
    """

    def __init__(self, weight_queue: Any, ack_queue: Any = None, timeout: float = 10.0) -> None:
        self.weight_queue = weight_queue
        self.ack_queue = ack_queue
        self.timeout = timeout

    def send_weights(self, weights: Any) -> None:
        """Sends a copy of the weights, and waits for the answer if there is a queue for that."""
        self.send_weights_async(weights)
        self.wait_ack()

    def send_weights_async(self, weights: Any) -> None:
        """Sends a copy of the weights."""
        given = weights_of(weights)
        copies = {name: t.detach().cpu().clone() for name, t in given.tensors.items()}
        self.weight_queue.put((copies, given.extra))

    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits for the receiver's answer.

        Raises:
            TimeoutError: if there is none in time.
        """
        if self.ack_queue is None:
            return
        limit = self.timeout if timeout is None else timeout
        try:
            self.ack_queue.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError(f"the receiver took no weights within {limit:g} s") from None

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> Any:
        """Takes the next weights; None if none came in time."""
        try:
            found = self.weight_queue.get(timeout=self.timeout if timeout is None else timeout)
        except queue.Empty:
            return None
        form = strategy or WeightStrategy()
        given = Weights(*found)
        into = model if model is not None else weights
        if into is not None:
            form.apply_weights(into, given)
        self.send_ack()
        return in_form(given, form.extract_as)

    def send_ack(self) -> None:
        """Tells the sender that weights were taken."""
        if self.ack_queue is not None:
            self.ack_queue.put(True)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()
