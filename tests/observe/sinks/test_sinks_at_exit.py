"""What sinks leave behind if the program ends with an open monitor."""

import csv
import importlib.util
import socket
import subprocess

import psutil
import pytest
from forked import Forked
from monitor_parts import PATIENCE

_PROGRAM = """
import sys, warnings
from trawl import MultiSyncCollector
from trawl.observe import *

# On a busy machine, a sink may take long to open, and the monitor says so.
warnings.filterwarnings("ignore", "a new monitor waits", RuntimeWarning)
# Made before there are threads, by which its workers would come from a fresh interpreter.
collector = MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=20, total_frames=60)
port = PrometheusSink(0)
sinks = [CSVSink("stats.csv"), TensorBoardSink("runs"), WandbSink("project"), port]
sinks += [MLflowSink(folder) for folder in sys.argv[1:]]
Monitor(collector, sinks, every=0.05)
list(collector)
print(port.port, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def program(tmp_path):
    """A program that has collected all frames, and its port."""
    for name in ("prometheus_client", "tensorboard", "wandb"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    settings |= {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CONFIG", "CACHE", "DATA")}
    folders = ["mlruns"] if importlib.util.find_spec("mlflow") else []
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Forked(_PROGRAM, *folders, cwd=tmp_path, env=settings, finalize=True, **pipes) as process:
        try:
            port = process.stdout.readline()
            assert port, process.stderr.read()
            yield process, int(port)
        finally:
            process.kill()


def test_an_exit_writes_the_last_poll_and_ends_all(program, tmp_path):
    process, port = program
    children = psutil.Process(process.pid).children(recursive=True)
    assert "wandb-core" in {one.name() for one in children}
    _, errors = process.communicate("go on\n", PATIENCE)
    assert process.returncode == 0
    assert errors == ""
    _, alive = psutil.wait_procs(children, PATIENCE)
    assert alive == []
    with socket.create_server(("127.0.0.1", port)):
        pass
    with open(tmp_path / "stats.csv", newline="") as file:
        assert list(csv.DictReader(file))[-1]["frames"] == "60"
