import csv
import importlib.util
import os
import socket

import nursery
import pytest
from cli_parts import run

from trawl.data import info


def rows(file):
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


COLLECT = ["collect", "CartPole-v1", "--frames", 60, "--frames-per-batch", 20, "--seed", 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_statistics_are_logged(workers, trawl):
    code, _, said = trawl(*COLLECT, "--out", "run", "--workers", workers, "--log", "csv:stats.csv")
    assert code == 0, said
    last = rows("stats.csv")[-1]
    assert (last["frames"], last["completed"]) == ("60", "True")
    assert ("worker_1/frames" in last) == (workers > 0)
    assert info("run")["arguments"]["log"] == ["csv:stats.csv"]


def test_several_destinations(trawl, monkeypatch):
    pytest.importorskip("tensorboard")
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", os.path.abspath("wandb-files"))
    logs = ["csv:a.csv", "tensorboard:tb", "wandb:project", "prometheus:0"]
    if importlib.util.find_spec("mlflow"):
        logs.append("mlflow:mlruns")
    arguments = [part for log in logs for part in ("--log", log)]
    code, _, said = trawl(*COLLECT, "--out", "run", *arguments)
    wandb.teardown()
    assert code == 0, said
    assert rows("a.csv")[-1]["frames"] == "60"
    assert [name[:10] for name in os.listdir("tb")] == ["events.out"]
    assert any(name.startswith("offline-run") for name in os.listdir("wandb"))
    assert os.path.isdir("mlruns") == ("mlflow:mlruns" in logs)


_PATIENT = """
import time
import gymnasium

class Patient(gymnasium.Wrapper):
    # Goes on once there are so many polls in the file.
    def step(self, action):
        while open("a.csv").read().count("\\n") < 5:
            time.sleep(0.001)
        return super().step(action)

def make():
    return Patient(gymnasium.make("CartPole-v1"))
"""


def test_polls_come_in_the_given_time(tmp_path):
    (tmp_path / "patient.py").write_text(_PATIENT)
    log = ["--log", "csv:a.csv", "--log-every", 0.001]
    done = run("collect", "patient.py:make", *COLLECT[2:], "--out", "run", *log, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["frames"] for row in rows(tmp_path / "a.csv")[:4]] == ["0"] * 4


def test_a_resumed_run_continues_the_file(trawl):
    trawl(*COLLECT, "--out", "run", "--log", "csv:a.csv")
    again = [*COLLECT, "--frames", 100, "--out", "run", "--log", "csv:a.csv"]
    code, _, said = trawl(*again, "--resume")
    assert code == 0, said
    frames = [int(row["frames"]) for row in rows("a.csv")]
    assert frames == sorted(frames)
    assert frames[-1] == 100


def test_frames_of_runs_that_the_collector_does_not_continue_are_counted(trawl):
    trawl(*COLLECT, "--out", "run", "--log", "csv:a.csv")
    code, _, said = trawl(
        *COLLECT, "--frames", 100, "--envs", 2, "--out", "run", "--log", "csv:b.csv", "--resume"
    )
    assert code == 0, said
    assert "new episodes begin" in said
    found = rows("b.csv")
    assert [int(row["frames"]) for row in (found[0], found[-1])] == [60, 100]
    assert {row["total_frames"] for row in found} == {"100"}


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("stats.csv", "--log stats.csv doesn't begin with one of csv:, mlflow:, prometheus:, "),
        ("tensorbord:runs", "tensorboard:, wandb:; did you mean tensorboard?"),
        ("csv", "--log csv needs a value: --log csv:FILE"),
        ("tensorboard:", "--log tensorboard: needs a value: --log tensorboard:DIR"),
        ("csv:no/file.csv", "--log can't start: no/file.csv: No such file or directory"),
        ("csv:taken", "--log can't start: taken: File exists (pass another file)"),
        ("tensorboard:taken", "--log can't start: taken: File exists (pass another folder)"),
        ("prometheus:http", "PORT must be a number: pass prometheus:PORT"),
        ("prometheus:70000", "--log prometheus:70000: port must be at most 65535"),
    ],
)
def test_wrong_destinations(log, message, trawl, tmp_path):
    (tmp_path / "taken").write_text("")
    code, _, said = trawl(*COLLECT, "--out", "run", "--log", log)
    assert code == 2
    (line,) = said.splitlines()
    assert message in line
    assert not os.path.exists("run")


def test_a_port_in_use(trawl):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, _, said = trawl(*COLLECT, "--out", "run", "--log", f"prometheus:{port}")
    assert code == 2
    assert f"--log can't start: can't listen on port {port} of 127.0.0.1: " in said
    assert len(said.splitlines()) == 1
    assert not os.path.exists("run")


@pytest.mark.parametrize("seconds", [0, -1, "nan"])
def test_wrong_times(seconds, trawl):
    code, _, said = trawl(*COLLECT, "--out", "run", "--log-every", seconds)
    assert (code, said.count("--log-every must be above 0 seconds, but it is")) == (2, 1)
    assert not os.path.exists("run")


def test_a_missing_library_names_its_extra(tmp_path):
    code = """
        import sys

        sys.modules["tensorboard"] = None
        from trawl.cli import main

        sys.exit(main(sys.argv[1:]))
    """
    done = nursery.run(code, *COLLECT, "--out", "run", "--log", "tensorboard:runs", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'trawl-rl[tensorboard]'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_sink_that_fails_later_is_noted(tmp_path):
    # The environment removes the folder of a file that gets more columns after the first batch.
    (tmp_path / "logs").mkdir()
    (tmp_path / "envs.py").write_text(
        "import os, shutil\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Removes(CartPoleEnv):\n"
        "    def step(self, action):\n"
        "        if os.path.exists('logs/a.csv'):\n"
        "            shutil.rmtree('logs')\n"
        "        return super().step(action)\n"
    )
    command = ["collect", "envs.py:Removes", *COLLECT[2:]]
    done = run(*command, "--out", "run", "--log", "csv:logs/a.csv", cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr.count("note: a sink of a monitor failed") == 1
    assert info(tmp_path / "run")["complete"]
