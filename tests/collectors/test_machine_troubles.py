"""Collectors with workers on machines that have their troubles."""

import contextlib
import os
import re
import select
import signal
import textwrap

import nursery
import pytest

from trawl import MultiAsyncCollector, MultiSyncCollector
from trawl.backends.processes.handle import ServerHandle
from trawl.testing import Ledger, NumberedEnv

BOTH = pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
OPTIONS = {"num_workers": 2, "frames_per_batch": 20, "start_method": "forkserver"}


def process_server():
    """The process that workers come from."""
    return ServerHandle._known[os.getpid(), "forkserver"]._process


# --- the process that workers come from


def test_shutdown_does_not_wait_for_a_process_server_that_is_stopped():
    collector = MultiSyncCollector(NumberedEnv, **OPTIONS)
    collector.next()
    server = process_server()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        collector.shutdown(timeout=1)  # without an end, if it waited
        assert collector.closed
    finally:
        os.kill(server.pid, signal.SIGCONT)


# What nanobind prints at the end of a program that has imported triton, as PyTorch for GPUs does.
LEAKS = re.compile(r"^(nanobind: .*| - .*|See https://nanobind.*)\n?", re.MULTILINE)


def run(code, **options):
    """What a program of its own prints."""
    done = nursery.run(code, warn=["error"], **options)
    done.stderr = LEAKS.sub("", done.stderr)
    return done


COLLECT = """
from trawl import MultiSyncCollector
with MultiSyncCollector("CartPole-v1", num_workers=2, frames_per_batch=20, total_frames=40) as made:
    print(sum(batch.numel() for batch in made))
"""


def test_programs_that_ignore_the_ends_of_children_have_workers():
    done = run("import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + COLLECT)
    assert (done.stdout, done.stderr) == ("40\n", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_workers_start_where_the_user_may_not_enter_the_directory(tmp_path):
    # The interpreter and the modules have to be readable by the other user.
    code = f"""
    import os
    import torch, gymnasium, trawl
    from trawl.collectors.workers import service as worker
    os.mkdir("private", 0o700)
    os.chdir("private")
    os.setresuid(65534, 65534, 65534)
    {textwrap.indent(COLLECT, "    ").strip()}
    """
    done = run(code, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("40\n", "")


# --- environments that fork


class Forking(NumberedEnv):
    """Forks in its fifth step, and both processes go on."""

    def __init__(self, number, path):
        super().__init__(number=number)
        self._path = path

    def step(self, action):
        if len(self.actions) == 4:
            pid = os.fork()
            if pid:
                self._path.write_text(str(pid))
        return super().step(action)


@BOTH
def test_a_copy_of_a_worker_does_not_collect(cls, tmp_path):
    paths = [tmp_path / str(number) for number in range(2)]
    envs = [lambda i=i: Forking(i, paths[i]) for i in range(2)]
    ledger = Ledger([NumberedEnv(number=i) for i in range(2)])
    options = {**OPTIONS, "num_workers": None, "total_frames": 200}
    with cls(envs, **options) as collector:
        for batch in collector:
            ledger.add(batch)
        assert collector.stats()["restarts"] == 0
    assert ledger.frames == 200
    for path in paths:
        with contextlib.suppress(ProcessLookupError):
            copy = os.pidfd_open(int(path.read_text()))
            assert select.select([copy], [], [], 300)[0]
            os.close(copy)
