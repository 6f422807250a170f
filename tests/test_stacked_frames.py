"""Stacks that store each frame once: equal to ordinary tensors in every use."""

from __future__ import annotations

import copy
import io
import math
import multiprocessing
import pickle
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import tensordict
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import distributed, nn

from trawl.collectors.utils import split_trajectories
from trawl.data import StackedFrames

STEPS, SIZE, FRAME = 12, 4, (5, 6)


def stacks(dtype=torch.uint8):
    frames = (torch.arange((STEPS + SIZE) * math.prod(FRAME)) % 251).to(dtype)
    positions = torch.arange(STEPS)[:, None] + torch.arange(SIZE)
    return StackedFrames(frames.reshape(-1, *FRAME), positions)


MASK = torch.arange(STEPS) % 3 == 0
ORDER = torch.tensor([5, 1, 1, 7])
# Operations after which frames are still stored once.
KEEPING = {
    "a row": lambda x: x[3],
    "a slice": lambda x: x[2:9:2],
    "a list": lambda x: x[[4, 1]],
    "positions": lambda x: x[ORDER],
    "two lists": lambda x: x[[4, 1], [0, 3]],
    "a mask": lambda x: x[MASK],
    "ellipsis": lambda x: x[..., :, :],
    "the newest": lambda x: x[:, -1],
    "None": lambda x: x[None],
    "reshape": lambda x: x.reshape(3, -1, SIZE, *FRAME),
    "flat": lambda x: x.view(3, 4, SIZE, *FRAME).flatten(0, 1),
    "flat frames": lambda x: x.reshape(-1, *FRAME),
    "transpose": lambda x: x.view(3, 4, SIZE, *FRAME).transpose(0, 1).reshape(-1, SIZE, *FRAME),
    "permute": lambda x: x.view(3, 4, SIZE, *FRAME).permute(1, 0, 2, 3, 4),
    "negative": lambda x: x.transpose(-4, -3).permute(-4, 1, -2, 3).unsqueeze(-5),
    "movedim": lambda x: x.view(3, 4, SIZE, *FRAME).movedim(0, 1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "unbind": lambda x: x.unbind(0)[2],
    "split": lambda x: x.split(5)[2],
    "split in sizes": lambda x: x.split([2, 10])[1],
    "narrow": lambda x: x.narrow(0, 2, 3),
    "index_select": lambda x: x.index_select(0, ORDER),
    "stack": lambda x: torch.stack([x, x]),
    "stack apart": lambda x: torch.stack([x[2], x[5].clone()], 1),
    "cat": lambda x: torch.cat([x, x[2:3]]),
    "cat apart": lambda x: torch.cat([x, stacks()]),
    "clone": lambda x: x.clone(),
    "clone of a part": lambda x: x[2:4].clone(),
    "detach": lambda x: x.detach(),
    "to": lambda x: x.to("cpu"),
    "copied to": lambda x: x.to("cpu", copy=True),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle of a part": lambda x: pickle.loads(pickle.dumps(x[3:5])),
    "contiguous": lambda x: x.contiguous(),
}
# Operations that read the stacks.
READING = {
    "a column": lambda x: x[:, :, 2],
    "a pixel": lambda x: x[:, :, 1:3, 2],
    "a sum": lambda x: x.sum(),
    "arithmetic": lambda x: x.float() / 255,
    "in reverse": lambda x: 1 + x,
    "comparison": lambda x: x == x,
    "other dtype": lambda x: x.to(torch.int32),
    "flattened": lambda x: x.flatten(1),
    "channels last": lambda x: x.permute(0, 2, 3, 1),
    "swapped": lambda x: x.transpose(1, 2),
    "across": lambda x: x.transpose(-1, -2),
    "cat along pixels": lambda x: torch.cat([x, x], -1),
    "mixed cat": lambda x: torch.cat([x, x + 1]),
    "pad": lambda x: nn.functional.pad(x, (0, 1, 0, 0, 0, 0, 0, 2)),
    "expand": lambda x: x.expand(2, *x.shape),
    "repeat": lambda x: x.repeat(2, 1, 1, 1),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "where": lambda x: torch.where(MASK[:, None, None, None], x, x + 1),
    "zeros_like": torch.zeros_like,
    "new_zeros": lambda x: x.new_zeros(3),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "array": lambda x: torch.from_numpy(np.asarray(x)),
    "list": lambda x: torch.tensor(x.tolist()),
    "DLPack": torch.from_dlpack,
    "DLPack of numpy": lambda x: torch.from_numpy(np.from_dlpack(x)),
    "gather": lambda x: x.gather(0, torch.zeros(1, SIZE, *FRAME, dtype=torch.int64)),
    "vmap": torch.vmap(lambda x: x.float().mean()),
    "into other memory": lambda x: torch.zeros(x.shape, dtype=x.dtype).copy_(x),
}


def check(found, expected, keeps=None):
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    if keeps is not None:
        assert isinstance(found, StackedFrames) == keeps


@pytest.mark.parametrize("name", [*KEEPING, *READING])
def test_results_are_those_of_ordinary_tensors_and_frames_stay_stored_once(name):
    operation = (KEEPING | READING)[name]
    check(operation(stacks()), operation(stacks().to_dense()), keeps=name in KEEPING)


@given(st.data())
def test_any_index_gives_the_same(data):
    x = stacks().view(3, 4, SIZE, *FRAME)
    slices = st.slices(3).filter(lambda part: part.step is None or part.step > 0)
    first = data.draw(
        st.one_of(st.integers(-3, 2), slices, st.lists(st.integers(0, 2), max_size=4))
    )
    second = data.draw(st.one_of(st.integers(-4, 3), st.just(slice(None)), st.just(None)))
    index = data.draw(st.sampled_from([(first,), (first, second), (..., second, slice(None))]))
    check(x[index], x.to_dense()[index])


@pytest.mark.parametrize("dim", [-5, 4, 8])
def test_a_dimension_out_of_range_is_an_error(dim):
    for operation in (
        lambda x: x.unbind(dim),
        lambda x: x.select(dim, 0),
        lambda x: x.split(2, dim),
        lambda x: x.transpose(0, dim),
        lambda x: x.permute(0, 1, 2, dim),
        lambda x: torch.cat([x, x], dim),
        lambda x: x.index_select(dim, ORDER),
    ):
        with pytest.raises(IndexError, match="out of range"):
            operation(stacks())


def test_a_clone_has_memory_of_its_own():
    x = stacks()
    before, clone = x.to_dense(), x.clone()
    x.frames.zero_()
    assert torch.equal(clone, before)


def test_a_part_takes_only_the_frames_that_it_needs():
    part = stacks()[2:4].compact()
    assert len(part.frames) == SIZE + 1
    assert len(pickle.loads(pickle.dumps(stacks()[2:4])).frames) == SIZE + 1
    assert len(torch.cat([stacks()[:2], stacks()[:2]]).frames) == 2 * (SIZE + 1)


@pytest.mark.parametrize("count", [1, 3, 9])
def test_compact_stacks_are_equal_and_need_all_their_frames(count):
    frames = torch.arange(400).reshape(100, 2, 2)
    positions = torch.randint(0, 100, (count, SIZE), generator=torch.Generator().manual_seed(0))
    x = StackedFrames(frames, positions)
    check(x.compact(), x.to_dense(), keeps=True)
    assert len(x.compact().frames) == len(positions.unique())
    everything = StackedFrames(frames, torch.arange(100))
    assert everything.compact() is everything


def test_a_pickled_batch_has_each_frame_once():
    frames = torch.zeros(STEPS + SIZE, 50, 50)
    positions = torch.arange(STEPS)[:, None] + torch.arange(SIZE)
    batch = TensorDict(
        {"a": StackedFrames(frames, positions), "b": StackedFrames(frames, positions + 1)}, STEPS
    )
    assert len(pickle.dumps(batch)) < 1.2 * frames.nbytes
    check(pickle.loads(pickle.dumps(batch))["b"], batch["b"].to_dense())


# --- changes


CHANGES = {
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(torch.ones(x.shape)),
    "a slice": lambda x: x.__setitem__(slice(2, 4), 9),
    "a mask": lambda x: x.__setitem__(x == 0, 1),
    "several": lambda x: torch._foreach_copy_([x], [x + 1]),
    "out": lambda x: torch.add(x, 1, out=x),
    "out of stack": lambda x: torch.stack([x[0] + 1] * len(x), out=x),
    "set_ of a batch": lambda x: TensorDict(a=x).set_("a", x.to_dense()),
    "apply_ to a batch": lambda x: TensorDict(a=x).clone().apply_(lambda one: one + 1),
    "update of a batch": lambda x: TensorDict(b={"a": x}).update({"b": {"a": x + 1}}, inplace=True),
    "load_state_dict of a batch": lambda x: TensorDict(a=x).load_state_dict(
        TensorDict(a=x.to_dense()).state_dict()
    ),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(-1, -2),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.squeeze_(),
    "resize_": lambda x: x.resize_(2, 2),
    "set_": lambda x: x.set_(torch.zeros(2, dtype=torch.uint8)),
    "two outs": lambda x: torch.max(
        x.to_dense().expand(2, *x.shape), 0, out=(x, torch.zeros(x.shape, dtype=torch.int64))
    ),
}


@pytest.mark.parametrize(
    "part", [lambda x: x, lambda x: x[2:4], lambda x: x[0], lambda x: x.view(-1, *FRAME)]
)
@pytest.mark.parametrize("name", CHANGES)
def test_stacks_and_slices_cant_be_changed_in_place(name, part):
    x = stacks()
    with pytest.raises(RuntimeError, match=r"^StackedFrames.* can't be changed in place.*to_dense"):
        CHANGES[name](part(x))
    check(x, stacks().to_dense(), keeps=True)


def test_detached_stacks_are_the_same_ones():
    x = stacks()
    assert x.detach_() is x


def test_saved_stacks_are_loaded_without_pickles_of_any_class():
    file = io.BytesIO()
    torch.save(stacks(), file)
    file.seek(0)
    check(torch.load(file, weights_only=True), stacks().to_dense(), keeps=True)


def test_stacks_have_no_address():
    with pytest.raises(RuntimeError, match="call to_dense"):
        stacks().data_ptr()


COLLECTIVES = {
    "all_reduce": distributed.all_reduce,
    "broadcast": lambda x: distributed.broadcast(x, 0),
    "scatter": lambda x: distributed.scatter(x, [torch.ones(x.shape, dtype=x.dtype)], 0),
    "all_to_all_single": lambda x: distributed.all_to_all_single(x, x.to_dense()),
    "send": lambda x: distributed.send(x, 1),
    "recv": lambda x: distributed.recv(x, 1),
}


@pytest.fixture
def process_group(tmp_path):
    distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_collectives_refuse_stacks():
    for communicate in COLLECTIVES.values():
        with pytest.raises(RuntimeError, match=r"StackedFrames.*call to_dense"):
            communicate(stacks())


VIEWS = {
    "flatten": lambda x: x.flatten(1),
    "movedim": lambda x: x.movedim(-1, 1),
    "pixels": lambda x: x[..., 0],
    "other dtype": lambda x: x.view(torch.int8),
    "unbind": lambda x: x.unbind(-1)[0],
    "split": lambda x: x.split(2, -1)[1],
    "expand": lambda x: x.expand(2, *x.shape),
    "diagonal": lambda x: x.diagonal(0, -1, -2),
    "view of a view": lambda x: x.flatten(1)[:, 3:],
    "detached": lambda x: x.flatten(1).detach(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_pixels_cant_be_changed_in_place(name):
    x, dense = stacks(), stacks().to_dense()
    view, expected = VIEWS[name](x), VIEWS[name](dense)
    check(view, expected, keeps=False)
    assert view.stride() == expected.stride()
    for change in (
        lambda: view.zero_(),
        lambda: view.__setitem__(0, 1),
        lambda: torch.add(expected, 1, out=view),
        lambda: torch._foreach_zero_([view]),
    ):
        with pytest.raises(RuntimeError, match="can't be changed in place"):
            change()
    check(view, expected)
    check(x, dense)


USES_OF_VIEWS = {
    "arithmetic": lambda x: x + 1,
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "array": lambda x: torch.from_numpy(np.asarray(x)),
    "list": lambda x: torch.tensor(x.tolist(), dtype=torch.uint8),
    "DLPack": torch.from_dlpack,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "clone": lambda x: x.clone().add_(1),
    "contiguous": lambda x: x.movedim(1, 0).contiguous(),
    "into other memory": lambda x: torch.zeros(x.shape, dtype=x.dtype).copy_(x),
    "a layer": lambda x: nn.functional.linear(x.float(), torch.ones(2, x.shape[1])),
    "compiled": torch.compile(lambda x: x + 1, backend="aot_eager", fullgraph=True),
    "a batch": lambda x: TensorDict({"a": x}, STEPS)[2:4].clone()["a"],
    "shared": lambda x: x.share_memory_(),
}


@pytest.mark.parametrize("name", USES_OF_VIEWS)
def test_views_of_pixels_can_be_read_as_usual(name):
    use = USES_OF_VIEWS[name]
    check(use(stacks().flatten(1)), use(stacks().to_dense().flatten(1)))


def test_views_of_pixels_look_like_tensors():
    pixels, dense = stacks().float()[..., 0], stacks().to_dense()
    view = stacks()[..., 0]
    assert repr(view) == repr(dense[..., 0])
    assert f"{stacks(torch.float32)[1, 0, 0, 0]:.2f}" == f"{pixels[1, 0, 0]:.2f}"
    assert view.share_memory_().is_shared()


def test_gradients_reach_modules():
    conv = nn.Conv2d(SIZE, 2, 3)
    for x in (stacks(), stacks().to_dense()):
        conv(x.float()).sum().backward()
    halves = conv.weight.grad / 2
    conv.zero_grad()
    conv(stacks(torch.float32)).sum().backward()
    torch.testing.assert_close(conv.weight.grad, halves)


def test_a_compiled_function_takes_stacks():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def mean(x):
        return x[2:].clone().float().mean((1, 2, 3))

    check(mean(stacks()), stacks().to_dense()[2:].float().mean((1, 2, 3)), keeps=False)


@pytest.mark.parametrize("change", [lambda x: x.zero_(), lambda x: x.flatten(1).zero_()])
def test_a_compiled_function_cant_change_stacks(change):
    compiled = torch.compile(change, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="can't be changed in place"):
        compiled(stacks())


def _send(queue, x):
    queue.put(x.sum().item())


def test_stacks_can_be_shared_with_processes():
    x = stacks().share_memory_()
    assert x.is_shared()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=_send, args=(queue, x))
    process.start()
    assert queue.get() == x.to_dense().sum()
    process.join()
    process.close()
    queue.close()


def test_text_shows_the_layout():
    assert repr(stacks()) == (
        "StackedFrames(shape=(12, 4, 5, 6), dtype=torch.uint8, device=cpu, frames=16)"
    )


# --- as an entry of a batch


def batch(keeps):
    x = stacks() if keeps else stacks().to_dense()
    after = StackedFrames(stacks().frames, stacks().positions + 1)
    done = torch.arange(STEPS)[:, None] % 5 == 4
    following = {"observation": after if keeps else after.to_dense(), "done": done}
    frames = {"observation": x, "next": following, "action": torch.arange(STEPS)}
    return TensorDict(frames, [STEPS], names=["time"])


def saved(data):
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def mapped(data):
    with TemporaryDirectory() as path:
        data.memmap(path)
        return TensorDict.load_memmap(path).clone()


USES = {
    "a slice": lambda b: b[2:7],
    "a minibatch": lambda b: b[torch.tensor([3, 1, 8])],
    "a mask": lambda b: b[MASK],
    "reshape": lambda b: b.reshape(3, 4).reshape(-1),
    "stack": lambda b: torch.stack([b, b]),
    "cat": lambda b: torch.cat([b, b[:3]]),
    "lazy stack": lambda b: TensorDict.lazy_stack([b[i] for i in range(4)])[1:3].contiguous(),
    "dense stack": lambda b: TensorDict.maybe_dense_stack([b, b], 0),
    "clone": lambda b: b.clone(),
    "to": lambda b: b.to("cpu"),
    "pickle": lambda b: pickle.loads(pickle.dumps(b)),
    "torch.save": saved,
    "memmap": mapped,
    "consolidate": lambda b: b.consolidate(),
    "apply": lambda b: b.apply(lambda x: x + 1),
    "float": lambda b: b.to(torch.float32),
    "pad": lambda b: tensordict.pad(b, [0, 3]),
    "pad_sequence": lambda b: tensordict.pad_sequence([b[:3], b[3:9]]),
    "split_trajectories": split_trajectories,
    "where": lambda b: b.where(MASK, torch.zeros_like(b)),
    "assignment": lambda b: b.clone().update({"observation": b["next", "observation"]}),
    "update in place": lambda b: b.to(torch.float64).update_(b),
    "unbind": lambda b: b.unbind(0)[3],
    "expand": lambda b: b.expand(2, STEPS),
    "gather": lambda b: b.gather(0, torch.tensor([1, 2])),
    "zeros_like": torch.zeros_like,
    "lock": lambda b: b.clone().lock_(),
}


@pytest.mark.parametrize("name", USES)
def test_a_batch_can_be_used_as_usual(name):
    found, expected = USES[name](batch(True)), USES[name](batch(False))
    assert found.shape == expected.shape
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        check(found.get(key), value)


@pytest.mark.parametrize("storage", ["LazyTensorStorage", "LazyMemmapStorage", "ListStorage"])
def test_replay_buffers_take_batches(storage, tmp_path):
    data = pytest.importorskip("torchrl.data")
    samples = []
    for keeps in (True, False):
        options = {"scratch_dir": tmp_path / str(keeps)} if "Memmap" in storage else {}
        buffer = data.ReplayBuffer(
            storage=getattr(data, storage)(30, **options),
            batch_size=8,
            collate_fn=torch.stack if storage == "ListStorage" else None,
        )
        buffer.extend(batch(keeps).reshape(-1))
        buffer.extend(batch(keeps)[:4])
        torch.manual_seed(0)
        samples.append(buffer.sample())
    for key, value in samples[1].items(True, True):
        check(samples[0].get(key), value)
