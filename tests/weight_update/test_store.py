"""A store in shared memory: readers have the newest set, whole, and nobody waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from weight_parts import PATIENCE, Uniform, as_sent, numbers, other

from trawl.weights.layout import FlatLayout, ModuleWeights, Slot
from trawl.weights.store import StoreReader, WeightStore, WeightUpdate

WEIGHTS = {"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": torch.zeros((), dtype=torch.int64)}
LAYOUT = FlatLayout(WEIGHTS, ["a"])


def writes(given: dict[str, float]) -> Callable[[Slot, int], None]:
    """Fills a slot with numbers, by name."""
    tensors = {name: torch.full_like(WEIGHTS[name], number) for name, number in given.items()}
    return lambda slot, update: slot.put(LAYOUT.match(tensors, "of the test"), update)


def post(store: WeightStore, given: dict[str, float], version: Any, readers: Any) -> None:
    store.publish(LAYOUT, writes(given), b"", version, readers)


def taken(reader: StoreReader) -> tuple[int, Any, dict[str, float] | None]:
    """What a reader takes: how many there were, version, and numbers by name."""
    found: list[Any] = []

    def use(posted: WeightUpdate) -> None:
        named = None if posted.slot is None else posted.slot.named()
        found.append(named and {name: tensor.unique().item() for name, tensor in named.items()})

    posted = reader.receive(use)
    return posted.count, posted.version, found[0]


def whole(number: float) -> dict[str, float]:
    return dict.fromkeys(WEIGHTS, number)


def one_reader() -> tuple[WeightStore, StoreReader]:
    """A store with a first set of weights, and its reader."""
    store = WeightStore(1)
    post(store, whole(1), 1, [0])
    return store, store.reader(0)


class MemoryInUse:
    """Counts the bytes of shared memory that this process got since this was made."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._known = self._found()

    def _found(self) -> dict[int, int]:
        found = {}
        for entry in os.scandir("/proc/self/fd"):
            if entry.is_symlink() and "memfd:trawl" in os.readlink(entry.path):
                status = os.fstat(int(entry.name))
                if status.st_ino not in self._known:
                    found[status.st_ino] = 512 * status.st_blocks
        return found

    def __call__(self) -> int:
        return sum(self._found().values())


# --- any sequence of calls


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[Any]]:
    """A number of readers, and what happens."""
    readers = draw(st.integers(1, 4))
    some = st.lists(st.integers(0, readers - 1), min_size=1, unique=True)
    posts = st.tuples(st.just("post"), some, st.sets(st.sampled_from("bc")))
    versions = st.tuples(st.just("version"), some, st.none())
    takes = st.tuples(st.just("take"), some, st.none())
    return readers, draw(st.lists(st.one_of(posts, versions, takes), max_size=25))


@given(histories())
def test_each_reader_takes_the_newest_that_was_put_up_for_it(history):
    count, calls = history
    store = WeightStore(count)
    readers = [as_sent(store.reader(i)) if i % 2 else store.reader(i) for i in range(count)]
    newest: list[Any] = [(0, None, None)] * count
    seen = [0] * count
    for number, (call, chosen, some) in enumerate(calls):
        if call == "take":
            for index in chosen:
                assert taken(readers[index]) == newest[index]
                seen[index] = newest[index][0]
                assert readers[index].count == store.received(index) == seen[index]
        elif call == "post":
            given = dict.fromkeys(("a", *sorted(some)), number)
            post(store, given, number, chosen)
            for index in chosen:
                last, _, had = newest[index]
                newest[index] = last + 1, number, {**(had or {}), **given}
        else:
            store.publish_version(number, chosen)
            for index in chosen:
                newest[index] = newest[index][0] + 1, number, newest[index][2]
        for index in range(count):
            assert store.count(index) == newest[index][0]
            assert readers[index].newer == (newest[index][0] != seen[index])
            copied = store.newest(index)
            assert (copied is None) == (newest[index][2] is None)
            assert copied is None or newest[index][2] == {
                name: tensor.unique().item() for name, tensor in copied.tensors.items()
            }
    for index in range(count):
        assert taken(readers[index]) == newest[index]


def test_versions_come_back_as_they_were_given():
    store, reader = one_reader()
    for version in (
        None,
        0,
        1,
        -1,
        2**62,
        10**100,
        "",
        "x",
        "12a5f9c4-8d",
        "é" * 59,
        "n",
        "i1",
        "s",
    ):
        post(store, whole(1), version, [0])
        assert taken(reader)[1:] == (version, whole(1))
        store.publish_version(version, [0])
        assert taken(reader)[1:] == (version, whole(1))


@pytest.mark.parametrize("version", ["x" * 119, "é" * 60, 10**119])
def test_a_version_that_is_too_long_is_refused_and_nothing_is_put_up(version):
    store, reader = one_reader()
    for call in (
        lambda: post(store, whole(2), version, [0]),
        lambda: store.publish_version(version, [0]),
    ):
        with pytest.raises(
            ValueError, match=r"version may have at most 118 bytes, but .* has 1(19|20)$"
        ):
            call()
    assert taken(reader) == (1, 1, whole(1))


