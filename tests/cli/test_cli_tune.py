"""The command ``trawl tune``."""

import re
import shlex
from pathlib import Path

import pytest

from trawl.cli.arguments import parse
from trawl.cli.tune import command_of
from trawl.collectors.tuning import Candidate

POLICY = """
import torch


def actor():
    return lambda observation: torch.zeros(*observation.shape[:-1], 1)
"""
SMALL = ["--budget", "4", "--max-workers", "1", "--max-envs", "1"]


def test_a_search(trawl):
    arguments = ["--env-kwargs", '{"g": 3.0}', "--frames-per-batch", "60"]
    code, out, err = trawl("tune", "Pendulum-v1", *SMALL, *arguments)
    assert code == 0
    assert re.search(r"one process, 1 env +60 .* 100% .* chosen", out)
    assert "One process with 1 environment is the only layout that was measured." in out
    assert "collector = Collector(make_env, frames_per_batch=60)" in out
    # It looks like the command that would be typed, and it is one.
    command = next(line for line in out.splitlines() if line.startswith("trawl collect"))
    assert command == "trawl collect Pendulum-v1 --env-kwargs '{\"g\": 3.0}' --frames-per-batch 60"
    assert "one process, 1 env: " in err
    found = trawl(*shlex.split(command)[1:], "--frames", 120, "--out", "d")
    assert found[0] == 0, found


def test_a_policy_is_loaded_for_each_layout(trawl):
    Path("mine.py").write_text(POLICY)
    code, out, err = trawl("tune", "Pendulum-v1", *SMALL, "--policy", "mine.py:actor")
    assert code == 0, err
    assert "policy_factory=make_policy" in out
    assert "trawl collect Pendulum-v1 --policy mine.py:actor --frames-per-batch" in out


@pytest.mark.parametrize(
    ("candidate", "options"),
    [
        (Candidate(frames_per_batch=8), "--frames-per-batch 8"),
        (Candidate(envs=4, frames_per_batch=8), "--envs 4 --frames-per-batch 8"),
        (
            Candidate(envs=4, env_processes=2, frames_per_batch=8),
            "--envs 4 --env-processes 2 --frames-per-batch 8",
        ),
        (
            Candidate(workers=2, envs=2, frames_per_batch=8),
            "--envs 2 --workers 2 --sync --frames-per-batch 8",
        ),
        (
            Candidate(workers=2, frames_per_batch=8, sync=False),
            "--workers 2 --async --frames-per-batch 8",
        ),
    ],
    ids=lambda value: getattr(value, "label", ""),
)
def test_each_layout_has_a_command_that_collects_with_it(trawl, candidate, options):
    command = command_of(parse(["tune", "CartPole-v1"]), candidate)
    assert command == f"trawl collect CartPole-v1 {options}"
    code, _, err = trawl(*shlex.split(command)[1:], "--frames", 16, "--out", "d")
    assert code == 0, err


def test_all_options_of_the_environment_are_in_the_command():
    typed = parse(
        ["tune", "CartPole-v1", "--policy", "p.pt", "--max-frames-per-traj", "5", "--unsafe-pickle",
         "--info-keys", "a", "b/c"]
    )  # fmt: skip
    assert command_of(typed, Candidate(frames_per_batch=8)) == (
        "trawl collect CartPole-v1 --policy p.pt --max-frames-per-traj 5 --info-keys a b/c "
        "--frames-per-batch 8 --unsafe-pickle"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NoSuchEnv-v1"], "environment NoSuchEnv-v1 can't be made"),
        (["Pendulum-v1", "--policy", "nowhere"], "--policy nowhere: there is no such file"),
        (["Pendulum-v1", "--budget", "0.5"], "--budget must be at least 1, but it is 0.5"),
        (["Pendulum-v1", "--max-envs", "0"], "--max-envs must be at least 1"),
        (["Pendulum-v1", "--seed", "-1"], "--seed must be between 0"),
        (
            ["Pendulum-v1", "--budget", "2", "--frames-per-batch", "1000000000"],
            "budget must be at least",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_errors_are_one_line(trawl, arguments, message):
    code, out, err = trawl("tune", *arguments)
    assert code == 2
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_sync_and_async_exclude_each_other(trawl):
    code, _, err = trawl("tune", "Pendulum-v1", "--sync", "--async")
    assert code == 2
    assert "--async" in err
