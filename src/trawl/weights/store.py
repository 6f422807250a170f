"""Shared memory in which one process publishes weights and others read them.

The memory has a header and slots. Each slot contains a complete set of weights. For each reader, a
word in the header names the slot with the reader's newest set. The writer fills a slot that no word
names and nobody reads, and then changes the words. A reader therefore sees the new set or the
previous one, never a mixture, and neither side waits for the other.

Readers and writers lock a slot with ``fcntl``, so the kernel releases the lock when a process
dies. The file is sparse: a slot that is never used takes no memory.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from mmap import PAGESIZE
from typing import Any, Protocol

from typing_extensions import override

from trawl.backends.memory import SharedMemory
from trawl.weights.layout import FlatLayout, ModuleWeights, Slot, Write
from trawl.weights.tensors import Weights, set_extra_state, unpacked_extra

Version = int | str | None

# Words of the header, all int64: sizes and offsets, then a record for each reader.
_TOTAL, _LAYOUT, _STRIDE, _FIRST = 0, 1, 2, 3
_RECORDS = 8
# Words of a record: the newest update, the count of updates when the reader last received one, and
# two version fields, which are used in turn.
_NEWEST, _RECEIVED, _VERSIONS = 0, 1, 2
_VERSION_WORDS = 15
_RECORD = _VERSIONS + 2 * _VERSION_WORDS
_VERSION_BYTES = _VERSION_WORDS * 8

# Bits of the word at ``_NEWEST``: the number of updates for this reader, then the slot of the last
# update.
_SLOT_BITS = 16
_NO_SLOT = (1 << _SLOT_BITS) - 1

# Room for extra state after the weights. Room that is not used takes no memory.
_EXTRA_ROOM = 1 << 20

# ``fcntl`` locks exclude only other processes. This lock excludes other threads of this process.
# It is reentrant, so that a reader may publish to its own store from within ``receive``.
_here = threading.RLock()


def _forget_lock() -> None:
    # Another thread of the parent may have held the lock.
    global _here
    _here = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)


@dataclass(frozen=True)
class WeightUpdate:
    """Weights and their version, in the form in which a receiver gets them.

    Attributes:
        count: number of updates for this receiver, including this one.
        version: version of the weights; None if versions are not tracked.
        slot: the weights; None if only the version is new.
        extra: extra state, pickled.
        since: number of the newest update that the receiver had before.
    """

    count: int
    version: Version = None
    slot: Slot | None = None
    extra: bytes = b""
    since: int = 0

    @property
    def newest(self) -> int:
        """Number of the newest update that the receiver has once it has received this one."""
        return self.since if self.slot is None else max(self.slot.newest, self.since)

    def copy(self) -> Weights:
        """Returns copies of the weights that are newer than the receiver's."""
        if self.slot is None:
            return Weights({})
        copies = {name: tensor.clone() for name, tensor in self.slot.named(self.since).items()}
        return Weights(copies, self._extra_state(self.slot))

    def load(self, module: ModuleWeights) -> None:
        """Loads the weights that are newer than the receiver's into a module."""
        if self.slot is not None:
            module.load_slot(self.slot, self.since)
            set_extra_state(module.module, self._extra_state(self.slot))

    def _extra_state(self, slot: Slot) -> dict[str, Any]:
        return unpacked_extra(self.extra) if slot.extra_number > self.since else {}


class Receiver(Protocol):
    """Source of new weights for a worker.

    Attributes:
        count: number of updates that the worker has received, including those that newer updates
            replaced.
    """

    count: int

    @property
    def newer(self) -> bool:
        """True if there is an update that has not been received. Checked before each batch."""

    def receive(self, use: Callable[[WeightUpdate], None]) -> WeightUpdate:
        """Receives and returns the newest update.

        Args:
            use: function to call with the update, which can't change during the call.
        """


