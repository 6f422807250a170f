"""Server of processes: whom it ends when a worker has ended."""

import os
import subprocess
import sys

import pytest

from trawl.backends.processes.server import _is_tracker

TRACKER = "from multiprocessing.resource_tracker import main; import time; time.sleep(1000)"


@pytest.mark.parametrize("repetition", range(20))
def test_a_resource_tracker_is_known_from_its_first_moment(repetition):
    """Also while the system has not yet set the command line of its program."""
    with subprocess.Popen([sys.executable, "-c", TRACKER]) as tracker:
        try:
            assert _is_tracker(tracker.pid)
        finally:
            tracker.kill()


def test_other_processes_and_those_that_ended_are_no_trackers():
    with subprocess.Popen(["sleep", "1000"]) as other:
        assert not _is_tracker(other.pid)
        other.kill()
        # Waits, and leaves the process to be reaped.
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        assert not _is_tracker(other.pid)
    assert not _is_tracker(other.pid)


def test_a_worker_has_the_options_of_this_interpreter():
    """It would otherwise show warnings that the program turns off, or miss ``-X`` options."""
    ask = "import sys; print(sys.warnoptions, sys.dont_write_bytecode, sys._xoptions)"
    code = f"""
import subprocess
from trawl.backends.processes.loop import interpreter_command
subprocess.run(interpreter_command({ask!r}), check=True)
"""
    options = ["-W", "ignore:x", "-B", "-X", "faulthandler"]
    done = subprocess.run(
        [sys.executable, *options, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['ignore:x'] True {'faulthandler': True}\n"
