"""A board in shared memory on which one process puts up weights, and others read them.

The board has a header, and slots that each hold a whole set of weights. A word in the header
tells each reader which slot is its newest. Weights are put up in a slot that no word names and
nobody reads; then the words are changed. So a reader has a whole set or the one before, the
writer never waits for readers, and readers never for the writer.

Who reads or writes a slot has a lock on it (``fcntl``), which the system takes back from a
process that dies. A slot that is never used takes no memory: the file is sparse.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any

from trawl.backends.memory import SharedMemory
from trawl.weight_update.packing import Packing, Slot, Write
from trawl.weight_update.tensors import Weights, unpacked_extra

Version = int | str | None

# Words of the header, all int64: where things are, then a record for each reader.
_TOTAL, _PACKING, _STRIDE, _FIRST = 0, 1, 2, 3
_RECORDS = 8
# A record: the newest; what was taken; two places for a version, used in turn.
_NEWEST, _TAKEN, _VERSIONS = 0, 1, 2
_VERSION_WORDS = 15
_RECORD = _VERSIONS + 2 * _VERSION_WORDS
_VERSION_BYTES = _VERSION_WORDS * 8

# A word of a record: how many were put up for this reader, and the slot of the last.
_SLOT_BITS = 16
_NO_SLOT = (1 << _SLOT_BITS) - 1

# Room behind the weights for what modules have beside tensors. Memory is used as it is needed.
_EXTRA_ROOM = 1 << 20

# Bytes before it, for the number of the update that brought it.
_STAMP = 8

# Locks of ``fcntl`` are between processes; within this one there is this.
# Who passes on what it takes puts it up on a board of its own.
_here = threading.RLock()


def _forget_lock() -> None:
    # Another thread of the parent may have had it.
    global _here
    _here = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)


@dataclass(frozen=True)
class Posted:
    """What was put up.

    Attributes:
        count: how many were put up for this reader, with this.
        version: the version, if there are such.
        slot: the weights, or None if there are none yet.
        extra: extra state, pickled.
        extra_update: the number of the update that brought it.
        since: the number of the update that the reader had taken before.
    """

    count: int
    version: Version
    slot: Slot | None
    extra: bytes
    extra_update: int = 0
    since: int = 0

    @property
    def update(self) -> int:
        """The number of the update that the reader has with this."""
        return self.since if self.slot is None else max(self.slot.update, self.since)

    def extra_state(self) -> dict[str, Any]:
        """The extra state that is newer than what the reader had."""
        return unpacked_extra(self.extra) if self.extra_update > self.since else {}

    def copy(self) -> Weights:
        """What is newer than what the reader had; it stays as it is when others are put up."""
        named = {} if self.slot is None else self.slot.named(self.since)
        copies = {name: tensor.clone() for name, tensor in named.items()}
        return Weights(copies, self.extra_state())


def stamped(extra: bytes, update: int) -> bytes:
    """Extra state with the number of the update that brings it; nothing for none."""
    return update.to_bytes(_STAMP, "little") + extra if extra else b""


def unstamped(extra: bytes) -> tuple[bytes, int]:
    """Extra state, and the number of the update that brought it."""
    return extra[_STAMP:], int.from_bytes(extra[:_STAMP], "little")


class Board:
    """The writer's side.

    Args:
        readers: how many there are.
    """

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self._header = SharedMemory.new(_pages((_RECORDS + readers * _RECORD) * 8))
        self._words = memoryview(self._header.buffer).cast("q")
        for index in range(readers):
            self._words[_at(index)] = _NO_SLOT
        self._file: _File | None = None
        self._packing: Packing | None = None
        self._posts = 0

    def reader(self, index: int) -> Reader:
        """The side of a reader; it can be sent to another process."""
        return Reader(self._header, index)

    @property
    def packing(self) -> Packing | None:
        """How weights are packed; None before there were any."""
        return None if self._file is None else self._file.packing

    def count(self, index: int) -> int:
        """How many were put up for a reader."""
        return self._words[_at(index)] >> _SLOT_BITS

    def taken(self, index: int) -> int:
        """How many were put up for a reader when it last took them."""
        return self._words[_at(index) + _TAKEN]

    def post(
        self,
        packing: Packing,
        write: Write,
        extra: bytes,
        version: Version,
        readers: Iterable[int],
    ) -> None:
        """Puts weights up. What is missing is as in the last ones that a reader had.

        Args:
            packing: how they are packed: always the same.
            write: fills a slot.
            extra: extra state, pickled; empty if it is missing.
            version: the version.
            readers: for whom.

        Raises:
            ValueError: as :meth:`check`.
        """
        record = _version_record(version)
        with _here:
            self.check(packing, extra)
            self._posts += 1
            if self._file is None:
                self._file = _File.make(self._header, packing, self.readers, len(extra))
                self._packing = packing
            left = list(readers)
            while left:
                before = self._newest(left[0])
                number, complete = self._fill(self._file, write, extra, before)
                alike = [i for i in left if complete or self._newest(i) == before]
                for index in alike:
                    self._tell(index, record, number)
                left = [i for i in left if i not in alike]

    def check(self, packing: Packing, extra: bytes) -> None:
        """Refuses what can't be put up.

        Raises:
            ValueError: if weights are packed in another way than those before, or extra state
                takes more than there is room for.
        """
        if self._file is None:
            return
        if packing is not self._packing and packing != self._file.packing:
            raise ValueError(
                "these weights have other names, shapes or dtypes than those that were sent "
                "before, or the same in another order"
            )
        room = self._file.extra_room - _STAMP
        if len(extra) > room:
            raise ValueError(
                f"the policy's extra state takes {len(extra)} bytes, but at first it was so small "
                f"that only {room} were set aside for it"
            )

    def _fill(self, file: _File, write: Write, extra: bytes, before: int) -> tuple[int, bool]:
        """Fills a slot; gives its number, and whether that needed nothing of the one before."""
        number = self._free(file)
        slot = file.slot(number)
        try:
            write(slot, self._posts)
            more = b"" if extra or before == _NO_SLOT else file.extra(before)
            complete = slot.complete and not more
            if not slot.complete and before != _NO_SLOT:
                slot.complete_by(file.slot(before))
            file.put_extra(number, stamped(extra, self._posts) or more)
        finally:
            file.unlock(number)
        return number, complete

    def post_version(self, version: Version, readers: Iterable[int]) -> None:
        """Puts up the weights that are there already, under another version."""
        record = _version_record(version)
        with _here:
            for index in readers:
                self._tell(index, record, self._newest(index))

    def newest(self, index: int) -> Weights | None:
        """Returns a copy of the newest weights of a reader; None before the first."""
        with _here:
            number = self._newest(index)
            if self._file is None or number == _NO_SLOT:
                return None
            # Only this process writes, and not while it has the lock.
            slot, extra = self._file.slot(number), self._file.extra(number)
            return Posted(0, None, slot, *unstamped(extra)).copy()

    def _newest(self, index: int) -> int:
        return self._words[_at(index)] & _NO_SLOT

    def _free(self, file: _File) -> int:
        """A slot that is nobody's newest, and that nobody reads; locked."""
        newest = {self._newest(index) for index in range(self.readers)}
        for number in range(file.slots):
            if number not in newest and file.lock(number, fcntl.LOCK_EX):
                return number
        raise RuntimeError("all slots of the board are being read: who reads has forgotten to end")

    def _tell(self, index: int, record: bytes, slot: int) -> None:
        at = _at(index)
        count = (self._words[at] >> _SLOT_BITS) + 1
        # The place that the reader may be reading from is the other one.
        first = (at + _VERSIONS + (count % 2) * _VERSION_WORDS) * 8
        self._header.buffer[first : first + _VERSION_BYTES] = record
        self._words[at] = count << _SLOT_BITS | slot


