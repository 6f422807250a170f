import os
import resource
from contextlib import contextmanager

import pytest
import torch
from tensordict import MemoryMappedTensor, NonTensorData, TensorDict, stack

from trawl import Collector
from trawl.data import MemmapSink, info, load
from trawl.data.sinks.entries import flat_frames


def frames(start, count, **more):
    values = torch.arange(start, start + count)
    rows = {
        "observation": torch.stack([values, -values], -1).float(),
        "next": {"reward": values.double().unsqueeze(-1)},
        ("collector", "traj_ids"): values // 7,
        **more,
    }
    return TensorDict(rows, [count])


def write(directory, batches, **facts):
    with MemmapSink(directory, facts) as sink:
        for batch in batches:
            sink.write(batch)


@contextmanager
def files_no_larger_than(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("envs", ["CartPole-v1", ["CartPole-v1"] * 3], ids=["one", "three"])
def test_collected_frames_are_read_back(envs, tmp_path):
    seen = []
    with Collector(envs, frames_per_batch=90, total_frames=360) as collector:
        collector.set_seed(0)
        with MemmapSink(tmp_path / "d") as sink:
            for batch in collector:
                sink.write(batch)
                seen.append(batch.reshape(-1).clone())
    loaded = load(tmp_path / "d")
    assert loaded.shape == (360,)
    assert set(loaded.keys(True, True)) == set(seen[0].keys(True, True))
    assert (loaded == torch.cat(seen)).all()


def test_tensordict_loads_it_by_itself(tmp_path):
    batch = frames(0, 10)
    write(tmp_path / "d", [batch])
    loaded = TensorDict.load_memmap(tmp_path / "d" / "frames")
    assert isinstance(loaded["observation"], MemoryMappedTensor)
    assert (loaded == batch).all()


def test_batches_lie_one_after_the_other(tmp_path):
    write(tmp_path / "d", [frames(0, 5), frames(5, 1), frames(6, 30)])
    assert (load(tmp_path / "d") == frames(0, 36)).all()


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64],
    ids=str,
)
def test_dtypes_are_kept(dtype, tmp_path):
    value = torch.randint(0, 2, (6, 2, 3)).to(dtype)
    write(tmp_path / "d", [frames(0, 6, value=value)])
    loaded = load(tmp_path / "d")["value"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded, value)


def test_odd_shapes_and_names_are_kept(tmp_path):
    more = {"nothing": torch.empty(4, 0), "a/b": torch.ones(4), ("deep", "er", "x"): torch.ones(4)}
    write(tmp_path / "d", [frames(0, 4).update(more)])
    loaded = load(tmp_path / "d")
    assert loaded["nothing"].shape == (4, 0)
    assert loaded["a/b"].shape == loaded["deep", "er", "x"].shape == (4,)


def test_views_of_larger_memory_are_written_right(tmp_path):
    batch = frames(0, 24).reshape(4, 6)[:, 1:5:2]
    write(tmp_path / "d", [batch])
    assert (load(tmp_path / "d") == batch.reshape(-1)).all()


def test_masked_rows_are_left_out():
    batch = frames(0, 6)
    mask = torch.tensor([True, False, True, True, False, True])
    # Entries may have the shape of flags.
    for deep in (mask, mask.unsqueeze(-1)):
        batch["collector", "mask"] = deep
        flat = flat_frames(batch)
    assert flat["collector", "traj_ids"].shape == (4,)
    assert ("collector", "mask") not in flat.keys(True)
    assert flat["next", "reward"].flatten().tolist() == [0, 2, 3, 5]


def test_rows_that_were_not_stepped_are_left_out():
    batch = frames(0, 4)
    batch["collector", "traj_ids"][2:] = -1
    assert len(flat_frames(batch)) == 2


def test_info_says_what_it_was_given(tmp_path):
    write(tmp_path / "d", [frames(0, 3)], env="X-v0", seed=3)
    facts = info(tmp_path / "d")
    assert facts == {
        "format": "memmap",
        "version": 1,
        "frames": 3,
        "complete": True,
        "env": "X-v0",
        "seed": 3,
    }


def test_each_batch_is_there_as_soon_as_it_is_written(tmp_path):
    with MemmapSink(tmp_path / "d") as sink:
        sink.write(frames(0, 1000))
        # Already on disk, and not gathered in memory.
        sizes = [path.stat().st_size for path in (tmp_path / "d").rglob("*.memmap")]
        assert sorted(sizes) == [8000, 8000, 8000]
        assert (load(tmp_path / "d") == frames(0, 1000)).all()
        assert not info(tmp_path / "d")["complete"]
    assert os.listdir(tmp_path) == ["d"]
    assert sorted(os.listdir(tmp_path / "d")) == ["_dataset.json", "frames"]
    assert info(tmp_path / "d")["complete"]


