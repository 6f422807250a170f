"""The command in processes: workers, signals, pipes, terminals, full disks."""

import os
import re
import signal
import subprocess
import sys
import time
from glob import glob
from importlib.metadata import entry_points, version
from pathlib import Path

import nursery
import pytest
from cli_parts import PATIENCE, collected, start, trawl
from small_disk import small_disk

from trawl.data import info, load

# --- workers of a command in this process


def ended(policy, frames, *more):
    """A run of workers that a policy ends; gives its exit code, output, and messages."""
    return trawl("collect", "Pendulum-v1", "--policy", f"cli_policies:{policy}", "--frames", frames,
                 "--frames-per-batch", 100, "--out", "d", *more)  # fmt: skip


@pytest.mark.parametrize("order", ["--sync", "--async"])
def test_a_failing_policy_is_told_with_its_worker(order):
    code, _, err = ended("fails", 2000, "--workers", 2, order, "--traceback")
    assert code == 2
    # The traceback is that of the worker.
    assert 'raise ValueError("no more' in err
    last = err.splitlines()[-1]
    assert "collection failed: ValueError: no more (while collecting from " in last
    kept = len(load("d"))
    assert re.search(rf"; in worker [01]\); kept the {kept} frames", last)
    # Each worker's policy acts 250 times. The call before collection, to see what it gives, counts
    # no step.
    assert kept == 500 if order == "--sync" else 200 <= kept <= 500
    assert kept % 100 == 0
    assert not info("d")["complete"]


@pytest.mark.parametrize(
    ("policy", "workers", "words", "frames"),
    [
        ("leaves", 2, "SystemExit: enough (in worker ", 200),
        # Each has collected a batch, and ten took the place of another.
        ("dies", 1, "WorkerDied: worker 0 was killed by SIGKILL", 1100),
    ],
)
def test_a_worker_that_leaves_or_always_dies_is_an_error(policy, workers, words, frames):
    code, _, err = ended(policy, 2000, "--workers", workers)
    assert code == 2
    assert "Traceback" not in err
    assert f"collection failed: {words}" in err.splitlines()[-1]
    assert len(load("d")) == frames


@pytest.mark.parametrize("order", ["--sync", "--async"])
def test_a_worker_that_dies_is_replaced(order):
    code, out, err = ended("dies_once", 1000, "--workers", 2, order)
    assert code == 0
    assert "was killed by SIGKILL; a new worker takes its place" in err
    assert "  1 restart  " in err.splitlines()[-1]
    assert re.search(f"workers  2, {order[2:]}.*; .*; 1 restart", out)
    assert len(load("d")) == 1000
    assert info("d")["complete"]
    facts = info("d")["workers"]
    assert (facts["restarts"], sum(facts["frames"])) == (1, 1000)
    assert (facts["count"], facts["sync"]) == (2, order == "--sync")


@pytest.mark.parametrize("workers", [0, 2])
def test_warnings_are_told_once_in_lines_without_escape_codes(workers):
    # This environment warns in colours.
    code, out, err = trawl("collect", "CartPole-v0", "--frames", 100, "--workers", workers,
                           "--out", "e")  # fmt: skip
    assert code == 0
    assert "\x1b" not in out + err
    assert err.count("is out of date") == 1
    notes = [line for line in err.splitlines() if not line.startswith("CartPole-v0  100/100 frame")]
    assert all(line.startswith("trawl: note: ") for line in notes)
    if workers:
        code, _, err = ended("warns", 100, "--workers", 2)
        assert code == 0
        (note,) = [line for line in err.splitlines() if "note" in line]
        assert re.fullmatch(r"trawl: note: in worker [01]: how odd", note)


# --- in a process of its own


