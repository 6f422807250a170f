"""``trawl evaluate`` and ``trawl tune``."""

import json
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_parts import evaluated, trawl
from cli_policies import Net

from trawl.collectors import Collector, Evaluator
from trawl.extras.cli.arguments import parse
from trawl.extras.cli.tune import command_of
from trawl.extras.tuning import Candidate


def saved_policy():
    torch.manual_seed(3)
    network = Net().eval()
    torch.export.save(torch.export.export(network, (torch.zeros(3),)), "policy.pt2")
    return network


def by_evaluator(network, **options):
    options = {"num_trajectories": 4, "max_steps": 30, **options}
    with Evaluator("Pendulum-v1", network, **options) as evaluator:
        return evaluator.evaluate().episodes.returns.tolist()


def test_a_policy_is_evaluated():
    network = saved_policy()
    command = ["Pendulum-v1", "--policy", "policy.pt2", "--episodes", "4", "--max-steps", "30"]
    code, out, err = trawl("evaluate", *command, "--out", "results/one.json")
    assert code == 0, err
    facts = json.loads(Path("results/one.json").read_text())
    returns = by_evaluator(network)
    assert facts["returns"] == pytest.approx(returns, rel=1e-5)
    assert (facts["lengths"], facts["episodes"]) == ([30] * 4, 4)
    found = facts["return"]
    assert found["mean"] == pytest.approx(np.mean(returns), rel=1e-5)
    assert found["sem"] == pytest.approx(np.std(returns, ddof=1) / 2, rel=1e-4)
    assert found["low"] < found["mean"] < found["high"]
    assert (found["min"], found["max"]) == (min(facts["returns"]), max(facts["returns"]))
    assert facts["policy"] == "policy.pt2"
    assert len(facts["policy_sha256"]) == 64
    for words in ("Pendulum-v1", "policy.pt2", "4 episodes", "95 % interval", "one.json"):
        assert words in out
    # The table fits a terminal.
    assert max(map(len, out.splitlines())) <= 80
    # By the statistics of a file.
    with Collector("Pendulum-v1", frames_per_batch=100, normalize_observations=True) as collector:
        collector.next()
        statistics = collector.normalization
    torch.save(statistics.state_dict(), "statistics.pt")
    facts, _ = evaluated(*command, "--normalization", "statistics.pt")
    normalised = by_evaluator(network, normalization=statistics)
    assert facts["returns"] == pytest.approx(normalised, rel=1e-5)
    assert normalised != pytest.approx(returns)
    torch.save({"weight": torch.zeros(3)}, "weights.pt")
    code, _, err = trawl("evaluate", *command, "--normalization", "weights.pt")
    assert code == 2
    assert "--normalization weights.pt" in err
    assert "torch.save wrote of" in err


@pytest.mark.parametrize("policy", ["policy.pt2", "cli_policies:Net"])
def test_results_do_not_depend_on_where_episodes_run(policy, monkeypatch):
    def noted(*arguments, **options):
        given.append([options[name] for name in ("backend", "num_workers", "num_envs")])
        return Evaluator(*arguments, **options)

    given = []
    monkeypatch.setattr("trawl.extras.cli.evaluate.Evaluator", noted)
    saved_policy()
    command = ["Pendulum-v1", "--policy", policy, "--episodes", 4, "--max-steps", 20, "--seed", 5]
    expected = evaluated(*command)[0]
    for how in (["--envs", 3], ["--workers", 2, "--envs", 2]):
        facts = evaluated(*command, *how)[0]
        assert facts["returns"] == pytest.approx(expected["returns"], rel=1e-4)
        assert facts["seed"] == expected["seed"] == 5
    if policy == "cli_policies:Net":
        # Its first weights come from the seed.
        torch.manual_seed(5)
        returns = by_evaluator(Net(), max_steps=20, seed=5)
        assert expected["returns"] == pytest.approx(returns, rel=1e-5)
    assert given == [["thread", 1, 1], ["thread", 1, 3], ["process", 2, 2]]


def test_random_actions_and_one_episode_by_default_in_a_folder_of_runs():
    command = ["Pendulum-v1", "--episodes", 1, "--max-steps", 50]
    heavy, out = evaluated(*command, "--stochastic", "--env-kwargs", '{"g": 20.0}')
    # One episode says nothing of how sure its return is; JSON has no NaN.
    assert (heavy["return"]["sem"], heavy["return"]["low"]) == (None, None)
    assert math.isclose(heavy["return"]["mean"], heavy["returns"][0])
    assert "random, stochastic" in out
    assert "'g'" in out
    code, _, err = trawl("evaluate", *command, "--stochastic")
    assert code == 0, err
    (found,) = Path("runs").iterdir()
    assert re.fullmatch(r"Pendulum-v1-\d+-\d+\.json", found.name)
    assert heavy["returns"] != json.loads(found.read_text())["returns"]


# --- the best layout

SMALL = ["--budget", "2", "--max-workers", "1", "--max-envs", "1"]


def test_a_search():
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


def test_a_search_with_a_policy_and_transforms():
    Path("mine.py").write_text("from cli_policies import reads_stacks\n")
    policy = ["--policy", "mine.py:reads_stacks", "--frame-stack", 3, "--normalize-rewards"]
    code, out, err = trawl("tune", "Pendulum-v1", *SMALL, *policy, "--frames-per-batch", 8)
    assert code == 0, err
    assert "policy_factory=make_policy" in out
    assert "normalize_rewards=NormalizeReward(keep_raw=True)" in out
    told = "--policy mine.py:reads_stacks --frame-stack 3 --normalize-rewards --frames-per-batch 8"
    assert f"trawl collect Pendulum-v1 {told}" in out


@pytest.mark.parametrize(
    ("typed", "candidate", "options"),
    [
        ("", {}, "--frames-per-batch 8"),
        ("", {"envs": 4}, "--envs 4 --frames-per-batch 8"),
        ("", {"envs": 4, "env_processes": 2}, "--envs 4 --env-processes 2 --frames-per-batch 8"),
        ("", {"workers": 2, "envs": 2}, "--envs 2 --workers 2 --sync --frames-per-batch 8"),
        ("", {"workers": 2, "sync": False}, "--workers 2 --async --frames-per-batch 8"),
        ("--policy p.pt --max-frames-per-traj 5 --unsafe-pickle --info-keys a b/c", {},
         "--policy p.pt --max-frames-per-traj 5 --info-keys a b/c --frames-per-batch 8 "
         "--unsafe-pickle"),
        ("--frame-stack 4 --normalize-rewards --normalize-observations", {"envs": 2},
         "--frame-stack 4 --normalize-observations --normalize-rewards --envs 2 "
         "--frames-per-batch 8"),
    ],
)  # fmt: skip
def test_each_layout_has_a_command_that_collects_with_it(typed, candidate, options):
    arguments = parse(["tune", "CartPole-v1", *typed.split()])
    command = command_of(arguments, Candidate(**candidate, frames_per_batch=8))
    assert command == f"trawl collect CartPole-v1 {options}"
    words = shlex.split(command)[1:]
    assert parse(words)
    if not typed and "workers" not in candidate:
        code, _, err = trawl(*words, "--frames", 16, "--out", "d")
        assert code == 0, err
