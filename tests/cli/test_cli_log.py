"""``trawl collect --log``: where statistics go during a collection."""

import os
from pathlib import Path

import pytest
from cli_parts import logged, trawl

from trawl.data import info
from trawl.extras.monitors.sinks import STATS_SINKS

COLLECT = ["--frames", 60, "--frames-per-batch", 20, "--seed", 1, "--out", "run"]


def test_several_destinations(monkeypatch):
    pytest.importorskip("tensorboard")
    wandb = pytest.importorskip("wandb")
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CONFIG", "CACHE", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", os.path.abspath("wandb-files"))
    logs = ["csv:a.csv", "tensorboard:tb", "wandb:project", "prometheus:0"]
    arguments = [part for log in logs for part in ("--log", log)]
    code, _, said = trawl("collect", "CartPole-v1", *COLLECT, *arguments)
    wandb.teardown()
    assert code == 0, said
    assert logged("a.csv")[-1]["frames"] == "60"
    assert [name[:10] for name in os.listdir("tb")] == ["events.out"]
    assert any(name.startswith("offline-run") for name in os.listdir("wandb"))


def test_the_help_names_all_destinations():
    code, said, _ = trawl("collect", "--help")
    assert code == 0
    words = " ".join(said.replace("│", " ").split())
    for name in STATS_SINKS.own:
        assert f"{name}:{STATS_SINKS[name].target}" in words


_ENVIRONMENTS = """
import os, shutil, time
from gymnasium.envs.classic_control import CartPoleEnv

class Patient(CartPoleEnv):
    # Goes on once there are so many polls in the file.
    def step(self, action):
        while open("a.csv").read().count("\\n") < 5:
            time.sleep(0.001)
        return super().step(action)

class Removes(CartPoleEnv):
    # Removes the folder of a file that gets more columns after the first batch.
    def step(self, action):
        if os.path.exists("logs/a.csv"):
            shutil.rmtree("logs")
        return super().step(action)
"""


def test_polls_come_in_the_given_time_and_a_sink_that_fails_later_is_noted():
    Path("mine.py").write_text(_ENVIRONMENTS)
    os.mkdir("logs")
    log = ["--log", "csv:a.csv", "--log-every", 0.001]
    code, _, err = trawl("collect", "mine.py:Patient", *COLLECT, *log)
    assert code == 0, err
    assert [row["frames"] for row in logged("a.csv")[:4]] == ["0"] * 4
    command = ["mine.py:Removes", *COLLECT[:-1], "other", "--log", "csv:logs/a.csv"]
    code, _, err = trawl("collect", *command)
    assert code == 0
    assert err.count("note: a sink of a monitor failed") == 1
    assert info("other")["complete"]