class Store(ABC):
    """The newest weights of each receiver of a scheme, where the receivers find them."""

    def __init__(self) -> None:
        self._updates = 0

    @abstractmethod
    def reader(self, index: int) -> Receiver:
        """Returns a receiver's side, which can be sent to another process."""

    @abstractmethod
    def count(self, index: int) -> int:
        """Returns the number of updates for a receiver."""

    @abstractmethod
    def newest(self, index: int) -> Weights | None:
        """Returns a copy of a receiver's newest weights; None before the first weights."""

    def check(self, layout: FlatLayout, extra: bytes) -> None:  # noqa: B027 (most take all weights)
        """Rejects weights that can't be published.

        Raises:
            ValueError: if they can't.
        """

    def publish(
        self,
        layout: FlatLayout,
        write: Write,
        extra: bytes,
        version: Version,
        readers: Iterable[int],
    ) -> None:
        """Publishes weights. Missing tensors are copied from each receiver's previous weights.

        Args:
            layout: layout of the weights.
            write: function that fills a slot.
            extra: extra state, pickled; empty to keep the previous one.
            version: version of the weights.
            readers: receivers that get the weights.
        """
        self._updates += 1
        left = list(readers)
        while left:
            before = self._held(left[0])
            filled, complete = self._fill(layout, write, extra, before)
            alike = [i for i in left if complete or self._held(i) == before]
            self._announce(alike, version, filled)
            left = [i for i in left if i not in alike]

    @abstractmethod
    def publish_version(self, version: Version, readers: Iterable[int]) -> None:
        """Publishes the current weights of receivers under another version."""

    @abstractmethod
    def _held(self, index: int) -> Any:
        """Returns the place of a receiver's newest weights."""

    @abstractmethod
    def _fill(
        self, layout: FlatLayout, write: Write, extra: bytes, before: Any
    ) -> tuple[Any, bool]:
        """Fills a new place; returns it, and True if it needs nothing from ``before``."""

    @abstractmethod
    def _announce(self, readers: Sequence[int], version: Version, filled: Any) -> None:
        """Tells receivers of a place with new weights."""

    def _fill_slot(
        self, slot: Slot, write: Write, extra: bytes, kept: bytes, old: Callable[[], Slot] | None
    ) -> tuple[bytes, bool]:
        """Fills a slot with new weights, and with those of another slot that are missing.

        Args:
            slot: the slot.
            write: function that fills the slot.
            extra: the new extra state, pickled; or empty.
            kept: extra state of the other slot.
            old: function that returns the other slot; None if there is none.

        Returns:
            The extra state for the slot, and True if nothing came from the other slot.
        """
        write(slot, self._updates)
        slot.extra_number = self._updates if extra else 0
        complete = slot.complete and bool(extra or not kept)
        if not complete and old is not None:
            slot.complete_by(old())
        return extra or kept, complete