class Reader:
    """A reader's side; it can be sent to another process while that is started.

    Args:
        header: the board's header.
        index: which reader this is.

    Attributes:
        count: how many had been put up for it when it last took them.
    """

    def __init__(self, header: SharedMemory, index: int) -> None:
        self.index = index
        self.count = 0
        self._header = header
        self._words = memoryview(header.buffer).cast("q")
        self._at = _at(index)
        self._seen = _NO_SLOT
        self._update = 0
        self._file: _File | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return Reader, (self._header, self.index)

    @property
    def newer(self) -> bool:
        """Whether something was put up that was not taken."""
        return self._words[self._at] != self._seen

    def take(self, use: Callable[[Posted], None]) -> Posted:
        """Takes the newest.

        Args:
            use: is called with it, while it can't change.
        """
        with _here:
            while True:
                word = self._words[self._at]
                if self._take(word, use):
                    break
        return self._posted

    def _take(self, word: int, use: Callable[[Posted], None]) -> bool:
        """Takes what a word names; tells whether it was still there."""
        count, number = word >> _SLOT_BITS, word & _NO_SLOT
        file = self._opened() if number != _NO_SLOT else None
        if file is not None and not file.lock(number, fcntl.LOCK_SH):
            # It is being written to: so it is not the newest any more.
            return False
        try:
            record = self._version_record(count)
            if self._words[self._at] != word:
                return False
            version = _read_version(record)
            slot, extra = (None, b"") if file is None else (file.slot(number), file.extra(number))
            self._posted = Posted(count, version, slot, *unstamped(extra), self._update)
            use(self._posted)
            self._update = self._posted.update
        finally:
            if file is not None:
                file.unlock(number)
        self._seen, self.count = word, count
        self._words[self._at + _TAKEN] = count
        return True

    def _version_record(self, count: int) -> bytes:
        first = (self._at + _VERSIONS + (count % 2) * _VERSION_WORDS) * 8
        return self._header.buffer[first : first + _VERSION_BYTES]

    def _opened(self) -> _File:
        if self._file is None:
            self._file = _File(self._header)
        return self._file


