"""Where the batches of several workers lie in memory, and how they are put together."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from multi_parts import MASK, TRAJ_IDS

from trawl.collectors.workers.assembler import BatchAssembler, WorkerBatch
from trawl.collectors.workers.requests import BatchReady, WorkerReady
from trawl.memory import PrivateMemory
from trawl.rollout.layout import BatchPartition, Layout, Leaf
from trawl.rollout.slab import SlabPool, needed_bytes, tensors_over

DTYPES = [torch.float32, torch.int64, torch.bool, torch.uint8, torch.float64]
HOW = ["stack", 0, -1]

leaves = st.dictionaries(
    st.sampled_from([("a",), ("b",), ("next", "a"), ("collector", "c"), ("d",)]),
    st.builds(Leaf, st.lists(st.integers(0, 3), max_size=2).map(tuple), st.sampled_from(DTYPES)),
    min_size=1,
)
batch_sizes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
layouts = st.builds(Layout, leaves, batch_sizes, st.integers(1, 5))


@st.composite
def partitions(draw):
    part = draw(layouts)
    how = draw(st.sampled_from(HOW))
    by_time = how == -1 or (how == 0 and not part.batch)
    count = draw(st.integers(1, 4))
    if by_time:
        steps = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    else:
        steps = [part.steps] * count
    return BatchPartition(part, steps, how), steps, how


# --- layouts


@given(layouts)
def test_entries_are_aligned_and_do_not_overlap(layout):
    end = 0
    for key, (offset, *_) in layout.places.items():
        leaf = layout.leaves[key]
        assert offset % 64 == 0
        assert offset >= end
        assert layout.shape(key) == (*layout.batch, layout.steps, *leaf.shape)
        end = offset + math.prod(layout.shape(key)) * leaf.dtype.itemsize
    assert layout.nbytes >= end


@given(layouts)
def test_the_same_block_gives_the_same_places_again(layout):
    block = bytearray(needed_bytes(layout))
    (one, _), (other, _) = tensors_over(layout, block), tensors_over(layout, block)
    for number, (key, tensor) in enumerate(one.items()):
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
        assert (tensor.shape, tensor.dtype) == (other[key].shape, layout.leaves[key].dtype)
        tensor.fill_(number % 2)
        assert torch.equal(tensor, other[key])
    for number, tensor in enumerate(other.values()):
        assert (tensor == number % 2).all()


@given(leaves, batch_sizes, st.integers(1, 4))
def test_layouts_are_equal_if_all_they_say_is(found, batch, steps):
    one, other = Layout(found, batch, steps), Layout(found, batch, steps)
    assert one == other
    assert hash(one) == hash(other)
    assert one != Layout(found, batch, steps + 1)
    assert one != Layout(found, (*batch, 2), steps)
    assert one != Layout({**found, ("more",): Leaf((), torch.bool)}, batch, steps)


# --- workers' parts of a whole


@given(partitions())
def test_the_parts_lie_where_torch_would_put_them(case):
    partition, steps, how = case
    tensors, _ = tensors_over(partition.whole, bytearray(needed_bytes(partition.whole)))
    for key, tensor in tensors.items():
        parts = [partition.part(index, {key: tensor})[key] for index in range(len(steps))]
        for index, part in enumerate(parts):
            part.copy_((torch.arange(part.numel()) + index).reshape(part.shape) % 2)
        axis = len(partition.layouts[0].batch)
        if how == "stack":
            together = torch.stack(parts)
        else:
            together = torch.cat(parts, 0 if how == 0 else axis)
        assert torch.equal(tensor, together)


@given(layouts, st.sampled_from(HOW))
def test_batches_of_different_lengths_need_to_be_one_after_the_other(part, how):
    steps = [part.steps, part.steps + 1]
    if how == -1 or (how == 0 and not part.batch):
        assert BatchPartition(part, steps, how).whole.steps == sum(steps)
        return
    with pytest.raises(ValueError, match=r"cat_results=.* equal length .* cat_results=-1"):
        BatchPartition(part, steps, how)


# --- one batch of several


def _ready(layout, steps):
    return WorkerReady(
        layout=Layout(layout.leaves, layout.batch, steps),
        hidden=frozenset(),
        num_envs=math.prod(layout.batch),
        steps=steps,
        batch_size=layout.batch,
        trajectory=0,
    )


def _fill(place, index, filled):
    """Writes what a worker would: a number of its own in each frame; zeros where it has none."""
    layout = place.partition.layouts[place.part]
    tensors, _ = tensors_over(place.partition.whole, place.memory.buffer)
    own = place.partition.part(place.part, tensors)
    numbers = 1000 * (index + 1) + torch.arange(math.prod(layout.batch) * layout.steps)
    numbers = numbers.reshape(*layout.batch, layout.steps)
    done = torch.arange(layout.steps) < filled
    own["number",].copy_(numbers.where(done, 0))
    own[TRAJ_IDS].copy_((numbers // 2).where(done, -1))
    return numbers[..., :filled]


NUMBERS = {("number",): Leaf((), torch.int64), TRAJ_IDS: Leaf((), torch.int64)}


@given(st.data(), batch_sizes, st.sampled_from(HOW), st.booleans())
def test_a_batch_has_all_that_workers_delivered_in_their_order(data, batch, how, whole):
    count = data.draw(st.integers(1, 4))
    by_time = how == -1 or (how == 0 and not batch)
    length = data.draw(st.integers(1, 5))
    steps = [data.draw(st.integers(1, 5)) if by_time else length for _ in range(count)]
    layout = Layout(NUMBERS, batch, length)
    ready = [_ready(layout, n) for n in steps]
    assembler = BatchAssembler(ready, how, PrivateMemory, whole=whole)
    # One that is broken off is not in a block of all.
    filled = steps if whole else [data.draw(st.integers(0, n)) for n in steps]
    late = set() if whole else set(data.draw(st.sets(st.integers(0, count - 1))))
    if all(index in late or not filled[index] for index in range(count)):
        late, filled = set(), steps
    parts, numbers = [], {}
    for index, place in enumerate(assembler.slices()):
        if index not in late:
            numbers[index] = _fill(place, index, filled[index])
            parts.append(
                WorkerBatch(index, place, BatchReady(index, 0, filled[index], None, 0, 0, None, {}))
            )
    together = assembler.assemble(parts)
    # Batches that end early at the same step are shorter, and need no mask.
    even = not late and (filled == steps or len(set(filled)) == 1)
    if by_time or even:
        stacked = list(numbers.values())
        expected = torch.stack(stacked) if how == "stack" else None
        if expected is None:
            expected = torch.cat(stacked, len(batch) if by_time else 0)
        assert torch.equal(together["number"], expected)
        assert MASK not in together.keys(True)
        return
    mask = together[MASK]
    assert mask.shape == together.shape
    assert sorted(together["number"][mask].tolist()) == sorted(
        number for part in numbers.values() for number in part.reshape(-1).tolist()
    )
    assert (together[TRAJ_IDS][~mask] == -1).all()
    assert (together[TRAJ_IDS][mask] >= 0).all()
    assert together.names == [*[None] * (together.ndim - 1), "time"]


def test_versions_are_those_of_the_workers():
    layout = Layout(NUMBERS, (), 3)
    assembler = BatchAssembler(
        [_ready(layout, 3)] * 2, "stack", PrivateMemory, whole=True, after=False
    )
    parts = []
    for index, place in enumerate(assembler.slices()):
        _fill(place, index, 3)
        parts.append(WorkerBatch(index, place, BatchReady(index, 3, 3, 5 + index, 0, 0, None, {})))
    assert assembler.assemble(parts)["policy_version"].tolist() == [[5] * 3, [6] * 3]


# --- blocks


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 3))
def test_blocks_are_used_again_when_nobody_refers_to_them(moves, keep):
    layout = Layout({("a",): Leaf((2,), torch.int64)}, (), 4)
    made = []

    def allocate(nbytes):
        made.append(PrivateMemory(nbytes))
        return made[-1]

    pool, held, most = SlabPool(layout, allocate=allocate, keep=keep), [], 0
    for number, move in enumerate(moves):
        if move < 5 or not held:
            tensor = pool.lease().tensors["a",]
            tensor.fill_(number)
            held.append((number, tensor[1:, 0]))
            del tensor
        else:
            del held[move % len(held)]
        most = max(most, len(held))
        assert pool.leased == len(held)
        assert pool.nbytes <= (len(held) + keep) * layout.nbytes
        assert all(bool((part == value).all()) for value, part in held)
    if keep >= most:
        assert len(made) == most
