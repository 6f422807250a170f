"""Processes that are killed while they write, and disks that are full."""

import nursery
import pytest
from sink_parts import SINKS
from small_disk import small_disk

CRASHES = "import crash_script, sys; crash_script.main(*sys.argv[1:], seed=1)"


@pytest.mark.parametrize("kind", SINKS)
def test_what_was_committed_outlives_a_kill(kind, tmp_path):
    done = nursery.run(CRASHES, kind, tmp_path / "d")
    assert done.returncode == 0, done.stderr
    assert "5 kills" in done.stdout


# Runs where there is a disk of 1 MB.
ON_A_SMALL_DISK = """
import errno, os, sys
from crash_script import OPTIONS, checking, numbered
from sink_parts import SINKS
from trawl.data import info, load
kind = sys.argv[1]
open("disk/filler", "wb").write(bytes(500_000))
sink, at = SINKS[kind]("disk/d", **OPTIONS[kind]), 0
try:
    while True:
        sink.write(numbered(at, 50))
        at += 50
except OSError as error:
    assert error.errno == errno.ENOSPC, error
    assert error.filename == "disk/d" and "bytes free)" in error.strerror, error
kept = info("disk/d")["frames"]
assert kept == sink.frames > 100
checking(kind, "disk/d")
try:
    sink.close(complete=False)
except OSError as error:  # what waits can't be written either
    assert error.errno == errno.ENOSPC, error
assert sink.closed
assert sink.frames >= kept and not info("disk/d")["complete"]
checking(kind, "disk/d")
os.remove("disk/filler")
with SINKS[kind]("disk/d", resume=True, **OPTIONS[kind]) as sink:
    at = sink.frames
    sink.write(numbered(at, 99))
assert info("disk/d")["frames"] == at + 99 and info("disk/d")["complete"]
# The episode that was cut ends with the flag that says so, whatever comes after it.
assert load("disk/d")["number"].tolist() == list(range(at + 99))
"""


@pytest.mark.parametrize("kind", SINKS)
def test_a_full_disk_is_told_and_harms_nothing(kind, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "1m") as namespaces:
        done = nursery.run(ON_A_SMALL_DISK, kind, namespaces=namespaces, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
