"""Who starts ranks: submitit, or somebody else."""

import os
import signal
import subprocess
import sys

import nursery
import pytest
from distributed_parts import CLASSES, exhaust, make

from trawl.collectors.distributed import run_rank
from trawl.errors import WorkerDied
from trawl.extras.clusters.network.sockets import listening

submitit = pytest.importorskip("submitit")
pytestmark = pytest.mark.usefixtures("forked")
HERE = os.path.dirname(__file__)


def jobs(folder):
    return {"cluster": "local", "folder": str(folder), "timeout_min": 5}


def test_a_job_that_dies_is_replaced(tmp_path):
    options = {"slurm_kwargs": jobs(tmp_path), "sync": True}
    with make(CLASSES[0], launcher="submitit", **options) as collector:
        collector.next()
        (pid,) = collector._pool.call({0: (_pid,)}).values()
        os.kill(pid, signal.SIGKILL)
        # The end of its job may be known before that of its connection is.
        told = r"worker 0 (lost its connection|ended with its job \d+: see \S+); a new worker takes"
        with pytest.warns(RuntimeWarning, match=told):
            collector.next()


def _pid(collector):
    return os.getpid()


def test_jobs_that_were_started_before(tmp_path):
    code = """
        import sys
        from trawl.collectors.distributed import submitit_delayed_launcher
        sys.executable = {python!r}
        conf = {conf!r}

        @submitit_delayed_launcher(2, submitit_main_conf=conf, submitit_collection_conf=conf)
        def main():
            from distributed_parts import DistributedCollector, make
            with make(DistributedCollector, launcher="submitit_delayed", total_frames=80) as c:
                return sum(batch.numel() for batch in c)

        if __name__ == "__main__":
            print("frames", main())
    """
    done = nursery.run(code.format(python=sys.executable, conf=jobs(tmp_path)))
    assert done.stdout == "frames 80\n", done.stderr


SCRIPT = """
import os, sys, time
sys.path.insert(0, {here!r})
from distributed_parts import *
from trawl.collectors.distributed import run_rank
from trawl.errors import WorkerDied
if __name__ == "__main__":
    if int(os.environ["RANK"]) == 0:
        with make(DistributedCollector, launcher="env", total_frames=80) as c:
            print("frames", sum(batch.numel() for batch in c), flush=True)
    else:
        sys.exit(run_rank())
"""


def test_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(here=HERE))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    place = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    done = subprocess.run([*command, *place, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "frames 80\n" in done.stdout


def free_port():
    with listening("127.0.0.1", 0) as found:
        return found.getsockname()[1]


def test_ranks_of_ones_own(monkeypatch):
    """The death of one can't be mended, and is told."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
    for name, value in {**where, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "trawl.collectors.distributed.rank"]
    ranks = [
        subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in (1, 2)
    ]
    try:
        with make(CLASSES[0], launcher=None, sync=True) as collector:
            collector.next()
            ranks[0].kill()
            with pytest.raises(WorkerDied, match=r"worker 0 \(rank 1, started from outside"):
                exhaust(collector)
        assert ranks[1].wait(100) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def test_ranks_that_are_none(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="pass rank, or set the environment variable RANK"):
        run_rank()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="rank 2 is not a worker"):
        run_rank(2)
    with pytest.raises(RuntimeError, match="there are 2 workers, but only 1 ranks"):
        make(CLASSES[0], launcher="env")
