"""Workers that are started by a command of the user's."""

import os
import re
import select
import signal
import subprocess
import sys

import nursery
import psutil
import pytest
from backend_conformance import Lives
from distributed_parts import CLASSES, make
from forked import Forked

from trawl.errors import WorkerDied
from trawl.extras.clusters.launching import command as launch_command
from trawl.extras.clusters.launching.command import KEY, CommandLauncher
from trawl.extras.clusters.launching.launch import LaunchPlan
from trawl.extras.clusters.network.backend import RemoteBackend

SHELL = "exec {worker}"


class TestCommandLauncher(Lives):
    shares_memory = False
    # Its reasons name the command, too.
    kills_by_signal = False
    many = 3

    def new_backend(self):
        command = [nursery.python(), "{arguments}"]
        return RemoteBackend(LaunchPlan(CommandLauncher(command)))


def commanded(command, cls=CLASSES[0], **options):
    return make(cls, launcher="command", launcher_command=command, **options)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "command",
    [
        SHELL,
        ["{worker}"],
        ["sh", "-c", "{worker} & wait"],
        lambda: [sys.executable, "{arguments}"],
        f"env -u {KEY} {{worker}} </dev/null # {{key_file}}",
        f"env -u {KEY} sh -c '{{worker}}'",
    ],
    ids=["shell", "list", "within text", "arguments", "key file", "key by input"],
)
def test_forms_of_a_command(command):
    command = command() if callable(command) else command
    with commanded(command, num_workers=1) as collector:
        assert collector.next().numel() == 40


@pytest.mark.usefixtures("forked")
def test_placeholders_and_no_key_in_a_command_line(tmp_path):
    said, mode = tmp_path / "said", tmp_path / "mode"
    command = f"echo {{index}} {{rank}} {{address}} {{port}} {{name}} >> {said}"
    command += f"; stat -c %a {{key_file}} > {mode}; {{worker}}"
    # A batch of both workers: until then one of them may still be starting.
    with commanded(command, sync=True) as collector:
        collector.next()
        port = collector._backend.port
        keys = [slot.worker.address.key.hex() for slot in collector._pool.slots]
        lines = [command_line(child) for child in psutil.Process().children(recursive=True)]
        started = [line for line in lines if "launching.command" in line]
        assert started
        assert not any(key in line for line in started for key in keys)
        files = {one for line in started for one in re.findall(r"/[^\s\0]*\.private", line)}
        assert len(files) == 2
        assert mode.read_text() == "600\n"
        # The worker needs it only once.
        assert not any(map(os.path.exists, files))
    assert not any(os.path.exists(os.path.dirname(file)) for file in files)
    lines = sorted(said.read_text().splitlines())
    assert lines == [f"{i} {i + 1} 127.0.0.1 {port} trawl/{i + 1}/0" for i in range(2)]


def command_line(process):
    """The words of a process's command line; none of one that has ended."""
    try:
        return "\0".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return ""


def command_of(collector, index):
    """The process of a worker's command."""
    name = collector._pool.slots[index].worker.address.prefix
    found = psutil.Process().children()
    return next(child for child in found if name in command_line(child))


def test_the_end_of_a_command_ends_its_worker():
    """And the command is run again for another."""
    with commanded("{worker}; exit 3", sync=True, num_workers=1) as collector:
        collector.next()
        own = command_of(collector, 0)
        handles = [os.pidfd_open(one.pid) for one in (own, *own.children(recursive=True))]
        own.kill()
        with pytest.warns(
            RuntimeWarning,
            match=r"worker 0 was killed by SIGKILL \(launcher_command: '.*launching\.command .* "
            r"trawl/1/0.*'\); a new worker takes its place",
        ):
            collect_until_a_restart(collector)
        assert sum(collector.next().numel() for _ in range(3)) == 120
        for handle in handles:
            assert select.select([handle], [], [], 300)[0]
            os.close(handle)
        assert command_of(collector, 0).is_running()


def collect_until_a_restart(collector):
    while not collector.stats()["restarts"]:
        collector.next()


def test_a_command_that_goes_on_after_its_worker_is_killed(monkeypatch):
    monkeypatch.setattr(launch_command, "_LINGERING", 0.5)
    with commanded("{worker}; sleep 1000", num_workers=1) as collector:
        collector.next()
        (worker,) = [one for one in psutil.Process().children(True) if "-m" in one.cmdline()[:2]]
        worker.terminate()
        with pytest.warns(RuntimeWarning, match="worker 0 was killed by SIGKILL"):
            collect_until_a_restart(collector)


