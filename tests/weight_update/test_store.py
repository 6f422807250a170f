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
from weight_parts import PATIENCE, Uniform, answering, as_sent, numbers, other

from trawl.weight_update import store as store_module
from trawl.weight_update.layout import FlatLayout, ModuleWeights, Slot
from trawl.weight_update.store import StoreReader, WeightStore, WeightUpdate

WEIGHTS = {"a": torch.zeros(3), "b": torch.zeros(2, 2), "c": torch.zeros((), dtype=torch.int64)}
LAYOUT = FlatLayout(WEIGHTS, ["a"])


def writes(given: dict[str, float]) -> Callable[[Slot], None]:
    """Fills a slot with numbers, by name."""
    tensors = {name: torch.full_like(WEIGHTS[name], number) for name, number in given.items()}
    return lambda slot, update: slot.put(LAYOUT.match(tensors, "of the test"), update)


def post(store: WeightStore, given: dict[str, float], version: Any, readers: Any) -> None:
    store.publish(LAYOUT, writes(given), b"", version, readers)


def taken(reader: StoreReader) -> tuple[int, Any, dict[str, float] | None]:
    """What a reader takes: how many there were, version, and numbers by name."""
    found: list[Any] = []

    def use(posted: WeightUpdate) -> None:
        slot = posted.slot
        named = None if slot is None else slot.named()
        found.append(named and {name: tensor.unique().item() for name, tensor in named.items()})

    posted = reader.receive(use)
    return posted.count, posted.version, found[0]


def whole(number: float) -> dict[str, float]:
    return dict.fromkeys(WEIGHTS, number)


def memory_in_use(store: WeightStore) -> int:
    """Bytes that the system has given for a store."""
    assert store._file is not None
    return 512 * os.fstat(store._file._memory.fd).st_blocks


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
    for index in range(count):
        assert taken(readers[index]) == newest[index]


# --- versions


@pytest.mark.parametrize(
    "version",
    [None, 0, 1, -1, 2**62, 10**100, "", "x", "12a5f9c4-8d0e-4a6c", "é" * 59, "n", "i1", "s"],
)
def test_versions_come_back_as_they_were_given(version):
    store = WeightStore(1)
    reader = store.reader(0)
    post(store, whole(1), version, [0])
    assert taken(reader)[1] == version
    store.publish_version(version, [0])
    assert taken(reader)[1:] == (version, whole(1))


@pytest.mark.parametrize("version", ["x" * 119, "é" * 60, 10**119])
def test_a_version_that_is_too_long_is_refused_and_nothing_is_put_up(version):
    store = WeightStore(1)
    reader = store.reader(0)
    post(store, whole(1), 1, [0])
    for call in (
        lambda: post(store, whole(2), version, [0]),
        lambda: store.publish_version(version, [0]),
    ):
        with pytest.raises(
            ValueError, match=r"a policy version may have at most 118 bytes, but .* has"
        ):
            call()
    assert taken(reader) == (1, 1, whole(1))


def test_a_version_may_come_before_any_weights():
    store = WeightStore(1)
    reader = store.reader(0)
    assert not reader.newer
    store.publish_version(3, [0])
    assert reader.newer
    assert taken(reader) == (1, 3, None)
    assert store.layout is None
    post(store, whole(1), 4, [0])
    assert taken(reader) == (2, 4, whole(1))


# --- what is missing


def test_what_is_not_given_is_as_it_was_for_that_reader():
    store = WeightStore(3)
    readers = [store.reader(i) for i in range(3)]
    post(store, {"a": 1, "b": 1}, None, [0])
    post(store, {"a": 2, "c": 2}, None, [1])
    post(store, {"a": 3}, None, [0, 1, 2])
    assert taken(readers[0])[2] == {"a": 3, "b": 1}
    assert taken(readers[1])[2] == {"a": 3, "c": 2}
    assert taken(readers[2])[2] == {"a": 3}


def test_readers_of_the_same_weights_share_a_slot_although_some_are_missing():
    store = WeightStore(16)
    for number in range(20):
        post(store, {"a": number, "b": number} if number == 0 else {"a": number}, None, range(16))
    for index in range(16):
        assert taken(store.reader(index))[2] == {"a": 19, "b": 0}
    assert store._file is not None
    assert len(store._file._slots) == 2


# --- extra state


@pytest.mark.parametrize("extra", [b"", b"x", bytes(10_000)])
def test_what_comes_with_the_weights_is_of_the_same_set(extra):
    store = WeightStore(2)
    readers = [store.reader(0), as_sent(store.reader(1))]
    for data in (extra, b"shorter", extra + b"longer"):
        store.publish(LAYOUT, writes(whole(1)), data, None, [0, 1])
        for reader in readers:
            found = []
            reader.receive(lambda posted, found=found: found.append(posted.extra))
            assert found == [data]


