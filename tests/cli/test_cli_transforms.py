"""``--frame-stack``, ``--normalize-observations`` and ``--normalize-rewards``."""

import json
import os
import signal

import nursery
import pytest
import torch
from cli_parts import run
from torch import nn

from trawl import Collector
from trawl.cli.arguments import TuneArguments
from trawl.cli.transforms import stacked_env
from trawl.cli.tune import command_of
from trawl.collectors import Normalization
from trawl.collectors.tuning import Candidate
from trawl.data import info, load
from trawl.envs.serial import build_env

FRAMES = ["--frames", 40, "--frames-per-batch", 20, "--seed", 1]
NORMALIZE = ["--normalize-observations", "--normalize-rewards"]


def collected(trawl, *arguments, out="d"):
    code, printed, err = trawl("collect", "Pendulum-v1", *FRAMES, *arguments, "--out", out)
    assert code == 0, err
    return load(out), printed


def expected(**options):
    """The frames of a collector with the same seed."""
    with Collector(
        "Pendulum-v1", frames_per_batch=20, total_frames=40, exact_frames=True, **options
    ) as collector:
        collector.set_seed(1)
        return torch.cat([batch.clone() for batch in collector])


@pytest.mark.parametrize("kind", ["memmap", "parquet", "minari"])
def test_stacks_are_stored_by_each_format(kind, trawl):
    if kind != "memmap":
        pytest.importorskip("pyarrow" if kind == "parquet" else "minari")
    data, printed = collected(trawl, "--frame-stack", 3, "--format", kind)
    assert "stacks of 3 frames" in printed
    assert info("d")["frame_stack"] == 3
    stacks = expected(frame_stack=3)
    for found, wanted in ((data, stacks), (data["next"], stacks["next"])):
        assert torch.equal(found["observation"], wanted["observation"].to_dense())
    assert "stacks of 3 frames" in trawl("show", "d")[1]


def test_minari_has_the_environment_with_stacks(trawl):
    minari = pytest.importorskip("minari")
    collected(trawl, "--frame-stack", 3, "--format", "minari")
    env = minari.MinariDataset("d/data").recover_environment()
    assert env.observation_space.shape == (3, 3)
    env.close()


@pytest.mark.parametrize("more", [[], ["--workers", 2], ["--envs", 2, "--env-processes", 2]])
def test_a_policy_reads_stacks(more):
    policy = ["--policy", "cli_policies:reads_stacks", "--frame-stack", 3]
    done = run("collect", "Pendulum-v1", *FRAMES, *policy, *more, "--out", "d", cwd=".")
    assert done.returncode == 0, done.stderr
    data = load("d")
    stacks = data["observation"]
    assert torch.allclose(data["action"], stacks[:, -1, :1] - stacks[:, 0, :1])


def test_a_program_is_called_with_stacks(trawl):
    network = nn.Sequential(nn.Flatten(-2), nn.Linear(9, 1), nn.Tanh())
    torch.export.save(torch.export.export(network, (torch.zeros(3, 3),)), "p.pt2")
    data, _ = collected(trawl, "--policy", "p.pt2", "--frame-stack", 3)
    assert torch.allclose(data["action"], network(data["observation"]), atol=1e-6)
    code, _, err = trawl("collect", "Pendulum-v1", *FRAMES, "--policy", "p.pt2", "--out", "e")
    assert code == 2
    assert "exported for batches of exactly 3 observations" in err


def test_evaluation_with_stacks(trawl):
    command = ["evaluate", "Pendulum-v1", "--episodes", 2, "--max-steps", 5, "--frame-stack", 3]
    policy = ["--policy", "cli_policies:reads_stacks"]
    code, out, err = trawl(*command, *policy, "--out", "e.json")
    assert code == 0, err
    with open("e.json") as file:
        assert json.load(file)["frame_stack"] == 3
    assert "transforms  stacks of 3 frames" in out


@pytest.mark.parametrize(
    ("env", "package", "options"),
    [
        ("CartPole-v1", None, {"num_envs": 2}),
        ("gymnax:CartPole-v1", "gymnax", {"num_envs": 2}),
        ("dm_control:cartpole/balance", "dm_control", {}),
        ("vmas:balance", "vmas", {"num_envs": 2}),
        ("pettingzoo:mpe2/simple_spread_v3", "mpe2", {}),
        ("pettingzoo:mpe2/simple_spread_v3", "mpe2", {"num_envs": 2}),
    ],
)
def test_a_policy_is_told_the_shapes_of_batches(env, package, options):
    if package is not None:
        pytest.importorskip(package)
    made = build_env(env, options)
    specs = stacked_env(made, 3).observation_spec
    with Collector(made, frames_per_batch=4, frame_stack=3) as collector:
        batch = collector.next()
    axis = len(made.batch_size)
    for key, spec in specs.items(True, True):
        assert batch[key].select(axis, 0).shape == spec.shape
        assert spec.zero().shape == spec.shape