class WeightStore(Store):
    """Writer's side of the shared memory.

    Args:
        readers: number of readers.
    """

    def __init__(self, readers: int) -> None:
        super().__init__()
        self.readers = readers
        self._header = SharedMemory.new(_pages((_RECORDS + readers * _RECORD) * 8))
        self._words = memoryview(self._header.buffer).cast("q")
        for index in range(readers):
            self._words[_at(index)] = _NO_SLOT
        self._file: _File | None = None
        self._layout: FlatLayout | None = None

    @override
    def reader(self, index: int) -> StoreReader:
        return StoreReader(self._header, index)

    @property
    def layout(self) -> FlatLayout | None:
        """Layout of the weights; None before the first weights."""
        return None if self._file is None else self._file.layout

    @override
    def count(self, index: int) -> int:
        return self._words[_at(index)] >> _SLOT_BITS

    def received(self, index: int) -> int:
        """Returns the number of updates sent to a reader up to the last one that it received."""
        return self._words[_at(index) + _RECEIVED]

    @override
    def publish(
        self,
        layout: FlatLayout,
        write: Write,
        extra: bytes,
        version: Version,
        readers: Iterable[int],
    ) -> None:
        """Publishes weights. Missing tensors are copied from each receiver's previous weights.

        Args:
            layout: layout of the weights, which must be the same in all calls.
            write: function that fills a slot.
            extra: extra state, pickled; empty to keep the previous one.
            version: version of the weights.
            readers: receivers that get the weights.

        Raises:
            ValueError: for the reasons given in :meth:`check`, or if the version is too long.
            RuntimeError: if no slot is free, because readers are still reading.
        """
        _version_record(version)  # raises an error before anything has changed
        with _here:
            self.check(layout, extra)
            if self._file is None:
                self._file = _File.make(self._header, layout, self.readers, len(extra))
                self._layout = layout
            super().publish(layout, write, extra, version, readers)

    @override
    def check(self, layout: FlatLayout, extra: bytes) -> None:
        """Rejects weights that can't be published.

        Raises:
            ValueError: if the layout differs from that of the first weights, or the extra state
                is larger than the room for it.
        """
        if self._file is None:
            return
        if layout is not self._layout and layout != self._file.layout:
            raise ValueError(
                "these weights have other names, shapes or dtypes than the weights that were "
                "sent before, or the same in another order"
            )
        if len(extra) > self._file.extra_room:
            raise ValueError(
                f"the policy's extra state has grown to {len(extra)} bytes, but only "
                f"{self._file.extra_room} bytes were reserved for it at first"
            )

    @override
    def _fill(
        self, layout: FlatLayout, write: Write, extra: bytes, before: int
    ) -> tuple[int, bool]:
        file = self._file
        assert file is not None
        number = self._free(file)
        kept, old = b"", None
        if before != _NO_SLOT:
            kept, old = b"" if extra else file.extra(before), partial(file.slot, before)
        try:
            more, complete = self._fill_slot(file.slot(number), write, extra, kept, old)
            file.put_extra(number, more)
        finally:
            file.unlock(number)
        return number, complete

    @override
    def publish_version(self, version: Version, readers: Iterable[int]) -> None:
        with _here:
            for index in readers:
                self._announce([index], version, self._held(index))

    @override
    def newest(self, index: int) -> Weights | None:
        with _here:
            number = self._held(index)
            if self._file is None or number == _NO_SLOT:
                return None
            # The slot needs no lock: only this process writes, and never without ``_here``.
            slot, extra = self._file.slot(number), self._file.extra(number)
            return WeightUpdate(0, None, slot, extra).copy()

    @override
    def _held(self, index: int) -> int:
        return self._words[_at(index)] & _NO_SLOT

    def _free(self, file: _File) -> int:
        """Locks a slot that may be overwritten, and returns its number.

        No reader is reading this slot, and it is not the newest slot of any reader.
        """
        newest = {self._held(index) for index in range(self.readers)}
        for number in range(file.slots):
            if number not in newest and file.lock(number, fcntl.LOCK_EX):
                return number
        raise RuntimeError(
            "a reader is still holding each slot for weights: was a worker stopped by SIGSTOP?"
        )

    @override
    def _announce(self, readers: Sequence[int], version: Version, filled: int) -> None:
        record = _version_record(version)
        for index in readers:
            at = _at(index)
            count = (self._words[at] >> _SLOT_BITS) + 1
            # The reader may be reading the other version field.
            first = (at + _VERSIONS + (count % 2) * _VERSION_WORDS) * 8
            self._header.buffer[first : first + _VERSION_BYTES] = record
            self._words[at] = count << _SLOT_BITS | filled


class StoreReader:
    """Reader's side of the memory, which can be sent to a process that is being started.

    Args:
        header: the store's header.
        index: number of this reader.

    Attributes:
        count: number of updates that had been sent to this reader when it last received one.
    """

    def __init__(self, header: SharedMemory, index: int) -> None:
        self.index = index
        self.count = 0
        self._header = header
        self._words = memoryview(header.buffer).cast("q")
        self._at = _at(index)
        self._seen = _NO_SLOT
        self._since = 0
        self._file: _File | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return StoreReader, (self._header, self.index)

    @property
    def newer(self) -> bool:
        """True if there is an update that has not been received yet."""
        return self._words[self._at] != self._seen

    def receive(self, use: Callable[[WeightUpdate], None]) -> WeightUpdate:
        """Receives the newest update, and returns it.

        Args:
            use: function to call with the update, which can't change during the call.
        """
        with _here:
            update = None
            while update is None:
                update = self._read(self._words[self._at], use)
        return update

    def _read(self, word: int, use: Callable[[WeightUpdate], None]) -> WeightUpdate | None:
        """Receives the update that a word names; returns None if the word has changed since."""
        count, number = word >> _SLOT_BITS, word & _NO_SLOT
        file = self._opened() if number != _NO_SLOT else None
        if file is not None and not file.lock(number, fcntl.LOCK_SH):
            # The slot is being written, so it is no longer the newest.
            return None
        try:
            first = (self._at + _VERSIONS + (count % 2) * _VERSION_WORDS) * 8
            record = self._header.buffer[first : first + _VERSION_BYTES]
            if self._words[self._at] != word:
                return None
            slot, extra = (None, b"") if file is None else (file.slot(number), file.extra(number))
            update = WeightUpdate(count, _read_version(record), slot, extra, self._since)
            use(update)
            self._since = update.newest
        finally:
            if file is not None:
                file.unlock(number)
        self._seen, self.count = word, count
        self._words[self._at + _RECEIVED] = count
        return update

    def _opened(self) -> _File:
        if self._file is None:
            self._file = _File(self._header)
        return self._file


