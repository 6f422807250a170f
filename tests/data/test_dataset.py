"""Datasets of all formats, read back."""

import json

import pytest
import torch
from sink_parts import SINKS, frames, write

from trawl.data import info, load


@pytest.fixture(params=SINKS)
def written(request, tmp_path):
    """A dataset of 100 frames, in the order of collection, and the frames."""
    batch = frames(0, 100)
    write(SINKS[request.param], tmp_path / "d", [batch[:30], batch[30:]])
    return tmp_path / "d", batch


def test_all_frames_are_loaded(written):
    directory, batch = written
    loaded = load(directory)
    assert loaded.shape == (100,)
    assert set(loaded.keys(True, True)) == set(batch.keys(True, True))
    for key in batch.keys(True, True):
        assert loaded[key].dtype == batch[key].dtype, key
        assert torch.equal(loaded[key], batch[key]), key


@pytest.mark.parametrize(("size", "sizes"), [(30, [30, 30, 30, 10]), (50, [50, 50]), (999, [100])])
def test_frames_are_read_by_batches(size, sizes, written):
    directory, batch = written
    parts = list(load(directory, batch_size=size))
    assert [len(part) for part in parts] == sizes
    assert (torch.cat(parts) == batch).all()


def test_a_replay_buffer_is_filled_in_a_line(written):
    data = pytest.importorskip("torchrl.data")
    directory, batch = written
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(1000), batch_size=32)
    buffer.extend(load(directory))
    assert len(buffer) == 100
    assert (buffer[:] == batch).all()
    assert buffer.sample()["next", "reward"].shape == (32, 1)


def test_a_replay_buffer_is_filled_by_batches(written):
    data = pytest.importorskip("torchrl.data")
    directory, batch = written
    buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(1000))
    for part in load(directory, batch_size=30):
        buffer.extend(part)
    assert (buffer[:] == batch).all()


@pytest.mark.parametrize("size", [0, -3])
def test_no_batch_is_smaller_than_a_frame(size, written):
    with pytest.raises(ValueError, match=f"batch_size must be at least 1.* but it is {size}"):
        load(written[0], batch_size=size)


@pytest.mark.parametrize("read", [load, info])
@pytest.mark.parametrize("path", ["nowhere", "empty", "file"])
def test_no_dataset_is_said_to_be_none(read, path, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=f"{path} is not a dataset"):
        read(tmp_path / path)


def test_before_the_first_commit_there_is_nothing_to_load(tmp_path):
    with SINKS["parquet"](tmp_path / "d") as sink:
        sink.write(frames(0, 3))
        assert info(tmp_path / "d")["frames"] == 0
        with pytest.raises(FileNotFoundError, match="has no frames"):
            load(tmp_path / "d")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged"),
        (json.dumps({"format": "memmap", "version": 99}), "has format 'memmap' of version 99"),
        (json.dumps({"format": "csv", "version": 1}), "has format 'csv'"),
        ("[]", "is damaged: it must contain a JSON object"),
    ],
)
def test_what_can_not_be_read_is_said(text, words, tmp_path):
    (tmp_path / "_dataset.json").write_text(text)
    with pytest.raises(ValueError, match=words):
        info(tmp_path)