@pytest.mark.parametrize("kind", ["memmap", "parquet", "minari"])
def test_normalised_values_are_stored_by_each_format(kind, trawl):
    if kind != "memmap":
        pytest.importorskip("pyarrow" if kind == "parquet" else "minari")
    data, printed = collected(trawl, *NORMALIZE, "--format", kind)
    assert "normalised observations, normalised rewards" in printed
    assert info("d")["normalize_observations"] is True
    assert info("d")["normalize_rewards"] is True
    wanted = expected(normalize_observations=True, normalize_rewards=True)
    assert torch.equal(data["observation"], wanted["observation"])
    assert torch.equal(data["next", "reward"], wanted["next", "reward"])
    raw = expected()
    assert torch.equal(data["next", "raw_reward"], raw["next", "reward"])


def test_returns_are_those_of_the_environment(trawl):
    limit = ["--max-frames-per-traj", 10]
    _, normalised = collected(trawl, *limit, *NORMALIZE)
    _, plain = collected(trawl, *limit, out="e")
    lines = [
        [line for line in text.splitlines() if "return" in line]
        for text in (normalised, plain, trawl("show", "d")[1], trawl("show", "e")[1])
    ]
    assert lines[0] == lines[1] == lines[2] == lines[3]
    assert lines[0]


def statistics(out="d"):
    state = torch.load(f"{out}/normalization.pt", weights_only=True)
    return Normalization.from_state(state)


def test_statistics_are_for_evaluation(trawl):
    collected(trawl, "--normalize-observations")
    found = statistics().observations["observation"]
    raw = expected()["observation"].double()
    assert found.count == 40
    assert torch.allclose(torch.as_tensor(found.mean), raw.mean(0))
    command = ["evaluate", "Pendulum-v1", "--episodes", 1, "--max-steps", 5]
    for number, path in enumerate(["d/normalization.pt", "d"]):
        code, out, err = trawl(*command, "--normalization", path, "--out", f"{number}.json")
        assert code == 0, err
        assert "transforms  normalised observations" in out
        with open(f"{number}.json") as file:
            assert json.load(file)["normalization"] == path


def test_statistics_that_do_not_fit_an_evaluation(trawl):
    collected(trawl, "--normalize-observations")
    collected(trawl, "--normalize-rewards", out="rewards")
    collected(trawl, out="plain")
    for path, env, words in (
        ("d", "CartPole-v1", "doesn't fit the environment: it has statistics of 'observation'"),
        ("rewards", "Pendulum-v1", "rewards has statistics of rewards only"),
        ("plain", "Pendulum-v1", "plain: there is no such file as plain/normalization.pt"),
    ):
        code, _, err = trawl("evaluate", env, "--normalization", path, "--out", "e.json")
        assert code == 2
        assert err.startswith("trawl: --normalization ")
        assert words in err


def test_statistics_of_workers(trawl):
    collected(trawl, "--normalize-observations", "--workers", 2)
    assert statistics().observations["observation"].count == 40


@pytest.mark.parametrize("more", [[], ["--envs", 2]], ids=["same episodes", "new episodes"])
def test_statistics_continue(more, trawl):
    command = [*NORMALIZE, "--resume"]
    collected(trawl, *command)
    code, _, err = trawl(
        "collect", "Pendulum-v1", "--frames", 80, *command, *more, "--out", "d", "--seed", 1
    )
    assert code == 0, err
    assert ("new episodes begin" in err) == bool(more)
    assert statistics().observations["observation"].count == 80
    assert statistics().rewards["reward"].count == 80
    assert "the statistics" not in err


KILLED_AFTER_TWO_BATCHES = """
import os, signal, sys
from trawl.cli import main, saving
saves, saving._SHARE, saving._SECONDS = sys.argv.pop(1) == "saves", 1e9, {}
note, left = saving.StateSaver.note, [1, 0]
def noted(self, batch):
    saves and note(self, batch)
    left.pop(0) or os.kill(os.getpid(), signal.SIGKILL)
saving.StateSaver.note = noted
main()
"""


@pytest.mark.parametrize("saves", [True, False])
def test_statistics_survive_a_kill(saves, trawl):
    command = ["collect", "Pendulum-v1", "--normalize-observations", "--resume", "--out", "d"]
    program, name = KILLED_AFTER_TWO_BATCHES, "saves" if saves else "doesn't"
    killed = nursery.run(program, name, *command, *FRAMES, cwd=".")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert info("d")["frames"] == 40
    code, _, err = trawl(*command, "--frames", 80, "--envs", 2)
    assert code == 0, err
    assert statistics().observations["observation"].count == (80 if saves else 40)
    note = "the statistics in d/normalization.pt are those of 0 frames, but the dataset has 40"
    assert (note in err) == (not saves)


def test_statistics_that_are_missing(trawl):
    collected(trawl, "--normalize-observations")
    os.unlink("d/normalization.pt")
    command = ["--normalize-observations", "--resume", "--envs", 2, "--out", "d"]
    code, _, err = trawl("collect", "Pendulum-v1", "--frames", 80, *command)
    assert code == 0, err
    assert "the statistics begin anew: there is no d/normalization.pt" in err