def test_what_comes_with_the_weights_may_grow_up_to_a_limit():
    store = WeightStore(1)
    reader = store.reader(0)
    store.publish(LAYOUT, writes(whole(1)), b"1", 1, [0])
    store.publish(LAYOUT, writes(whole(2)), bytes(1 << 20), 2, [0])
    assert taken(reader) == (2, 2, whole(2))
    with pytest.raises(
        ValueError, match=r"extra state has grown to \d+ bytes, but only \d+ bytes were reserved"
    ):
        store.publish(LAYOUT, writes(whole(3)), bytes(1 << 22), 3, [0])
    assert not reader.newer
    assert taken(reader) == (2, 2, whole(2))


def test_what_fails_to_be_written_is_not_put_up():
    def fail(slot: Slot, update: int) -> None:
        slot.put(LAYOUT.match({"a": torch.ones(3)}, ""))
        raise ZeroDivisionError

    store = WeightStore(1)
    reader = store.reader(0)
    post(store, whole(1), 1, [0])
    taken(reader)
    for _ in range(10):
        with pytest.raises(ZeroDivisionError):
            store.publish(LAYOUT, fail, b"", 2, [0])
    assert not reader.newer
    assert taken(reader) == (1, 1, whole(1))


def test_what_a_reader_fails_to_use_stays_new():
    def fail(posted: WeightUpdate) -> None:
        raise ZeroDivisionError

    store = WeightStore(1)
    reader = store.reader(0)
    post(store, whole(1), 1, [0])
    with pytest.raises(ZeroDivisionError):
        reader.receive(fail)
    assert reader.newer
    assert store.received(0) == 0
    for number in range(10):
        post(store, whole(number), number, [0])
    assert taken(reader) == (11, 9, whole(9))


# --- other processes


def hold(connection: Any, reader: StoreReader) -> None:
    """Takes weights, and keeps them until it is told to go on; then takes the newest."""

    def use(posted: WeightUpdate) -> None:
        assert posted.slot is not None
        named = posted.slot.named()
        connection.send(numbers(named))
        connection.recv()
        connection.send(numbers(named))

    reader.receive(use)
    connection.send(taken(reader))


def read(connection: Any, reader: StoreReader, model: nn.Module) -> None:
    """Takes weights whenever there are new ones, until the last version; says what was wrong."""
    live, wrong, seen = ModuleWeights(model), [], 0
    connection.send("ready")
    last = connection.recv()

    def use(posted: WeightUpdate) -> None:
        assert posted.slot is not None
        live.load(posted.slot.tensors())
        found = numbers(posted.slot.named()) | model.numbers
        if found != {posted.version} or posted.extra != str(posted.version).encode():
            wrong.append((posted.version, found, posted.extra))

    version = 0
    while version != last:
        if reader.newer:
            now = reader.receive(use).version
            assert now > version
            version, seen = now, seen + 1
    connection.send((seen, wrong))


def test_what_a_reader_holds_does_not_change_and_the_writer_does_not_wait():
    store = WeightStore(2)
    post(store, whole(1), 1, [0, 1])
    with other(hold, store.reader(0)) as reader:
        assert reader.hear() == {1}
        for number in range(2, 30):
            post(store, whole(number), number, [0, 1])
        assert store.received(0) == 0
        assert reader.ask("go on") == {1}
        assert reader.hear() == (29, 29, whole(29))
        assert store.received(0) == 29


def test_the_writer_waits_for_nobody_though_all_readers_hold_different_sets():
    store = WeightStore(3)
    post(store, whole(0), 0, [0, 1, 2])
    with (
        other(hold, store.reader(0)) as first,
        other(hold, store.reader(1)) as second,
        other(hold, store.reader(2)) as third,
    ):
        # Who is started takes what is the newest then.
        readers = [first, second, third]
        assert all(reader.hear() == {0} for reader in readers)
        for number in range(1, 10):
            post(store, whole(number), number, [number % 3])
        held = [reader.ask("go on") for reader in readers]
        assert held == [{0}] * 3
        newest = [reader.hear()[1:] for reader in readers]
        assert newest == [(9, whole(9)), (7, whole(7)), (8, whole(8))]


