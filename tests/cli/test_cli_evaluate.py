"""``trawl evaluate``."""

import json
import math

import numpy as np
import pytest
import torch
from cli_policies import Net

from trawl.collectors import Collector, Evaluator


def saved_policy(path):
    torch.manual_seed(3)
    network = Net().eval()
    torch.export.save(torch.export.export(network, (torch.zeros(3),)), path)
    return network


def test_a_policy_is_evaluated(trawl, tmp_path):
    network = saved_policy("policy.pt2")
    arguments = ["Pendulum-v1", "--policy", "policy.pt2", "--episodes", "4", "--max-steps", "30"]
    code, out, err = trawl("evaluate", *arguments, "--out", "results/one.json")
    assert code == 0, err
    facts = json.loads((tmp_path / "results" / "one.json").read_text())
    with Evaluator("Pendulum-v1", network, num_trajectories=4, max_steps=30) as evaluator:
        expected = evaluator.evaluate()
    assert facts["returns"] == pytest.approx(expected.episodes.returns.tolist(), rel=1e-5)
    assert facts["lengths"] == [30] * 4
    assert facts["episodes"] == 4
    assert facts["return"]["mean"] == pytest.approx(np.mean(facts["returns"]))
    assert facts["return"]["sem"] == pytest.approx(np.std(facts["returns"], ddof=1) / 2)
    assert facts["return"]["low"] < facts["return"]["mean"] < facts["return"]["high"]
    assert facts["return"]["min"] == min(facts["returns"])
    assert facts["policy"] == "policy.pt2"
    assert len(facts["policy_sha256"]) == 64
    for shown in ("Pendulum-v1", "policy.pt2", "4 episodes", "95 % interval", "one.json"):
        assert shown in out
    # The table fits a terminal.
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    "how", [["--envs", "3"], ["--workers", "2"], ["--envs", "2", "--workers", "2"]]
)
@pytest.mark.parametrize("policy", ["policy.pt2", "cli_policies:Net"])
def test_results_do_not_depend_on_where_episodes_run(trawl, tmp_path, how, policy):
    saved_policy("policy.pt2")
    found = []
    for name, options in (("one.json", []), ("two.json", how)):
        code, _, err = trawl(
            *("evaluate", "Pendulum-v1", "--policy", policy, "--episodes", 4),
            *("--max-steps", 20, "--seed", 5, "--out", name, *options),
        )
        assert code == 0, err
        found.append(json.loads((tmp_path / name).read_text()))
    assert found[0]["returns"] == pytest.approx(found[1]["returns"], rel=1e-4)
    assert found[0]["seed"] == found[1]["seed"] == 5


def test_random_actions_and_one_episode(trawl, tmp_path):
    code, out, err = trawl(
        "evaluate", "CartPole-v1", "--episodes", 1, "--out", "x.json", "--stochastic"
    )
    assert code == 0, err
    facts = json.loads((tmp_path / "x.json").read_text())
    # One episode says nothing of how sure its return is; JSON has no NaN.
    assert facts["return"]["sem"] is None
    assert facts["return"]["low"] is None
    assert math.isclose(facts["return"]["mean"], facts["returns"][0])
    assert "random, stochastic" in out


def test_arguments_of_the_environment(trawl, tmp_path):
    for name, kwargs in (("heavy.json", '{"g": 20.0}'), ("light.json", '{"g": 1.0}')):
        code, out, err = trawl(
            *("evaluate", "Pendulum-v1", "--episodes", 2, "--max-steps", 50),
            *("--env-kwargs", kwargs, "--out", name),
        )
        assert code == 0, err
        assert "'g'" in out
    heavy, light = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("heavy", "light"))
    assert heavy["returns"] != light["returns"]


def test_results_have_a_place_by_default(trawl, tmp_path):
    code, _, err = trawl("evaluate", "Pendulum-v1", "--episodes", 1, "--max-steps", 5)
    assert code == 0, err
    (found,) = (tmp_path / "runs").iterdir()
    assert found.name.startswith("Pendulum-v1-")
    assert found.suffix == ".json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Pendulum-v1", "--episodes", "0"], "--episodes must be at least 1, but it is 0"),
        (["Pendulum-v1", "--workers", "-1"], "--workers must be at least 0, but it is -1"),
        (["Pendulum-v1", "--backend", "ray"], "--backend ray needs workers"),
        (["Pendulum-v1", "--seed", "-3"], "--seed must be between 0 and"),
        (["NoSuch-v1"], "environment NoSuch-v1 can't be made"),
        (["Pendulum-v1", "--policy", "none.pt2"], "there is no such file"),
        (["CartPole-v1", "--policy", "cli_policies:Net"], "--policy cli_policies:Net"),
        (["Pendulum-v1", "--policy", "cli_policies:fails", "--envs", "1"], "evaluation failed"),
        (["Pendulum-v1", "--out", "there.json"], "there.json already exists"),
    ],
)
def test_wrong_arguments(trawl, tmp_path, arguments, message):
    (tmp_path / "there.json").write_text("{}")
    code, _, err = trawl("evaluate", *arguments)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_observations_are_normalised_by_the_statistics_of_a_file(trawl, tmp_path):
    network = saved_policy("policy.pt2")
    with Collector("Pendulum-v1", frames_per_batch=100, normalize_observations=True) as collector:
        collector.next()
        statistics = collector.normalization
    torch.save(statistics.state_dict(), "statistics.pt")
    arguments = ["Pendulum-v1", "--policy", "policy.pt2", "--episodes", "2", "--max-steps", "30"]
    arguments += ["--normalization", "statistics.pt"]
    code, _, err = trawl("evaluate", *arguments, "--out", "one.json")
    assert code == 0, err
    facts = json.loads((tmp_path / "one.json").read_text())
    options = {"num_trajectories": 2, "max_steps": 30}
    with Evaluator("Pendulum-v1", network, normalization=statistics, **options) as evaluator:
        expected = evaluator.evaluate().episodes.returns.tolist()
    assert facts["returns"] == pytest.approx(expected, rel=1e-5)
    with Evaluator("Pendulum-v1", network, **options) as evaluator:
        assert facts["returns"] != pytest.approx(evaluator.evaluate().episodes.returns.tolist())


def test_a_file_without_statistics_is_refused(trawl, tmp_path):
    torch.save({"weight": torch.zeros(3)}, "weights.pt")
    for name, text in (("none.pt", "there is no such file"), ("weights.pt", "torch.save wrote of")):
        code, _, err = trawl("evaluate", "Pendulum-v1", "--normalization", name)
        assert code == 2
        assert f"--normalization {name}" in err
        assert text in " ".join(err.split())
