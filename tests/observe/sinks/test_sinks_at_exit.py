"""What sinks leave behind if the program ends with an open monitor."""

import csv
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from urllib.request import urlopen

import psutil
import pytest
from monitor_parts import PATIENCE

_PROGRAM = """
import importlib.util, os, sys
from trawl import MultiSyncCollector
from trawl.observe import *

if __name__ == "__main__":
    port = PrometheusSink(0)
    sinks = [CSVSink("stats.csv"), TensorBoardSink("runs"), WandbSink("project"), port]
    if importlib.util.find_spec("mlflow"):
        sinks.append(MLflowSink("mlruns"))
    collector = MultiSyncCollector(["CartPole-v1"] * 2, frames_per_batch=20, total_frames=60)
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
    (tmp_path / "program.py").write_text(_PROGRAM)
    settings = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "OMP_NUM_THREADS": "1"}
    settings |= {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CONFIG", "CACHE", "DATA")}
    # On a busy machine, a sink may take long to open, and the monitor says so.
    quiet = ["-W", "ignore:a new monitor waits:RuntimeWarning"]
    with subprocess.Popen(
        [sys.executable, *quiet, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            port = process.stdout.readline()
            assert port, process.stderr.read()
            yield process, int(port)
        finally:
            process.kill()


def scraped(port):
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return answer.read()


def check_gone(processes, port):
    _, alive = psutil.wait_procs(processes, PATIENCE)
    assert alive == []
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_an_exit_writes_the_last_poll_and_ends_all(program, tmp_path):
    process, port = program
    children = psutil.Process(process.pid).children(recursive=True)
    assert "wandb-core" in {one.name() for one in children}
    _, errors = process.communicate("go on\n", PATIENCE)
    assert process.returncode == 0
    assert errors == ""
    check_gone(children, port)
    with open(tmp_path / "stats.csv", newline="") as file:
        assert list(csv.DictReader(file))[-1]["frames"] == "60"


def test_a_killed_program_leaves_nothing(program):
    process, port = program
    # The sinks before this one may still be busy with the first poll.
    while b"trawl_frames " not in scraped(port):
        pass
    children = psutil.Process(process.pid).children(recursive=True)
    assert "wandb-core" in {one.name() for one in children}
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    check_gone(children, port)