class _File:
    """Memory of a store, once the first weights have determined its size."""

    def __init__(self, header: SharedMemory) -> None:
        words = memoryview(header.buffer).cast("q")
        self._memory = SharedMemory(os.dup(header.fd), words[_TOTAL])
        self._stride, self._first = words[_STRIDE], words[_FIRST]
        self.slots = (self._memory.nbytes - self._first) // self._stride
        start = header.nbytes
        self.layout: FlatLayout = pickle.loads(self._memory.buffer[start : start + words[_LAYOUT]])
        self._slots: dict[int, Slot] = {}
        #: Bytes that a slot has for extra state.
        self.extra_room = self._stride - _pages(self.layout.nbytes) - 8

    @classmethod
    def make(cls, header: SharedMemory, layout: FlatLayout, readers: int, extra: int) -> _File:
        """Lays out the memory.

        A reader may be reading one slot while another is its newest. The memory therefore has two
        slots for each reader, and two more.
        """
        pickled = pickle.dumps(layout)
        first = header.nbytes + _pages(len(pickled))
        stride = _pages(layout.nbytes) + _pages(8 + 4 * extra + _EXTRA_ROOM)
        total = first + stride * (2 * readers + 2)
        os.ftruncate(header.fd, total)
        os.pwrite(header.fd, pickled, header.nbytes)
        words = memoryview(header.buffer).cast("q")
        words[_LAYOUT], words[_STRIDE], words[_FIRST] = len(pickled), stride, first
        words[_TOTAL] = total
        return cls(header)

    def slot(self, number: int) -> Slot:
        """Returns the weights in a slot."""
        if number not in self._slots:
            start = self._first + number * self._stride
            buffer = memoryview(self._memory.buffer)[start : start + self.layout.nbytes]
            self._slots[number] = Slot(self.layout, buffer)
        return self._slots[number]

    def extra(self, number: int) -> bytes:
        """Returns the extra state in a slot."""
        start = self._extra_at(number)
        size = int.from_bytes(self._memory.buffer[start : start + 8], "little")
        return self._memory.buffer[start + 8 : start + 8 + size]

    def put_extra(self, number: int, extra: bytes) -> None:
        """Writes extra state to a slot."""
        start = self._extra_at(number)
        self._memory.buffer[start : start + 8 + len(extra)] = (
            len(extra).to_bytes(8, "little") + extra
        )

    def _extra_at(self, number: int) -> int:
        return self._first + number * self._stride + _pages(self.layout.nbytes)

    def lock(self, number: int, how: int) -> bool:
        """Tries to lock a slot without waiting; returns True on success."""
        try:
            fcntl.lockf(self._memory.fd, how | fcntl.LOCK_NB, 1, number)
        except OSError:
            return False
        return True

    def unlock(self, number: int) -> None:
        """Unlocks a slot."""
        fcntl.lockf(self._memory.fd, fcntl.LOCK_UN, 1, number)


def _at(index: int) -> int:
    return _RECORDS + index * _RECORD


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGESIZE) * PAGESIZE


def _version_record(version: Version) -> bytes:
    kind = "n" if version is None else "i" if isinstance(version, int) else "s"
    text = f"{kind}{'' if version is None else version}".encode()
    if len(text) >= _VERSION_BYTES:
        raise ValueError(
            f"a policy version may have at most {_VERSION_BYTES - 2} bytes, but {version!r} has "
            f"{len(text) - 1}"
        )
    return bytes([len(text)]) + text.ljust(_VERSION_BYTES - 1, b"\0")


def _read_version(record: bytes) -> Version:
    text = record[1 : 1 + record[0]].decode()
    if text[:1] == "i":
        return int(text[1:])
    return text[1:] if text[:1] == "s" else None