@pytest.mark.parametrize("extra", [b"", b"x", bytes(10_000)])
def test_extra_state_is_of_the_same_set(extra):
    store = WeightStore(2)
    readers = [store.reader(0), as_sent(store.reader(1))]
    # Without extra state there is that of the set before.
    for data, found in ((extra, extra), (b"shorter",) * 2, (b"", b"shorter"), (b"more",) * 2):
        store.publish(LAYOUT, writes(whole(1)), data, None, [0, 1])
        assert [reader.receive(str).extra for reader in readers] == [found] * 2
    # Of each reader, if they had different ones.
    for index in range(2):
        store.publish(LAYOUT, writes(whole(2)), bytes([index]), None, [index])
    store.publish(LAYOUT, writes(whole(3)), b"", None, [0, 1])
    assert [reader.receive(str).extra for reader in readers] == [b"\0", b"\1"]


def test_what_is_refused_or_fails_is_not_put_up():
    def fail(slot: Slot, update: int) -> None:
        slot.put(LAYOUT.match({"a": torch.ones(3)}, ""))
        raise ZeroDivisionError

    store, reader = one_reader()
    store.publish(LAYOUT, writes(whole(2)), bytes(1 << 20), 2, [0])
    assert taken(reader) == (2, 2, whole(2))
    with pytest.raises(ValueError, match=r"extra state has grown to 4194304 bytes, but only \d+ b"):
        store.publish(LAYOUT, writes(whole(3)), bytes(1 << 22), 3, [0])
    with pytest.raises(
        ValueError, match="other names, shapes or dtypes than the weights that were"
    ):
        store.publish(FlatLayout(WEIGHTS, []), writes(whole(3)), b"", 3, [0])
    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            store.publish(LAYOUT, fail, b"", 3, [0])
    assert not reader.newer
    assert taken(reader) == (2, 2, whole(2))