class _File:
    """The board's memory, once it is known how much it needs."""

    def __init__(self, header: SharedMemory) -> None:
        words = memoryview(header.buffer).cast("q")
        self._memory = SharedMemory(os.dup(header.fd), words[_TOTAL])
        self._stride, self._first = words[_STRIDE], words[_FIRST]
        self.slots = (self._memory.nbytes - self._first) // self._stride
        start = header.nbytes
        self.packing: Packing = pickle.loads(self._memory.buffer[start : start + words[_PACKING]])
        self._slots: dict[int, Slot] = {}

    @classmethod
    def make(cls, header: SharedMemory, packing: Packing, readers: int, extra: int) -> _File:
        """Lays the memory out: a slot for each reader's newest, for what each reads, and more."""
        pickled = pickle.dumps(packing)
        first = header.nbytes + _pages(len(pickled))
        stride = _pages(packing.nbytes) + _pages(8 + 4 * extra + _EXTRA_ROOM)
        total = first + stride * (2 * readers + 2)
        os.ftruncate(header.fd, total)
        os.pwrite(header.fd, pickled, header.nbytes)
        words = memoryview(header.buffer).cast("q")
        words[_PACKING], words[_STRIDE], words[_FIRST] = len(pickled), stride, first
        words[_TOTAL] = total
        return cls(header)

    def slot(self, number: int) -> Slot:
        """The weights in a slot."""
        if number not in self._slots:
            start = self._first + number * self._stride
            buffer = memoryview(self._memory.buffer)[start : start + self.packing.nbytes]
            self._slots[number] = Slot(self.packing, buffer)
        return self._slots[number]

    def extra(self, number: int) -> bytes:
        """The extra state in a slot."""
        start = self._extra_at(number)
        size = int.from_bytes(self._memory.buffer[start : start + 8], "little")
        return self._memory.buffer[start + 8 : start + 8 + size]

    @property
    def extra_room(self) -> int:
        """Bytes of extra state for which there is room."""
        return self._stride - _pages(self.packing.nbytes) - 8

    def put_extra(self, number: int, extra: bytes) -> None:
        """Puts extra state into a slot."""
        start = self._extra_at(number)
        self._memory.buffer[start : start + 8 + len(extra)] = (
            len(extra).to_bytes(8, "little") + extra
        )

    def _extra_at(self, number: int) -> int:
        return self._first + number * self._stride + _pages(self.packing.nbytes)

    def lock(self, number: int, how: int) -> bool:
        """Locks a slot, if that can be done at once."""
        try:
            fcntl.lockf(self._memory.fd, how | fcntl.LOCK_NB, 1, number)
        except OSError:
            return False
        return True

    def unlock(self, number: int) -> None:
        """Ends a lock."""
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
            f"a policy version may have {_VERSION_BYTES - 2} bytes, but {version!r} has "
            f"{len(text) - 1}"
        )
    return bytes([len(text)]) + text.ljust(_VERSION_BYTES - 1, b"\0")


def _read_version(record: bytes) -> Version:
    text = record[1 : 1 + record[0]].decode()
    if text[:1] == "i":
        return int(text[1:])
    return text[1:] if text[:1] == "s" else None
