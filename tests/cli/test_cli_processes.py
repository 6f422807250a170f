"""The command in a process of its own: exit codes, signals, pipes, terminals, full disks."""

import os
import pty
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points, version

import nursery
import pytest
from cli_parts import PATIENCE, TRAWL, run
from cli_parts import start as start_command
from small_disk import small_disk

from trawl.data import info, load


@pytest.fixture
def started(tmp_path):
    """Starts a collection with one of the policies; ended in any case."""
    processes = []

    def start(policy, *arguments):
        process = start_command(
            "collect", "Pendulum-v1", "--policy", f"cli_policies:{policy}", "--out", "d",
            "--frames", 2000, "--frames-per-batch", 100, *arguments,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def read_until(stream, words):
    """Reads lines up to the one that has these words."""
    for line in stream:
        if words in line:
            return
    raise AssertionError(f"{words!r} did not come")


def test_ctrl_c_ends_it_after_the_batch(started, tmp_path):
    process = started("slow")
    read_until(process.stderr, "200/2,000 frames")
    time.sleep(0.05)  # into the third batch, which takes 0.1 s, unless the machine is busy
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    frames = load(tmp_path / "d")
    assert 200 <= len(frames) < 2000
    assert len(frames) % 100 == 0
    lines = err.splitlines()
    assert lines[0] == "finishing this batch; press Ctrl-C again to stop at once"
    assert lines[-1] == (
        f"trawl: interrupted; kept the {len(frames)} frames collected so far, in d"
    )
    assert not info(tmp_path / "d")["complete"]
    assert f"{len(frames)} in " in out


def test_a_second_ctrl_c_ends_it_at_once(started, tmp_path):
    # The policy gets stuck in the second batch.
    process = started("stuck", "--frames", "1000")
    read_until(process.stderr, "100/1,000 frames")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    read_until(process.stderr, "finishing this batch")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "trawl: interrupted; kept the 100 frames collected so far, in d"
    assert len(load(tmp_path / "d")) == 100


def test_a_kill_leaves_the_batches_before(started, tmp_path):
    process = started("slow")
    read_until(process.stderr, "200/2,000 frames")
    process.kill()
    process.wait()
    frames = len(load(tmp_path / "d"))
    assert frames >= 200
    assert frames % 100 == 0
    assert not info(tmp_path / "d")["complete"]


def test_on_a_terminal_progress_is_a_bar(tmp_path):
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*TRAWL, "collect", "Pendulum-v1", "--frames", "300", "--out", "d"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
        )
        out, _ = process.communicate(timeout=PATIENCE)
        shown = os.read(ours, 1 << 16).decode()
    finally:
        os.close(theirs)
        os.close(ours)
    assert process.returncode == 0
    assert "300/300 frames" in shown
    assert "\x1b[?25l" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is hidden"
    # The summary goes to another stream, which is no terminal.
    assert "300 in " in out
    assert "\x1b" not in out


def test_the_script_ends_with_the_exit_code(tmp_path):
    (script,) = entry_points(group="console_scripts", name="trawl")
    code = f"import sys, {script.module}; sys.exit({script.module}.{script.attr}())"
    assert (
        subprocess.run([sys.executable, "-c", code, "gather"], capture_output=True).returncode == 2
    )
    assert run("gather", cwd=tmp_path).returncode == 2


def test_a_reader_that_leaves_is_no_error(trawl, tmp_path):
    trawl("collect", "Pendulum-v1", "--frames", 100, "--out", "d")
    reading, writing = os.pipe()
    os.close(reading)
    process = start_command("show", "d", stdout=writing, stderr=subprocess.PIPE, cwd=tmp_path)
    os.close(writing)
    _, err = process.communicate(timeout=PATIENCE)
    assert "Traceback" not in err
    assert "Error" not in err


def test_help_and_version_are_quick(tmp_path):
    """They don't wait for torch."""
    code = (
        "import sys; from trawl.cli import main; code = main(sys.argv[1:]);"
        "assert not {'torch', 'gymnasium', 'matplotlib'} & set(sys.modules); sys.exit(code)"
    )
    for argument, words in (("--version", f"trawl {version('trawl-rl')}"), ("--help", "collect")):
        done = subprocess.run(
            [sys.executable, "-c", code, argument], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert words in done.stdout


def test_the_library_does_without(tmp_path):
    code = (
        "import sys, trawl; trawl.Collector;"
        "assert not {'tyro', 'rich', 'matplotlib', 'trawl.cli'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- full disks

# Runs where there is a disk of 600 kB.
ON_A_SMALL_DISK = """
import os
from trawl.cli import main
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