def test_an_error_keeps_the_batches_before(tmp_path):
    def batches():
        yield frames(0, 8)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "d", batches())
    assert info(tmp_path / "d")["complete"] is False
    assert len(load(tmp_path / "d")) == 8


def test_without_frames_there_is_no_dataset(tmp_path):
    with MemmapSink(tmp_path / "d") as sink:
        sink.write(frames(0, 0))
    assert os.listdir(tmp_path) == []


def test_parents_are_made(tmp_path):
    write(tmp_path / "a" / "b" / "d", [frames(0, 2)])
    assert len(load(tmp_path / "a" / "b" / "d")) == 2


@pytest.mark.parametrize("kind", ["directory", "file", "dangling link"])
def test_what_exists_is_left_alone(kind, tmp_path):
    path = tmp_path / "d"
    {
        "directory": path.mkdir,
        "file": lambda: path.write_text("mine"),
        "dangling link": lambda: path.symlink_to(tmp_path / "nowhere"),
    }[kind]()
    with pytest.raises(FileExistsError, match="already exists"):
        MemmapSink(path)
    assert os.listdir(tmp_path) == ["d"]


def test_a_parent_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        MemmapSink(tmp_path / "file" / "d")


def test_a_batch_that_does_not_fit_on_the_disk_is_as_if_not_added(tmp_path):
    sink = MemmapSink(tmp_path / "d")
    sink.write(frames(0, 5000))
    with files_no_larger_than(100_000):
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                sink.write(frames(5000, 20_000))
        assert (load(tmp_path / "d") == frames(0, 5000)).all()
        sink.close(complete=False)
    assert (load(tmp_path / "d") == frames(0, 5000)).all()
    sizes = [path.stat().st_size for path in (tmp_path / "d").rglob("*.memmap")]
    assert sorted(sizes) == [40_000, 40_000, 40_000], "there is more than the frames"


def test_after_a_batch_that_did_not_fit_others_go_on(tmp_path):
    with MemmapSink(tmp_path / "d") as sink:
        sink.write(frames(0, 5000))
        with files_no_larger_than(100_000), pytest.raises(OSError, match="File too large"):
            sink.write(frames(5000, 20_000))
        sink.write(frames(5000, 100))
    assert (load(tmp_path / "d") == frames(0, 5100)).all()


def test_no_room_at_the_start_leaves_nothing(tmp_path):
    with files_no_larger_than(1000), pytest.raises(OSError, match="File too large"):
        MemmapSink(tmp_path / "d")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        (frames(0, 3).exclude("observation"), ValueError, "lacks \\['observation'\\]"),
        (frames(0, 3, more=torch.ones(3)), ValueError, "adds \\['more'\\]"),
        (frames(0, 3).float(), ValueError, "was torch.float64 .* but in this batch"),
        (frames(0, 3, observation=torch.ones(3, 5)), ValueError, r"shape \(5,\)"),
    ],
    ids=["fewer", "more", "dtype", "shape"],
)
def test_batches_must_be_alike(batch, error, words, tmp_path):
    with MemmapSink(tmp_path / "d") as sink:
        sink.write(frames(0, 3))
        with pytest.raises(error, match=words):
            sink.write(batch)
    assert len(load(tmp_path / "d")) == 3


def test_text_is_refused(tmp_path):
    texts = stack([NonTensorData(text) for text in "abc"])
    with (
        pytest.raises(
            TypeError, match=r"memmap can't hold text, but entry 'text' is text: use .* parquet"
        ),
        MemmapSink(tmp_path / "d") as sink,
    ):
        sink.write(frames(0, 3).set("text", texts))
    assert os.listdir(tmp_path) == []


def test_a_file_that_lacks_bytes_is_damaged(tmp_path):
    write(tmp_path / "d", [frames(0, 1000)])
    (path,) = (tmp_path / "d").rglob("reward.memmap")
    os.truncate(path, 7999)
    with pytest.raises(ValueError, match="is damaged: it has 7999 bytes, but 8000 were written"):
        load(tmp_path / "d")


def test_the_process_may_go_to_another_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with MemmapSink("d") as sink:
        sink.write(frames(0, 3))
        monkeypatch.chdir("elsewhere")
        sink.write(frames(3, 3))
    assert (load(tmp_path / "d") == frames(0, 6)).all()
    assert os.listdir() == []


def test_tensordict_loads_what_was_resumed(tmp_path):
    write(tmp_path / "d", [frames(0, 10)])
    with MemmapSink(tmp_path / "d", resume=True) as sink:
        sink.write(frames(10, 5).exclude("collector").update(frames(0, 5).select("collector")))
    alone = TensorDict.load_memmap(tmp_path / "d" / "frames")
    assert alone.shape == (15,)
    assert (alone == load(tmp_path / "d")).all()