def test_statistics_that_cannot_be_read(trawl):
    collected(trawl, "--normalize-observations")
    with open("d/normalization.pt", "w") as file:
        file.write("nothing")
    command = ["--normalize-observations", "--resume", "--envs", 2, "--out", "d"]
    code, _, err = trawl("collect", "Pendulum-v1", "--frames", 80, *command)
    assert code == 0, err
    assert "the statistics begin anew: d/normalization.pt can't be read" in err
    assert statistics().observations["observation"].count == 40


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (["--frame-stack", 3], [], "with --frame-stack 3, and can't be resumed without it: pass"),
        (["--frame-stack", 3], ["--frame-stack", 2], "can't be resumed with --frame-stack 2"),
        (
            [],
            ["--normalize-rewards"],
            "without --normalize-rewards, and can't be resumed with it: leave",
        ),
        (["--normalize-observations"], [], "with --normalize-observations, and can't be resumed w"),
    ],
)
def test_resuming_needs_the_same_options(before, now, words, trawl):
    collected(trawl, *before)
    code, _, err = trawl("collect", "Pendulum-v1", "--frames", 80, *now, "--resume", "--out", "d")
    assert code == 2
    assert words in err


@pytest.mark.parametrize("command", ["collect", "evaluate", "tune"])
def test_a_stack_of_one_frame(command, trawl):
    code, _, err = trawl(command, "Pendulum-v1", "--frame-stack", 1)
    assert code == 2
    assert "--frame-stack must be at least 2, but it is 1" in err


@pytest.mark.parametrize(
    "command",
    [["collect", "--normalize-observations"], ["evaluate", "--normalization", "none.pt"]],
)
def test_an_observation_is_not_stacked_and_normalised(command, trawl):
    name, *more = command
    code, _, err = trawl(name, "Pendulum-v1", "--frame-stack", 2, *more)
    assert code == 2
    assert f"--frame-stack can't be used with {more[0]}" in err


@pytest.mark.parametrize(
    ("env", "option"),
    [
        ("gymnax:CartPole-v1", ["--frame-stack", 2]),
        ("vmas:balance", ["--normalize-observations"]),
        ("vmas:balance", ["--normalize-observations", "--workers", 1]),
    ],
)
def test_envs_of_a_library_that_steps_batches(env, option, trawl):
    pytest.importorskip(env.partition(":")[0])
    code, _, err = trawl("collect", env, *FRAMES, *option, "--envs", 2, "--out", "d")
    assert code == 0, err
    assert len(load("d")) == 40


def test_evaluating_several_environments_of_a_library_that_steps_batches(trawl):
    pytest.importorskip("gymnax")
    command = ["evaluate", "gymnax:CartPole-v1", "--frame-stack", 2, "--episodes", 3]
    code, _, err = trawl(*command, "--max-steps", 5, "--envs", 2, "--out", "e.json")
    assert code == 0, err
    with open("e.json") as file:
        assert json.load(file)["lengths"] == [5, 5, 5]


@pytest.mark.parametrize("more", [[], ["--workers", 2]])
@pytest.mark.parametrize("option", [["--frame-stack", 2], ["--normalize-rewards"]])
def test_several_batches_of_tensors(option, more, trawl):
    pytest.importorskip("gymnax")
    command = ["gymnax:CartPole-v1", "--env-kwargs", '{"num_envs": 3}', "--envs", 2, "--out", "d"]
    code, _, err = trawl("collect", *command, *FRAMES, *option, *more)
    assert code == 2
    assert err.startswith(f"trawl: {option[0]} can't be used with --envs 2")
    assert """--env-kwargs '{"num_envs": 6}'""" in err


@pytest.mark.parametrize(
    ("env", "option", "words"),
    [
        ("cli_envs:Saying", ["--frame-stack", 2], "--frame-stack"),
        ("FrozenLake-v1", ["--normalize-observations"], "--normalize-observations"),
    ],
)
def test_an_environment_that_does_not_fit(env, option, words, trawl):
    code, _, err = trawl("collect", env, *FRAMES, *option, "--out", "d", "--format", "parquet")
    assert code == 2
    assert err.startswith(f"trawl: {words} ")


def test_the_best_layout_is_printed_with_the_options():
    args = TuneArguments("Pendulum-v1", frame_stack=4, normalize_rewards=True)
    command = command_of(args, Candidate(envs=2, env_processes=0, workers=0, frames_per_batch=100))
    assert "--frame-stack 4 --normalize-rewards --envs 2" in command


def test_tuning_measures_with_the_options(trawl):
    policy = ["--policy", "cli_policies:reads_stacks", "--frame-stack", 3, "--normalize-rewards"]
    small = ["--frames-per-batch", 8, "--budget", 2, "--max-workers", 1, "--max-envs", 1]
    code, out, err = trawl("tune", "Pendulum-v1", *policy, *small)
    assert code == 0, err
    assert "--frame-stack 3 --normalize-rewards" in out
    assert "normalize_rewards=NormalizeReward(keep_raw=True)" in out
