"""What sinks of all formats do, what is read back, and sinks as an option of collectors."""

import json
import math
import os

import nursery
import pytest
import torch
from sink_parts import SINKS, files_no_larger_than, frames, write
from tensordict import MemoryMappedTensor, NonTensorData, TensorDict, stack

from trawl import Collector
from trawl.data import MemmapSink, info, load
from trawl.data.sinks.entries import flat_frames
from trawl.testing import NumberedEnv

LEFT = {"memmap": "frames", "parquet": "frames", "minari": "data"}
DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint16, torch.uint64,
          torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float64,
          torch.complex64, torch.complex128]  # fmt: skip
WHOLE = {"trajs_per_batch": 3, "traj_format": "padded"}
SHAPES = [(), (1,), (3,), (2, 3), (1, 1)]


@pytest.fixture(params=SINKS)
def kind(request):
    return SINKS[request.param]


# --- what is read back


def test_all_frames_are_read_back(kind, tmp_path):
    batch = frames(0, 100)
    # Of any shape, and views of larger memory.
    wide = torch.stack([batch, batch], 1)
    parts = [batch[:30], batch[30:31], batch[31:81].reshape(2, 25), wide[81:91, 1]]
    parts += [wide.reshape(-1)[182::2]]
    write(kind, tmp_path / "a" / "d", parts, env="X-v0", seed=3)
    loaded = load(tmp_path / "a" / "d")
    assert loaded.shape == (100,)
    assert set(loaded.keys(True, True)) == set(batch.keys(True, True))
    for key in batch.keys(True, True):
        assert loaded[key].dtype == batch[key].dtype, key
        assert torch.equal(loaded[key], batch[key]), key
    for size, sizes in ((30, [30, 30, 30, 10]), (50, [50, 50]), (999, [100])):
        pieces = list(load(tmp_path / "a" / "d", batch_size=size))
        assert [len(piece) for piece in pieces] == sizes
        assert (torch.cat(pieces) == batch).all()
    for size in (0, -3):
        with pytest.raises(ValueError, match=f"batch_size must be at least 1.* but it is {size}"):
            load(tmp_path / "a" / "d", batch_size=size)
    made = {"format": kind.format, "version": 1, "frames": 100, "complete": True}
    assert made | {"env": "X-v0", "seed": 3} == info(tmp_path / "a" / "d")
    assert sorted(os.listdir(tmp_path / "a" / "d")) == ["_dataset.json", LEFT[kind.format]]
    if kind is MemmapSink:
        alone = TensorDict.load_memmap(tmp_path / "a" / "d" / "frames")
        assert isinstance(alone["observation"], MemoryMappedTensor)
        assert (alone == batch).all()


def test_dtypes_shapes_and_names_are_kept(kind, tmp_path):
    more = {"nothing": torch.empty(6, 0), "a/b": torch.ones(6), ("deep", "er", "x"): torch.ones(6)}
    more["no number"] = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1, 2])
    for dtype in DTYPES:
        for shape in SHAPES:
            drawn = torch.complex64 if dtype.is_complex else torch.float32
            value = torch.randn(6, *shape, dtype=drawn) * 3
            value = value if dtype.is_complex or dtype.is_floating_point else value.abs()
            more[f"{dtype} {shape}".replace(".", "-")] = value.to(dtype)
    write(kind, tmp_path / "d", [frames(0, 6).update(more)])
    loaded = load(tmp_path / "d")
    for name, value in more.items():
        found = loaded[name]
        assert (found.dtype, found.shape) == (value.dtype, value.shape), name
        if name == "no number":
            assert found.view(torch.int32).equal(value.view(torch.int32))
        else:
            assert found.tolist() == value.tolist(), name


