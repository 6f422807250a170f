"""Parquet datasets, and who else reads them."""

import os

import nursery
import pytest
import torch
from sink_parts import frames, write
from tensordict import NonTensorData, stack

from trawl.data import ParquetSink, info, load

pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def written(tmp_path):
    batch = frames(0, 100, image=torch.arange(600).reshape(100, 2, 3).to(torch.uint8))
    write(ParquetSink, tmp_path / "d", [batch[:40], batch[40:]])
    return tmp_path / "d" / "frames", batch


def test_a_row_is_a_frame(written):
    directory, batch = written
    table = pq.read_table(directory)
    assert table["next.reward"].to_pylist() == batch["next", "reward"].flatten().tolist()
    assert table["observation"].to_pylist() == batch["observation"].tolist()
    assert table["image"].to_pylist() == batch["image"].flatten(1).tolist()
    assert str(table.schema.field("observation").type) == "fixed_size_list<element: float>[2]"
    about = table.schema.field("image").metadata
    assert about == {b"shape": b"[2, 3]", b"dtype": b"uint8"}


def test_pandas_reads_it(written):
    pandas = pytest.importorskip("pandas")
    directory, batch = written
    table = pandas.read_parquet(directory)
    assert table["next.reward"].sum() == batch["next", "reward"].sum()
    assert table["observation"][3].tolist() == [3, -3]
    lengths = table.groupby("collector.traj_ids").size()
    assert lengths.tolist() == [7] * 14 + [2]
    assert pandas.read_parquet(directory.parent).equals(table)


def test_pandas_reads_the_whole_dataset_while_it_is_written(tmp_path):
    pandas = pytest.importorskip("pandas")
    with ParquetSink(tmp_path / "d", commit_seconds=0) as sink:
        sink.write(frames(0, 7))
        assert (sink.frames, sink.waiting) == (7, 0)
        assert len(pandas.read_parquet(tmp_path / "d")) == 7


def test_text_is_a_column_of_strings(tmp_path):
    texts = ["", "é", "a\nb", "\0", "x" * 1000]
    entry = stack([NonTensorData(text) for text in texts])
    with ParquetSink(tmp_path / "d", commit_bytes=1000) as sink:
        sink.write(frames(0, 5).set(("next", "said"), entry))
        assert sink.frames == 5, "bytes of text were not counted"
    assert pq.read_table(tmp_path / "d")["next.said"].to_pylist() == texts
    assert list(load(tmp_path / "d")["next", "said"]) == texts
    with ParquetSink(tmp_path / "d", resume=True) as sink:
        with pytest.raises(ValueError, match=r"was text, but in this batch it is torch\.float32"):
            sink.write(frames(0, 5).set(("next", "said"), torch.ones(5)))
        sink.write(frames(0, 5).set(("next", "said"), entry))
    assert list(load(tmp_path / "d")["next", "said"]) == texts * 2


def test_polars_reads_it(written):
    polars = pytest.importorskip("polars")
    directory, batch = written
    table = polars.read_parquet(directory / "*.parquet")
    assert table["next.reward"].sum() == batch["next", "reward"].sum()
    assert table.schema["observation"] == polars.Array(polars.Float32, 2)
    assert table["observation"][3].to_list() == [3, -3]


def test_duckdb_reads_it(written):
    duckdb = pytest.importorskip("duckdb")
    directory, batch = written
    query = f"""select sum("next.reward"), count(*), max(observation[1])
                from '{directory}/*.parquet' where "collector.traj_ids" < 10"""
    kept = batch[batch["collector", "traj_ids"] < 10]
    assert duckdb.sql(query).fetchall() == [(kept["next", "reward"].sum(), 70, 69)]


def test_datasets_of_hugging_face_read_it(written, tmp_path):
    datasets = pytest.importorskip("datasets")
    directory, batch = written
    found = datasets.load_dataset(
        "parquet", data_files=f"{directory}/*.parquet", split="train", cache_dir=str(tmp_path)
    )
    assert found["next.reward"][:] == batch["next", "reward"].flatten().tolist()
    assert found[3]["observation"] == [3, -3]


def test_names_that_would_be_one_are_refused(tmp_path):
    batch = frames(0, 4).update({"a.b": torch.ones(4), ("a", "b"): torch.ones(4)})
    with (
        pytest.raises(ValueError, match=r"would both be the column 'a\.b'"),
        ParquetSink(tmp_path / "d") as sink,
    ):
        sink.write(batch)


def test_files_are_written_as_they_fill(tmp_path):
    with ParquetSink(tmp_path / "d", commit_bytes=4000, commit_seconds=1000) as sink:
        for start in range(0, 700, 7):
            sink.write(frames(start, 7))
            assert sink.frames + sink.waiting == start + 7
            assert sink.waiting < 100, "more is held in memory than was said"
        assert len(load(tmp_path / "d")) == sink.frames > 600
    names = sorted(os.listdir(tmp_path / "d" / "frames"))
    assert names == [f"{number:08d}.parquet" for number in range(len(names))]
    assert 7 < len(names) < 20
    assert load(tmp_path / "d")["number"].tolist() == list(range(700))


def test_commit_writes_what_waits(tmp_path):
    with ParquetSink(tmp_path / "d") as sink:
        sink.write(frames(0, 7))
        assert (sink.frames, sink.waiting) == (0, 7)
        with pytest.raises(FileNotFoundError, match="has no frames"):
            load(tmp_path / "d")
        sink.commit()
        assert len(load(tmp_path / "d")) == sink.frames == 7
    assert info(tmp_path / "d")["complete"]


def test_limits_are_not_negative(tmp_path):
    for name in ("commit_bytes", "commit_seconds"):
        with pytest.raises(ValueError, match=f"{name} must not be negative, but it is -1"):
            ParquetSink(tmp_path / "d", **{name: -1})
    assert os.listdir(tmp_path) == []


def test_without_pyarrow_the_extra_is_named(tmp_path):
    code = """if True:
        import sys
        sys.modules["pyarrow"] = None  # as if it were not there
        from trawl.data import MemmapSink, MinariSink, ParquetSink
        for kind in (ParquetSink, MinariSink):
            try:
                kind("d")
            except ImportError as error:
                print(error)
    """
    done = nursery.run(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "pip install 'trawl-rl[parquet]'" in done.stdout
    assert "pip install 'trawl-rl[minari]'" in done.stdout
    assert os.listdir(tmp_path) == []
