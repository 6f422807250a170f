"""Formats of datasets, and sinks for statistics, that packages add."""

from pathlib import Path

import packages
import pytest

PROJECT = """
[project]
name = "some-sinks"
version = "1.0"

[project.entry-points."trawl.sinks"]
plain = "sinks:PlainSink"
number = "sinks:NUMBER"

[project.entry-points."trawl.stats_sinks"]
plain = "sinks:PlainSink"
"""
MODULE = """
import io
import numpy as np
import torch
from tensordict import TensorDict
from trawl.data import FilesSink

NUMBER = 3

class PlainSink(FilesSink):
    format = "plain"
    suffix = "bin"

    @classmethod
    def write_file(cls, file, rows, entries):
        for entry in entries:
            np.save(file, rows[entry.key].numpy())

    @classmethod
    def read_file(cls, file, entries):
        found = [(entry.key, torch.from_numpy(np.load(file))) for entry in entries]
        rows = TensorDict(batch_size=[len(found[0][1])])
        for key, value in found:
            rows[key] = value
        return rows
"""
BEGIN = """
import os, shutil, torch
from tensordict import TensorDict
from trawl.data import info, load
from sinks import PlainSink

def rows(start, count, dtype=torch.float32):
    numbers = torch.arange(start, start + count, dtype=dtype)
    return TensorDict({"a": numbers, "next": {"b": numbers[:, None] * 2}}, [count])

def refused(kind, call):
    try:
        call()
    except kind as error:
        print(error)
    else:
        raise AssertionError("nothing was raised")

with PlainSink("there", commit_bytes=0) as sink:
    sink.write(rows(0, 4))
    sink.write(rows(4, 3))
"""


@pytest.fixture
def run(tmp_path: Path):
    """Runs code where the package is installed."""
    packages.install(tmp_path / "site", PROJECT, {"sinks.py": MODULE})
    return lambda code: packages.run(BEGIN + code, tmp_path / "site", here=tmp_path)


def test_frames_are_written_read_and_continued(run) -> None:
    run(
        """
if os.fork() == 0:
    sink = PlainSink("there", resume=True)
    sink.write(rows(7, 2))
    sink.commit()
    sink.write(rows(9, 5))
    os._exit(0)
os.wait()
assert (load("there") == rows(0, 9)).all() and not info("there")["complete"]
# A process that is killed may leave a file that doesn't count yet.
shutil.copy("there/frames/00000000.bin", "there/frames/00000003.bin")
with PlainSink("there", resume=True) as sink:
    assert sorted(os.listdir("there/frames")) == [f"0000000{n}.bin" for n in range(3)]
    sink.write(rows(9, 3))
assert sorted(os.listdir("there/frames")) == [f"0000000{n}.bin" for n in range(4)]
assert info("there")["format"] == "plain" and info("there")["complete"]
assert (load("there") == rows(0, 12)).all()
assert [len(part) for part in load("there", batch_size=5)] == [5, 5, 2]
assert (torch.cat(list(load("there", batch_size=5))) == rows(0, 12)).all()
"""
    )


def test_damage_is_found(run) -> None:
    found = run(
        """
def replace(frames):
    with PlainSink("other") as sink:
        sink.write(frames)
    shutil.move("other/frames/00000000.bin", last)
    shutil.rmtree("other")

shutil.copytree("there", "whole")
last = "there/frames/00000001.bin"
for damage in (
    lambda: open(last, "wb").close(),
    lambda: os.remove(last),
    lambda: replace(rows(4, 2)),
    lambda: replace(rows(4, 3, torch.int64)),
):
    damage()
    refused(ValueError, lambda: load("there"))
    refused(ValueError, lambda: list(load("there", batch_size=2)))
    refused(ValueError, lambda: PlainSink("there", resume=True))
    shutil.rmtree("there")
    shutil.copytree("whole", "there")
"""
    )
    for what in (
        "00000001.bin is damaged: No data left",
        "it lacks the file 'frames/00000001.bin'",
        "it records 7 frames, but the files hold 6",
        "00000001.bin is damaged: entry 'a' was torch.float32 of shape ()",
    ):
        assert found.count(what) == 3


def test_what_is_no_sink(run) -> None:
    found = run(
        """
from pathlib import Path
from trawl.extras.cli import main
for name in ("number", "other"):
    text = Path("there/_dataset.json").read_text()
    Path("there/_dataset.json").write_text(text.replace('"plain"', f'"{name}"'))
    refused((ImportError, ValueError), lambda: load("there"))
    Path("there/_dataset.json").write_text(text)
common = ["collect", "CartPole-v1", "--frames", "10", "--out", "new"]
for arguments in (["--format", "number"], ["--format", "other"], ["--log", "plain:x"]):
    assert main([*common, *arguments]) == 2
"""
    )
    number = "the entry point number = 'sinks:NUMBER' of trawl.sinks, in the package some-sinks 1.0"
    assert found.count(f"{number}, must name a subclass of trawl.data.Sink, but it names 3") == 2
    assert "has format 'other' of version 1, but this version of Trawl reads memmap, " in found
    assert "--format other is unknown: the formats are memmap, minari, parquet, plain" in found
    assert "must name a subclass of trawl.observe.StatsSink, but it names <class" in found