@pytest.mark.parametrize("read", [load, info])
def test_no_dataset_is_said_to_be_none(read, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name in ("nowhere", "empty", "file"):
        with pytest.raises(FileNotFoundError, match=f"{name} is not a dataset"):
            read(tmp_path / name)
    for text, words in (
        ("{", "is damaged"),
        (json.dumps({"format": "memmap", "version": 99}), "has format 'memmap' of version 99"),
        (json.dumps({"format": "csv", "version": 1}), "has format 'csv'"),
        ("[]", "is damaged: it must contain a JSON object"),
    ):
        (tmp_path / "empty" / "_dataset.json").write_text(text)
        with pytest.raises(ValueError, match=words):
            read(tmp_path / "empty")


def test_masked_rows_and_those_that_were_not_stepped_are_left_out():
    batch = frames(0, 6)
    mask = torch.tensor([True, False, True, True, False, True])
    # Entries may have the shape of flags.
    for deep in (mask, mask.unsqueeze(-1)):
        batch["collector", "mask"] = deep
        flat = flat_frames(batch)
        assert flat["collector", "traj_ids"].shape == (4,)
        assert ("collector", "mask") not in flat.keys(True)
        assert flat["next", "reward"].flatten().tolist() == [0, 2, 3, 5]
    rest = frames(0, 4)
    rest["collector", "traj_ids"][2:] = -1
    assert len(flat_frames(rest)) == 2


# --- how it is written


def test_a_dataset_is_resumed_with_ids_of_its_own(kind, tmp_path):
    write(kind, tmp_path / "d", [frames(0, 21)], env="X-v0", note="first")
    with kind(tmp_path / "d", info={"note": "second"}, resume=True) as sink:
        assert sink.frames == 21
        sink.write(frames(0, 14))
    loaded = load(tmp_path / "d")
    assert loaded["number"].tolist() == [*range(21), *range(14)]
    assert loaded["collector", "traj_ids"].tolist() == [i // 7 for i in range(35)]
    facts = info(tmp_path / "d")
    assert (facts["frames"], facts["env"], facts["note"]) == (35, "X-v0", "second")
    if kind is MemmapSink:
        assert (TensorDict.load_memmap(tmp_path / "d" / "frames") == loaded).all()


@pytest.mark.parametrize("left", [None, [], [".reserve"], ["._dataset.json", ".reserve"]], ids=str)
def test_to_resume_what_a_kill_left_of_the_beginning_begins_it(left, kind, tmp_path):
    if left is not None:
        (tmp_path / "d").mkdir()
        for name in left:
            (tmp_path / "d" / name).write_text("{")
    with kind(tmp_path / "d", resume=True) as sink:
        assert sink.frames == 0
        sink.write(frames(0, 7))
    assert len(load(tmp_path / "d")) == 7


def test_what_exists_is_left_alone(kind, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    for name in ("file", "folder", "link"):
        with pytest.raises(FileExistsError, match="already exists"):
            kind(tmp_path / name)
    for name in ("file", "folder"):
        with pytest.raises(FileExistsError, match="is not a dataset that can be continued"):
            kind(tmp_path / name, resume=True)
    with pytest.raises(NotADirectoryError):
        kind(tmp_path / "file" / "d")
    assert sorted(tmp_path.rglob("*")) == before
    other = next(each for each in SINKS.values() if each is not kind)
    write(other, tmp_path / "d", [frames(0, 7)])
    with pytest.raises(ValueError, match=f"format {other.format}, and can't .* as {kind.format}"):
        kind(tmp_path / "d", resume=True)
    assert len(load(tmp_path / "d")) == 7


@pytest.mark.parametrize("resume", [False, True])
def test_other_entries_are_not_written_after_these(resume, kind, tmp_path):
    if resume:
        write(kind, tmp_path / "d", [frames(0, 7)])
    with kind(tmp_path / "d", resume=resume) as sink:
        if not resume:
            sink.write(frames(0, 7))
        for batch, words in (
            (frames(0, 7).exclude("number"), r"lacks \['number'\]"),
            (frames(0, 7, more=torch.ones(7)), r"adds \['more'\]"),
            (frames(0, 7, number=torch.ones(7)), r"was torch\.int64 .* but in this batch"),
            (frames(0, 7, number=torch.ones(7, 5).long()), r"shape \(5,\)"),
        ):
            with pytest.raises(ValueError, match=words):
                sink.write(batch)
    assert len(load(tmp_path / "d")) == 7


def test_only_one_writes_at_a_time(kind, tmp_path):
    sink = kind(tmp_path / "d")
    sink.write(frames(0, 7))
    with pytest.raises(BlockingIOError, match="another sink or process is writing"):
        kind(tmp_path / "d", resume=True)
    sink.write(frames(7, 7))
    sink.close()
    sink.close()
    with pytest.raises(RuntimeError, match="is closed"):
        sink.write(frames(14, 7))
    assert sink.closed
    assert len(load(tmp_path / "d")) == 14
    kind(tmp_path / "d", resume=True).close()


def test_an_error_marks_the_dataset(kind, tmp_path):
    def failing():
        yield frames(0, 7)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(kind, tmp_path / "d", failing())
    assert info(tmp_path / "d")["complete"] is False
    assert len(load(tmp_path / "d")) == 7


def test_without_frames_nothing_is_left(kind, tmp_path):
    with kind(tmp_path / "d") as sink:
        sink.write(frames(0, 1)[:0])
        assert info(tmp_path / "d")["frames"] == 0
        with pytest.raises(FileNotFoundError, match="has no frames"):
            load(tmp_path / "d")
    assert os.listdir(tmp_path) == []


def test_a_batch_and_the_folder_may_be_changed_after_it_was_written(kind, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    batch = frames(0, 10)
    with kind("d") as sink:
        sink.write(batch[:5])
        monkeypatch.chdir("elsewhere")
        sink.write(batch[5:])
        batch.zero_()
    assert load(tmp_path / "d")["number"].tolist() == list(range(10))
    assert os.listdir() == []


TEXTS = stack([NonTensorData(text) for text in "abc"])
OBJECTS = stack([NonTensorData(each) for each in ("text", 3, None)])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (None, "batch must be a TensorDict, but it is"),
        ({"a": 1}, "batch must be a TensorDict, but it is"),
        (torch.ones(3), "batch must be a TensorDict, but it is"),
        (frames(0, 3).set("what", OBJECTS), "entry 'what' is NonTensorStack"),
        (frames(0, 3).set("text", TEXTS), "can't hold text, but entry 'text' is text: use .* parq"),
    ],
    ids=["none", "dict", "tensor", "objects", "text"],
)
def test_what_is_no_batch_is_refused(batch, words, kind, tmp_path):
    if "text:" in words and kind is not MemmapSink:
        pytest.skip("this format holds text")
    with pytest.raises(TypeError, match=words):
        write(kind, tmp_path / "d", [batch])
    assert os.listdir(tmp_path) == []


def test_info_must_be_json(kind, tmp_path):
    with pytest.raises(TypeError, match="not JSON"):
        kind(tmp_path / "d", info={"env": object()})
    assert os.listdir(tmp_path) == []


def test_a_batch_that_does_not_fit_is_as_if_not_written(kind, tmp_path):
    with files_no_larger_than(1000), pytest.raises(OSError, match="File too large"):
        kind(tmp_path / "d")
    assert os.listdir(tmp_path) == []
    options = {"commit_seconds": 0} if kind.format == "parquet" else {}
    long = frames(70, 7000)
    long["collector", "traj_ids"].fill_(10)  # a single episode
    sink = kind(tmp_path / "d", **options)
    sink.write(frames(0, 70))
    with files_no_larger_than(9000):
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                sink.write(long)
        assert info(tmp_path / "d")["frames"] == sink.frames == 70
        assert len(load(tmp_path / "d")) == 70
    sink.write(frames(70, 7))
    sink.close()
    assert load(tmp_path / "d")["number"].tolist() == list(range(77))
    if kind is MemmapSink:
        # There is no more than the frames.
        assert (tmp_path / "d" / "frames" / "number.memmap").stat().st_size == 77 * 8


def test_each_batch_of_a_memmap_is_there_as_soon_as_it_is_written(tmp_path):
    with MemmapSink(tmp_path / "d") as sink:
        sink.write(frames(0, 7))
        with open(tmp_path / "d" / "_dataset.json") as before:
            sink.write(frames(7, 1000))
            # The record is replaced as a whole.
            assert json.load(before)["frames"] == 7
        assert (tmp_path / "d" / "frames" / "number.memmap").stat().st_size == 1007 * 8
        assert len(load(tmp_path / "d")) == 1007
        assert not info(tmp_path / "d")["complete"]
    assert info(tmp_path / "d")["complete"]


# --- as an option of collectors


def make():
    return NumberedEnv(lengths=[5, 3])


@pytest.mark.filterwarnings("ignore:split_trajs=True pads")
@pytest.mark.parametrize("more", [{}, {"split_trajs": True}, WHOLE], ids=["rows", "split", "whole"])
def test_a_collector_writes_what_it_delivers(more, kind, tmp_path):
    """For all kinds of deliveries, the property compares what any sink gets."""
    sink, seen = kind(tmp_path / "d"), []
    options = {"frames_per_batch": 20, "total_frames": 60, **more}
    with Collector([make, make], sink=sink, **options) as collector:
        seen.extend(batch.clone() for batch in collector)
    assert sink.closed
    loaded, facts = load(tmp_path / "d"), info(tmp_path / "d")
    expected = torch.cat([flat_frames(batch) for batch in seen])
    assert len(loaded) == facts["frames"] == len(expected) > 40
    assert facts["complete"]
    assert numbered_rows(loaded) == numbered_rows(expected)


def numbered_rows(frames):
    ids, numbers = frames["collector", "traj_ids"], frames["observation"][:, 0]
    return sorted(zip(ids.tolist(), numbers.tolist(), strict=True))


@pytest.mark.parametrize(
    ("total", "fails", "complete"), [(60, False, False), (-1, False, True), (-1, True, False)]
)
def test_a_collection_that_ends_early_is_complete_if_it_is_endless(
    total, fails, complete, tmp_path
):
    def collect():
        sink = MemmapSink(tmp_path / "d")
        with Collector(make, frames_per_batch=20, total_frames=total, sink=sink) as collector:
            collector.next()
            if fails:
                raise ZeroDivisionError

    if fails:
        with pytest.raises(ZeroDivisionError):
            collect()
    else:
        collect()
    facts = info(tmp_path / "d")
    assert (facts["frames"], facts["complete"]) == (20, complete)


def test_a_sink_that_fails_ends_the_collection(tmp_path):
    sink = MemmapSink(tmp_path / "d")
    collector = Collector(make, frames_per_batch=200, total_frames=400, sink=sink)
    with collector:
        collector.next()
        with files_no_larger_than(3000), pytest.raises(OSError, match="File too large"):
            collector.next()
        assert collector.closed
    facts = info(tmp_path / "d")
    assert (facts["frames"], facts["complete"]) == (200, False)


@pytest.mark.parametrize("sink", ["runs/d", []])
def test_what_is_no_sink_is_refused(sink):
    with pytest.raises(TypeError, match=r"sink must have a method write\(\)"):
        Collector(make, frames_per_batch=20, sink=sink)


SCRIPT = """
import sys
from trawl import Collector
from trawl.data import ParquetSink
if __name__ == "__main__":
    sink = ParquetSink("d")
    collector = Collector("CartPole-v1", frames_per_batch=50, total_frames=100, sink=sink)
    for batch in collector:
        {what}
"""


@pytest.mark.parametrize(("what", "status", "frames"), [("pass", 0, 100), ("raise OSError", 1, 50)])
def test_a_program_that_leaves_its_collector_open_ends_as_it_would(what, status, frames, tmp_path):
    text = SCRIPT.format(what=what)
    made = nursery.run(text, cwd=tmp_path, warn=["ignore"], finalize=True)
    assert made.returncode == status, made.stderr
    assert info(tmp_path / "d")["frames"] == frames
    assert info(tmp_path / "d")["complete"] == (status == 0)