@pytest.fixture
def started():
    """Starts a collection with one of the policies; ended in any case."""
    processes = []

    def begin(policy, *arguments, **options):
        process = start(
            "collect", "Pendulum-v1", "--policy", f"cli_policies:{policy}", "--out", "d",
            "--frames", 4000, "--frames-per-batch", 200, *arguments,
            cwd=".",
            env={"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
            session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )  # fmt: skip
        processes.append(process)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def read_until(stream, words):
    """Reads lines up to the one that has these words."""
    for line in stream:
        if words in line:
            return
    raise AssertionError(f"{words!r} did not come")


def members(session):
    """The processes of a session that still live."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                state, _, _, own = file.read().rpartition(") ")[2].split()[:4]
        except OSError:
            continue
        if int(own) == session and state != "Z":
            found.add(int(name))
    return found


def wait_until(reached):
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_until_gone(process):
    wait_until(lambda: not members(process.pid))


@pytest.mark.parametrize("order", [["--workers", 2, "--sync"], ["--workers", 2, "--async"]])
def test_ctrl_c_ends_it_after_the_batch(order, started):
    # The policies are held when there are two batches: one of each.
    process = started("held", *order)
    read_until(process.stderr, "400/4,000 frames")
    # A terminal sends it to all of them.
    os.killpg(process.pid, signal.SIGINT)
    told = process.stderr.readline()
    assert told == "finishing this batch; press Ctrl-C again to stop at once\n"
    Path("go").touch()
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    kept = len(load("d"))
    assert 400 <= kept < 4000
    assert kept % 200 == 0
    ended = f"trawl: interrupted; kept the {kept:,} frames collected so far, in d"
    assert err.splitlines()[-1] == ended
    assert not info("d")["complete"]
    assert f"{kept:,} in " in out
    wait_until_gone(process)


def test_a_second_ctrl_c_ends_it_at_once(started):
    # Both policies get stuck at their step 151.
    process = started("stuck", "--workers", 2, "--frames", 2000)
    read_until(process.stderr, "200/2,000 frames")
    wait_until(lambda: len(glob("stuck-*")) == 2)
    os.killpg(process.pid, signal.SIGINT)
    read_until(process.stderr, "finishing this batch")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    kept = "trawl: interrupted; kept the 200 frames collected so far, in d"
    assert (process.returncode, err.splitlines()[-1]) == (130, kept)
    assert len(load("d")) == 200
    wait_until_gone(process)


def test_a_kill_leaves_the_batches_before_and_no_process(started):
    process = started("held", "--workers", 2)
    read_until(process.stderr, "400/4,000 frames")
    assert len(members(process.pid)) >= 3
    process.kill()
    process.wait()
    wait_until_gone(process)
    frames = len(load("d"))
    assert frames >= 400
    assert frames % 200 == 0
    assert not info("d")["complete"]


def test_a_reader_that_leaves_is_no_error():
    collected("Pendulum-v1", "--frames", 100)
    reading, writing = os.pipe()
    os.close(reading)
    process = start("show", "d", stdout=writing, stderr=subprocess.PIPE, cwd=".")
    os.close(writing)
    _, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    assert "Error" not in err


# --- in a fresh interpreter

(_SCRIPT,) = entry_points(group="console_scripts", name="trawl")
# The script, which does not wait for torch before it has to.
_QUICK = f"""
import sys, {_SCRIPT.module}
code = {_SCRIPT.module}.{_SCRIPT.attr}()
assert not {{'torch', 'gymnasium', 'matplotlib'}} & set(sys.modules)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("argument", "code", "words"),
    [
        ("--version", 0, f"trawl {version('trawl-rl')}"),
        ("--help", 0, "collect"),
        ("gather", 2, "--help"),
    ],
)
def test_the_script_ends_soon_and_with_the_exit_code(argument, code, words):
    done = subprocess.run([sys.executable, "-c", _QUICK, argument], capture_output=True, text=True)
    assert (done.returncode, bool(done.stderr)) == (code, code == 2)
    assert words in done.stdout + done.stderr


def test_the_library_does_without():
    # Without the compiler, it starts in half the time.
    code = (
        "import sys, trawl.lean; trawl.lean.import_lean(); "
        "import trawl.data; trawl.Collector; heavy = {'tyro', 'rich', 'matplotlib', "
        "'trawl.extras', 'pyarrow', 'minari', 'pandas', 'h5py'}; "
        "assert not heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- full disks

# Runs where there is a disk of 600 kB.
ON_A_SMALL_DISK = """
import os
from trawl.extras.cli import main
from trawl.data import load, info
code = main(["collect", "Pendulum-v1", "--frames", "100000", "--frames-per-batch", "1000",
             "--seed", "1", "--out", "disk/d"])
frames = len(load("disk/d"))
assert info("disk/d")["frames"] == frames and not info("disk/d")["complete"]
assert os.listdir("disk") == ["d"], os.listdir("disk")
# Now there is hardly any room left.
again = main(["collect", "Pendulum-v1", "--frames", "100000", "--frames-per-batch", "20000",
              "--out", "disk/e"])
assert os.listdir("disk") == ["d"], os.listdir("disk")
print(code, again, frames)
"""


def test_a_full_disk_keeps_what_fits(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, "600k") as namespaces:
        done = nursery.run(ON_A_SMALL_DISK, namespaces=namespaces, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, again, frames = map(int, done.stdout.split()[-3:])
    assert (first, again) == (2, 2)
    assert frames >= 5000
    errors = [line for line in done.stderr.splitlines() if line.startswith("trawl: ")]
    assert errors == [
        "trawl: disk/d can't be written: No space left on device (0 bytes free); "
        f"kept the {frames:,} frames collected so far, in disk/d",
        "trawl: disk/e can't be written: No space left on device (0 bytes free); "
        "no batch was complete, so nothing was written",
    ]