def test_what_a_reader_fails_to_use_stays_new():
    store, reader = one_reader()
    with pytest.raises(ZeroDivisionError):
        reader.receive(lambda posted: 1 // 0)
    assert reader.newer
    assert store.received(0) == 0
    for number in range(10):
        post(store, whole(number), number, [0])
    assert taken(reader) == (11, 9, whole(9))


@pytest.mark.parametrize(
    ("of_others", "found"), [(0, (3, 3, whole(3))), (1, (2, 2, whole(2)))], ids=["own", "others"]
)
def test_a_reader_that_comes_late_to_a_slot_takes_what_is_newest(of_others, found):
    """By then, the slot has a later set, or one of another reader."""
    store = WeightStore(2)
    post(store, whole(1), 1, [0])
    reader = store.reader(0)
    file = reader._opened()
    lock, left = file.lock, [(2, 0), (3, of_others)]

    def late(*given: int) -> bool:
        while left:
            number, index = left.pop(0)
            post(store, whole(number), number, [index])
        return lock(*given)

    file.lock = late
    assert taken(reader) == found
    assert not reader.newer


def test_a_copy_has_what_is_newer_than_the_readers():
    store, reader = one_reader()
    for named in (whole(1), {"a": 2}, {"a": 3, "c": 3}):
        post(store, named, None, [0])
        copies: list[Any] = []
        reader.receive(lambda update: copies.append(update.copy()))  # noqa: B023 - called at once
        assert set(copies[0].tensors) == set(named)


# --- other processes and threads


def hold(connection: Any, reader: StoreReader) -> None:
    """Takes weights, and keeps them until it is told to go on; then takes the newest."""

    def use(posted: WeightUpdate) -> None:
        named = posted.slot.named()
        connection.send(numbers(named))
        connection.recv()
        connection.send(numbers(named))

    reader.receive(use)
    connection.send(taken(reader))


def test_what_readers_hold_does_not_change_and_the_writer_waits_for_none_of_them():
    store = WeightStore(3)
    post(store, whole(0), 0, [0, 1, 2])
    with (
        other(hold, store.reader(0)) as first,
        other(hold, store.reader(1)) as second,
        other(hold, store.reader(2)) as third,
    ):
        readers = [first, second, third]
        assert all(reader.hear() == {0} for reader in readers)
        for number in range(1, 31):
            post(store, whole(number), number, [number % 3])
        assert [store.received(index) for index in range(3)] == [0, 0, 0]
        assert [reader.ask("go on") for reader in readers] == [{0}] * 3
        newest = [reader.hear() for reader in readers]
        assert newest == [(11, n, whole(n)) for n in (30, 28, 29)]
        assert [store.received(index) for index in range(3)] == [11] * 3


def test_a_reader_that_is_killed_while_it_reads_is_in_nobodys_way():
    store = WeightStore(1)
    post(store, whole(0), 0, [0])
    # More often than there are slots.
    for number in range(1, 6):
        with other(hold, store.reader(0)) as reader:
            assert reader.hear() == {number - 1}
            reader.kill()
        post(store, whole(number), number, [0])
    assert taken(store.reader(0)) == (6, 5, whole(5))


SIZES = (5, 20_000, 1, 300)


def read(connection: Any, reader: StoreReader, model: nn.Module) -> None:
    """Takes weights whenever there are new ones, until the last version; says what was wrong."""
    live, wrong, version = ModuleWeights(model), [], 0
    connection.send("ready")
    last = connection.recv()

    def use(posted: WeightUpdate) -> None:
        live.load(posted.slot.tensors())
        found = numbers(posted.slot.named()) | model.numbers
        if found != {posted.version} or posted.extra != str(posted.version).encode():
            wrong.append((posted.version, found, posted.extra))

    while version != last:
        if reader.newer:
            now = reader.receive(use).version
            assert now > version
            version = now
    connection.send(wrong)


def test_no_reader_has_two_versions_in_one_set_while_they_are_put_up_all_the_time():
    model = Uniform(0, SIZES)
    live, last, store = ModuleWeights(model), 1_500, WeightStore(2)
    with (
        other(read, store.reader(0), Uniform(0, SIZES)) as first,
        other(read, store.reader(1), Uniform(0, SIZES)) as second,
    ):
        for reader in (first, second):
            assert reader.hear() == "ready"
            reader.tell(last)
        for number in range(1, last + 1):
            model.become(number)
            store.publish(live.layout, live.writer(), str(number).encode(), number, [0, 1])
        assert [reader.hear() for reader in (first, second)] == [[], []]


def test_readers_of_one_process_are_held_apart_by_threads():
    store, last = WeightStore(2), 300
    wrong: list[Any] = []

    def run(reader: StoreReader) -> None:
        version = 0
        while version != last:
            if reader.newer:
                _, version, found = taken(reader)
                if found != whole(version):
                    wrong.append((version, found))

    threads = [threading.Thread(target=run, args=(store.reader(i),)) for i in range(2)]
    for thread in threads:
        thread.start()
    for number in range(1, last + 1):
        post(store, whole(number), number, [0, 1])
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert wrong == []


def fork_and_take(connection: Any, reader: StoreReader) -> None:
    """Has another process take weights that is forked while a thread of this one takes them."""
    begun, over = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=as_sent(reader).receive, args=(lambda posted: (begun.set(), over.wait()),)
    )
    thread.start()
    begun.wait()
    with other(say_what_is_taken, reader, method="fork") as child:
        connection.send(child.hear())
    over.set()
    thread.join()


def say_what_is_taken(connection: Any, reader: StoreReader) -> None:
    connection.send(taken(reader))


def test_a_process_that_is_forked_while_weights_are_read_can_take_them():
    _, reader = one_reader()
    with other(fork_and_take, reader, parent=True) as process:
        assert process.hear() == (1, 1, whole(1))


# --- memory


def test_slots_are_used_again_even_while_some_are_held():
    model = Uniform(0, sizes=(250_000,))
    live, in_use, store = ModuleWeights(model), MemoryInUse(), WeightStore(16)
    readers = [store.reader(i) for i in range(16)]

    def put_up(times: int) -> int:
        for number in range(times):
            model.become(number)
            store.publish(live.layout, live.writer(), b"", number, range(16))
            readers[number % 15].receive(lambda posted: None)
        return in_use()

    # A slot that all know, and one to write to; what is around them is small.
    assert 2 * live.layout.nbytes <= put_up(40) < 3 * live.layout.nbytes
    with other(hold, store.reader(15)) as reader:
        reader.hear()
        assert 3 * live.layout.nbytes <= put_up(20) < 3.5 * live.layout.nbytes
    # Sets of which some is missing are shared by those who had the same before.
    in_use, store = MemoryInUse(), WeightStore(16)
    for number in range(20):
        given = {"a": number, "b": number} if number == 0 else {"a": number}
        post(store, given, None, range(16))
    assert [taken(store.reader(i))[2] for i in range(16)] == [{"a": 19, "b": 0}] * 16
    small = in_use()
    store.publish_version(1, [0])
    assert in_use() == small < 1 << 16


def test_the_memory_has_no_name_and_is_given_back():
    in_use = MemoryInUse()
    store, reader = one_reader()
    taken(reader)
    with other(say_shared_memory, store.reader(0)) as child:
        assert child.hear() == []
    assert in_use() > 0
    del store, reader
    assert in_use() == 0


def say_shared_memory(connection: Any, reader: StoreReader) -> None:
    taken(reader)
    with open("/proc/self/maps") as maps:
        connection.send([line for line in maps if "/dev/shm" in line])