def test_a_reader_that_is_killed_while_it_reads_is_in_nobodys_way():
    store = WeightStore(1)
    post(store, whole(0), 0, [0])
    # More often than there are slots.
    for number in range(1, 9):
        with other(hold, store.reader(0)) as reader:
            assert reader.hear() == {number - 1}
            reader.kill()
        post(store, whole(number), number, [0])
    assert taken(store.reader(0)) == (9, 8, whole(8))
    assert store._file is not None
    assert len(store._file._slots) == 2


def test_no_reader_has_two_versions_in_one_set_while_they_are_put_up_all_the_time():
    model = Uniform(0, sizes=(5, 20_000, 1, 300))
    live, last = ModuleWeights(model), 3_000
    store = WeightStore(3)
    with (
        other(read, store.reader(0), Uniform(0, sizes=(5, 20_000, 1, 300))) as first,
        other(read, store.reader(1), Uniform(0, sizes=(5, 20_000, 1, 300))) as second,
        other(read, store.reader(2), Uniform(0, sizes=(5, 20_000, 1, 300))) as third,
    ):
        readers = [first, second, third]
        for reader in readers:
            assert reader.hear() == "ready"
            reader.tell(last)
        for number in range(1, last + 1):
            model.become(number)
            store.publish(live.layout, live.writer(), str(number).encode(), number, [0, 1, 2])
        for reader in readers:
            seen, wrong = reader.hear()
            assert wrong == []
            assert seen >= 1


def test_readers_of_one_process_are_held_apart_by_threads():
    store, last = WeightStore(2), 500
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


def test_a_process_that_is_forked_while_weights_are_put_up_can_take_them():
    # Another thread may have the lock at that moment; in the child nobody would give it back.
    store = WeightStore(1)
    post(store, whole(1), 1, [0])
    with other(fork_and_take, store.reader(0), parent=True) as reader:
        assert reader.hear() == (1, 1, whole(1))


def fork_and_take(connection: Any, reader: StoreReader) -> None:
    begun, over = threading.Event(), threading.Event()

    def keep() -> None:
        with store_module._here:
            begun.set()
            over.wait()

    thread = threading.Thread(target=keep)
    thread.start()
    begun.wait()
    with other(say_what_is_taken, reader, method="fork") as child:
        connection.send(child.hear())
    over.set()
    thread.join()


def say_what_is_taken(connection: Any, reader: StoreReader) -> None:
    connection.send(taken(reader))


# --- memory


def test_slots_are_used_again():
    model = Uniform(0, sizes=(250_000,))
    live, store = ModuleWeights(model), WeightStore(16)
    readers = [store.reader(i) for i in range(16)]
    for number in range(40):
        model.become(number)
        store.publish(live.layout, live.writer(), b"", number, range(16))
        readers[number % 16].receive(lambda posted: None)
    # A slot that all know, and one to write to; what is around them is small.
    assert memory_in_use(store) < 3 * live.layout.nbytes


def test_slots_are_used_again_while_one_is_held():
    model = Uniform(0, sizes=(250_000,))
    live, store = ModuleWeights(model), WeightStore(2)
    store.publish(live.layout, live.writer(), b"", 0, [0, 1])
    with other(hold, store.reader(0)) as reader:
        assert reader.hear() == {0}
        for number in range(1, 20):
            model.become(number)
            store.publish(live.layout, live.writer(), b"", number, [0, 1])
        assert 3 * live.layout.nbytes <= memory_in_use(store) < 3.5 * live.layout.nbytes


def test_the_memory_has_no_name_and_is_given_back():
    def own() -> int:
        names = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return sum("memfd:trawl" in os.readlink(name) for name in names if os.path.exists(name))

    before = own()
    store = WeightStore(2)
    reader = store.reader(0)
    post(store, whole(1), 1, [0])
    taken(reader)
    assert store._file is not None
    assert os.readlink(f"/proc/self/fd/{store._file._memory.fd}") == "/memfd:trawl (deleted)"
    with other(say_shared_memory, store.reader(1)) as child:
        assert child.hear() == []
    assert own() > before
    del store, reader
    assert own() == before


def say_shared_memory(connection: Any, reader: StoreReader) -> None:
    taken(reader)
    with open("/proc/self/maps") as maps:
        connection.send([line for line in maps if "/dev/shm" in line])


def test_a_look_at_the_board_answers_without_taking():
    store = WeightStore(1)
    with other(look, store.reader(0)) as reader:
        assert reader.ask("newer") is False
        post(store, whole(1), 1, [0])
        assert reader.ask("newer") is True
        assert reader.ask("newer") is True
        assert reader.ask("take") == (1, 1, whole(1))
        assert reader.ask("newer") is False


def look(connection: Any, reader: StoreReader) -> None:
    answering(connection, lambda what: reader.newer if what == "newer" else taken(reader))
