import csv
import errno
import os
import stat
import tempfile
from pathlib import Path

import pandas
import pytest
from monitor_parts import watch

from trawl.observe import CSVSink

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(file="stats.csv"):
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


def column(name):
    return [row[name] for row in rows()]


def opened(*polls, **options):
    """A sink that has been given statistics."""
    sink = CSVSink("stats.csv", **options)
    sink.open()
    for poll in polls:
        sink.write(poll, 0)
    return sink


def test_pandas_reads_all_statistics():
    last = watch(CSVSink("stats.csv"), 2)
    table = pandas.read_csv("stats.csv")
    assert set(table.columns) == {"time", *last}
    found = table.iloc[-1]
    assert {name: found[name] for name in last} == pytest.approx(last)
    assert table["time"].is_monotonic_increasing
    assert os.listdir() == ["stats.csv"]


def test_new_statistics_get_columns():
    Path("stats.csv.new").write_text("mine")
    sink = opened({"frames": 0, "env_path": "a, b"})
    # Each row is on disk at once.
    assert column("frames") == ["0"]
    Path("stats.csv").chmod(0o640)
    sink.write({"frames": 10, "share": 0.1}, 10)
    assert column("frames") == ["0", "10"]
    sink.write({"frames": 20, "env_path": "c", "share": float("nan")}, 20)
    sink.write({"more": True}, 30)
    sink.close()
    found = rows()
    for row in found:
        assert float(row.pop("time")) > 1e9
    assert found == [
        {"frames": "0", "env_path": "a, b", "share": "", "more": ""},
        {"frames": "10", "env_path": "", "share": "0.1", "more": ""},
        {"frames": "20", "env_path": "c", "share": "nan", "more": ""},
        {"frames": "", "env_path": "", "share": "", "more": "True"},
    ]
    # Other files stay as they are, and the file keeps its permissions.
    assert Path("stats.csv.new").read_text() == "mine"
    assert sorted(os.listdir()) == ["stats.csv", "stats.csv.new"]
    assert stat.S_IMODE(Path("stats.csv").stat().st_mode) == 0o640


def test_a_file_is_continued_without_the_line_that_was_cut():
    opened({"frames": 1}, append=True).close()
    with open("stats.csv", "a") as file:
        file.write("17, 2")
    opened({"frames": 3}, {"frames": 4, "share": 1}, append=True).close()
    assert (column("frames"), column("share")) == (["1", "3", "4"], ["", "", "1"])


@pytest.mark.parametrize("content", ["", "time,fra"])
def test_an_unfinished_header_is_written_again(content):
    Path("stats.csv").write_text(content)
    opened({"frames": 1}, append=True).close()
    assert column("frames") == ["1"]


def no_file(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def no_room(*_):
    os.symlink("/dev/full", "full")
    return os.open("full", os.O_RDWR), "full"


@pytest.mark.parametrize("full", [no_file, no_room])
def test_a_full_disk_costs_no_row_that_was_written(full, monkeypatch):
    sink = opened({"frames": 1})
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full)
        with pytest.raises(OSError, match="No space left"):
            sink.write({"frames": 2, "share": 1}, 2)
    assert os.listdir() == ["stats.csv"]
    for more in ({}, {"share": 1}):
        sink.write({"frames": 3, **more}, 3)
    sink.close()
    assert column("frames") == ["1", "3", "3"]


def test_a_file_that_is_deleted_is_written_again_with_all_rows():
    sink = opened({"frames": 1})
    os.unlink(sink.file)
    for frames in (2, 3):
        sink.write({"frames": frames}, frames)
    sink.close()
    assert column("frames") == ["1", "2", "3"]


def test_another_file_in_its_place_is_left_alone():
    sink = opened({"frames": 1})
    os.rename(sink.file, "kept.csv")
    Path(sink.file).write_text("other")
    with pytest.raises(FileExistsError, match="another file is in its place"):
        sink.write({"frames": 2}, 2)
    sink.close()
    assert Path(sink.file).read_text() == "other"
    assert "1" in Path("kept.csv").read_text()
