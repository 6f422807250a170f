import csv
import errno
import os
import stat
import tempfile
from pathlib import Path

import pandas
import pytest
from monitor_parts import make, watch

from trawl.observe import CSVSink, Monitor

pytestmark = pytest.mark.usefixtures("nothing_left")


def rows(file):
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.mark.parametrize("workers", [0, 2])
def test_pandas_reads_all_statistics(workers, tmp_path):
    file = tmp_path / "stats.csv"
    last = watch(CSVSink(file), workers)
    table = pandas.read_csv(file)
    assert set(table.columns) == {"time", *last}
    found = table.iloc[-1]
    assert {name: found[name] for name in last} == pytest.approx(last)
    assert table["time"].is_monotonic_increasing
    assert os.listdir(tmp_path) == ["stats.csv"]


def write(sink, *polls):
    sink.open()
    for poll in polls:
        sink.write(poll, 0)
    sink.close()


def test_new_statistics_get_columns(tmp_path):
    file = tmp_path / "stats.csv"
    write(
        CSVSink(file),
        {"frames": 0, "env_path": "a, b"},
        {"frames": 10, "share": 0.1},
        {"frames": 20, "env_path": "c", "share": float("nan")},
        {"more": True},
    )
    found = rows(file)
    for row in found:
        assert float(row.pop("time")) > 1e9
    assert found == [
        {"frames": "0", "env_path": "a, b", "share": "", "more": ""},
        {"frames": "10", "env_path": "", "share": "0.1", "more": ""},
        {"frames": "20", "env_path": "c", "share": "nan", "more": ""},
        {"frames": "", "env_path": "", "share": "", "more": "True"},
    ]


def test_each_row_is_on_disk_at_once(tmp_path):
    file = tmp_path / "stats.csv"
    sink = CSVSink(file)
    sink.open()
    for frames in range(3):
        sink.write({"frames": frames}, frames)
        assert [row["frames"] for row in rows(file)] == [str(i) for i in range(frames + 1)]
    sink.close()


def test_a_file_is_continued_without_the_line_that_was_cut(tmp_path):
    file = tmp_path / "stats.csv"
    write(CSVSink(file, append=True), {"frames": 1})
    with open(file, "a") as opened:
        opened.write("17, 2")
    write(CSVSink(file, append=True), {"frames": 3}, {"frames": 4, "share": 1})
    found = [(row["frames"], row["share"]) for row in rows(file)]
    assert found == [("1", ""), ("3", ""), ("4", "1")]


@pytest.mark.parametrize("content", ["", "time,fra"])
def test_an_unfinished_header_is_written_again(content, tmp_path):
    file = tmp_path / "stats.csv"
    file.write_text(content)
    write(CSVSink(file, append=True), {"frames": 1})
    assert [row["frames"] for row in rows(file)] == ["1"]


def test_a_file_is_never_overwritten(tmp_path):
    file = tmp_path / "stats.csv"
    file.write_text("mine")
    with make(0) as collector:
        with pytest.raises(FileExistsError, match="pass another file"):
            Monitor(collector, [CSVSink(file)])
        with pytest.raises(ValueError, match="not written by a CSVSink"):
            Monitor(collector, [CSVSink(file, append=True)])
        file.write_bytes(b"\xff\xfe\n")
        with pytest.raises(ValueError, match="not written by a CSVSink"):
            Monitor(collector, [CSVSink(file, append=True)])
    assert file.read_bytes() == b"\xff\xfe\n"


@pytest.mark.parametrize("append", [False, True])
def test_a_file_that_can_not_be_written_is_an_error_at_once(append, tmp_path):
    with make(0) as collector:
        with pytest.raises(FileNotFoundError, match=r"pass another file.*none/stats.csv"):
            Monitor(collector, [CSVSink(tmp_path / "none" / "stats.csv", append)])
        with pytest.raises(IsADirectoryError if append else FileExistsError):
            Monitor(collector, [CSVSink(tmp_path, append)])


def test_a_full_disk_costs_no_row_that_was_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    file = tmp_path / "stats.csv"
    sink = CSVSink(file)
    sink.open()
    sink.write({"frames": 1}, 1)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full)
        with pytest.raises(OSError, match="No space left"):
            sink.write({"frames": 2, "share": 1}, 2)
    sink.write({"frames": 3, "share": 1}, 3)
    sink.close()
    assert [row["frames"] for row in rows(file)] == ["1", "3"]


def test_a_disk_that_is_full_to_the_end_costs_no_row_either(tmp_path, monkeypatch):
    def full(*_):
        link = tmp_path / "full"
        link.symlink_to("/dev/full")
        return os.open(link, os.O_RDWR), str(link)

    file = tmp_path / "stats.csv"
    sink = CSVSink(file)
    sink.open()
    sink.write({"frames": 1}, 1)
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "mkstemp", full)
        with pytest.raises(OSError, match="No space left"):
            sink.write({"frames": 2, "share": 1}, 2)
    assert os.listdir(tmp_path) == ["stats.csv"]
    sink.write({"frames": 3}, 3)
    sink.close()
    assert [row["frames"] for row in rows(file)] == ["1", "3"]


def test_other_files_stay_as_they_are(tmp_path):
    file = tmp_path / "stats.csv"
    other = tmp_path / "stats.csv.new"
    other.write_text("mine")
    write(CSVSink(file), {"frames": 0}, {"frames": 10, "share": 0.1})
    assert other.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["stats.csv", "stats.csv.new"]


def test_the_file_keeps_its_permissions(tmp_path):
    file = tmp_path / "stats.csv"
    sink = CSVSink(file)
    sink.open()
    file.chmod(0o640)
    sink.write({"frames": 0}, 0)
    sink.close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "pipe"])
def test_devices_and_pipes_are_not_continued(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(ValueError, match=f"{path} is not a regular file: pass another file"):
        CSVSink(path, append=True).open()


def test_a_file_that_is_deleted_is_written_again_with_all_rows(tmp_path):
    sink = CSVSink(tmp_path / "stats.csv")
    sink.open()
    sink.write({"frames": 1}, 1)
    os.unlink(sink.file)
    for frames in (2, 3):
        sink.write({"frames": frames}, frames)
    sink.close()
    with open(sink.file, newline="") as file:
        assert [row["frames"] for row in csv.DictReader(file)] == ["1", "2", "3"]


def test_another_file_in_its_place_is_left_alone(tmp_path):
    sink = CSVSink(tmp_path / "stats.csv")
    sink.open()
    sink.write({"frames": 1}, 1)
    os.rename(sink.file, tmp_path / "kept.csv")
    Path(sink.file).write_text("other")
    with pytest.raises(FileExistsError, match="another file is in its place"):
        sink.write({"frames": 2}, 2)
    sink.close()
    assert Path(sink.file).read_text() == "other"
    assert "1" in (tmp_path / "kept.csv").read_text()