def test_an_error_without_an_end_of_line_is_shown_but_kept_in_part(capfd):
    with pytest.raises(WorkerDied) as caught:
        commanded("head -c 100000 /dev/zero | tr '\\0' x >&2; exit 3 # {worker}", max_restarts=0)
    assert len(capfd.readouterr().err) >= 100_000
    assert 1000 < len(str(caught.value)) < 20_000


def test_a_command_that_fails_is_named():
    text = (
        r"worker \d exited with status 7 \(launcher_command: 'echo no such host >&2; exit 7 # .*'; "
        r"its stderr ended with:\nno such host\n\), and is not replaced"
    )
    with pytest.raises(WorkerDied, match=text):
        commanded("echo no such host >&2; exit 7 # {worker}", max_restarts=0)


@pytest.mark.filterwarnings("ignore:worker:RuntimeWarning")
@pytest.mark.parametrize(
    ("command", "times", "text"),
    [
        ("nosuchprogram {worker}", 1, r" 0: .*exited with status 127 .*nosuchprogram: not found"),
        ("echo busy >&2; exit 255 # {worker}", 3, r" 0 3 times in a row: .*status 255 .*busy\n\)$"),
        (
            "true # {worker}",
            3,
            r" 0 3 .*status 0 .*\. The command must run for as long as its worker does",
        ),
    ],
)
def test_a_command_that_never_works_is_given_up(command, times, text, tmp_path):
    runs = tmp_path / "runs"
    with pytest.raises(WorkerDied, match=f"(?s)launcher_command did not start worker{text}"):
        commanded(f"echo >> {runs}; {command}", num_workers=1)
    assert runs.read_text() == times * "\n"


def test_a_command_that_works_later_is_run_again(tmp_path):
    """It ends in different ways before."""
    command = (
        f"echo >> {tmp_path}/runs; n=$(wc -l < {tmp_path}/runs); [ $n -gt 3 ] || exit $((n % 2))"
    )
    with (
        pytest.warns(RuntimeWarning, match="a new worker takes its place"),
        commanded(f"{command}; exec {{worker}}", num_workers=1) as collector,
    ):
        assert collector.next().numel() == 40


def test_a_command_that_does_not_exist():
    with pytest.raises(
        RuntimeError, match=r"launcher_command can't be run: nosuchprogram .*No such"
    ):
        commanded(["nosuchprogram", "{worker}"])


@pytest.mark.usefixtures("forked")
def test_a_command_that_passes_on_no_key():
    with pytest.raises(
        WorkerDied, match=f"this worker has no key: .* variable {KEY} or the standard inp"
    ):
        commanded(f"env -u {KEY} {{worker}} </dev/null", max_restarts=0)


PROGRAM = """
import psutil, sys, time
sys.path.insert(0, {here!r})
from distributed_parts import *
with make(DistributedCollector, launcher="command", launcher_command="{{worker}}; true") as c:
    c.next()
    print(*(p.pid for p in psutil.Process().children(True)), flush=True)
    time.sleep(1000)
"""


def test_nothing_is_left_by_a_driver_that_is_killed():
    code = PROGRAM.format(here=os.path.dirname(__file__))
    with Forked(code, stdout=subprocess.PIPE) as program:
        handles = [os.pidfd_open(int(pid)) for pid in program.stdout.readline().split()]
        assert len(handles) >= 4
        program.send_signal(signal.SIGKILL)
        for handle in handles:
            assert select.select([handle], [], [], 300)[0]
            os.close(handle)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"launcher": "command"},
            ValueError,
            "launcher='command' and launcher_command must be used together",
        ),
        (
            {"launcher_command": SHELL, "launcher": "mp"},
            ValueError,
            "must be used together.* is 'mp' and",
        ),
        ({"launcher_command": 3}, TypeError, "must be a string or a list of strings, but it is 3"),
        ({"launcher_command": ["a", 3]}, TypeError, "must be a string or a list of strings"),
        (
            {"launcher_command": "ssh a"},
            ValueError,
            r"must contain the placeholder \{worker\} \(or .*\), for the command line",
        ),
        (
            {"launcher_command": "{worker} {host}"},
            ValueError,
            r"has the unknown placeholder \{host\}. The placeholders are",
        ),
        (
            {"launcher_command": "{worker} {"},
            ValueError,
            r"Single '\{' .*For a literal brace write \{\{ or",
        ),
    ],
)
def test_options_are_checked(options, error, text):
    with pytest.raises(error, match=text):
        make(CLASSES[0], **{"launcher": "command", **options})
