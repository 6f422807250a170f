"""``--frame-stack``, ``--normalize-observations`` and ``--normalize-rewards``."""

import os
import signal

import nursery
import pytest
import torch
from cli_parts import INLINE, collected, evaluated, refused, trawl
from torch import nn

from trawl import Collector
from trawl.collectors import CollectorConfig, Normalization, NormalizeReward
from trawl.collectors.options import table
from trawl.data import info, load
from trawl.envs.batches.serial import build_env
from trawl.extras.cli.flags import imported_flags, table_flags
from trawl.extras.cli.transforms import stacked_env

FRAMES = ["--frames", 40, "--frames-per-batch", 20, "--seed", 1]
NORMALIZE = ["--normalize-observations", "--normalize-rewards"]
STACKS = ["--policy", "cli_policies:reads_stacks", "--frame-stack", 3]


def expected(**options):
    """The frames of a collector with the same seed."""
    if options.get("normalize_rewards"):
        options["normalize_rewards"] = NormalizeReward(keep_raw=True)
    with Collector(
        "Pendulum-v1", frames_per_batch=20, total_frames=40, exact_frames=True, **options
    ) as collector:
        collector.set_seed(1)
        return torch.cat([batch.clone() for batch in collector])


@pytest.mark.parametrize(
    ("kind", "all_options"),
    [("memmap", True), ("parquet", True), ("minari", True), ("minari", False)],
)
def test_the_frames_of_a_collector_are_stored_in_each_format(kind, all_options):
    if kind != "memmap":
        pytest.importorskip("pyarrow" if kind == "parquet" else "minari")
    options = {"frame_stack": 3, "normalize_rewards": True}
    told = "stacks of 3 frames, normalised rewards"
    if all_options:
        options["normalize_observations"] = True
        told = "stacks of 3 frames, normalised observations, normalised rewards"
    given = [f"--{name.replace('_', '-')}" for name in options]
    given.insert(1, 3)
    code, out, err = trawl("collect", "Pendulum-v1", *FRAMES, *given, "--format", kind,
                           "--out", "d")  # fmt: skip
    assert code == 0, err
    for text in (out, trawl("show", "d")[1]):
        assert told in text
    assert options.items() <= info("d").items()
    found, wanted = load("d"), expected(**options)
    for one, other in ((found, wanted), (found["next"], wanted["next"])):
        assert torch.equal(one["observation"], other["observation"].to_dense())
    assert torch.equal(found["next", "reward"], wanted["next", "reward"])
    assert torch.equal(found["next", "raw_reward"], expected()["next", "reward"])
    if kind == "minari" and not all_options:
        import minari

        # No environment has normalised observations, but one has stacks.
        env = minari.MinariDataset("d/data").recover_environment()
        assert env.observation_space.shape == (3, 3)
        env.close()


@pytest.mark.parametrize("more", [INLINE, ["--envs", 2, "--env-processes", 2]])
def test_a_policy_reads_stacks(more):
    frames = collected("Pendulum-v1", *FRAMES, *STACKS, *more)
    stacks = frames["observation"]
    assert torch.allclose(frames["action"], stacks[:, -1, :1] - stacks[:, 0, :1])


def test_a_program_is_called_with_stacks():
    network = nn.Sequential(nn.Flatten(-2), nn.Linear(9, 1), nn.Tanh())
    torch.export.save(torch.export.export(network, (torch.zeros(3, 3),)), "p.pt2")
    frames = collected("Pendulum-v1", *FRAMES, "--policy", "p.pt2", "--frame-stack", 3)
    assert torch.allclose(frames["action"], network(frames["observation"]), atol=1e-6)
    said = refused("collect", "Pendulum-v1", *FRAMES, "--policy", "p.pt2", "--out", "e")
    assert "exported for batches of exactly 3 observations" in said


def test_evaluation_with_stacks():
    facts, out = evaluated("Pendulum-v1", "--episodes", 2, "--max-steps", 5, *STACKS)
    assert facts["frame_stack"] == 3
    assert "transforms  stacks of 3 frames" in out


@pytest.mark.parametrize(
    ("env", "package", "options"),
    [
        ("CartPole-v1", "gymnasium", {"num_envs": 2}),
        pytest.param("gymnax:CartPole-v1", "gymnax", {"num_envs": 2}, marks=pytest.mark.long),
        ("dm_control:cartpole/balance", "dm_control", {}),
        ("vmas:balance", "vmas", {"num_envs": 2}),
        ("pettingzoo:mpe2/simple_spread_v3", "mpe2", {}),
        ("pettingzoo:mpe2/simple_spread_v3", "mpe2", {"num_envs": 2}),
        ("TorchRL", "torchrl.envs", {}),
        ("TorchRL", "torchrl.envs", {"num_envs": 2}),
    ],
)
def test_a_policy_is_told_the_shapes_of_batches(env, package, options):
    library, own = pytest.importorskip(package), env != "TorchRL"
    made = build_env(env, options) if own else library.GymEnv("Pendulum-v1", **options)
    specs = stacked_env(made, 3).observation_spec
    with Collector(made, frames_per_batch=4, frame_stack=3) as collector:
        batch = collector.next()
    axis = len(made.batch_size)
    for key, spec in specs.items(True, True):
        assert batch[key].select(axis, 0).shape == spec.shape
        assert spec.zero().shape == spec.shape


@pytest.mark.parametrize(
    ("env", "option"),
    [
        ("gymnax:CartPole-v1", ["--frame-stack", 2]),
        ("vmas:balance", ["--normalize-observations"]),
        ("vmas:balance", ["--normalize-observations", *INLINE]),
    ],
)
def test_envs_of_a_library_that_steps_batches(env, option):
    pytest.importorskip(env.partition(":")[0])
    assert len(collected(env, *FRAMES, *option, "--envs", 2)) == 40
    if option[0] == "--frame-stack":
        command = [env, *option, "--episodes", 3, "--max-steps", 5, "--envs", 2]
        assert evaluated(*command)[0]["lengths"] == [5, 5, 5]


# --- statistics


def statistics():
    state = torch.load("d/normalization.pt", weights_only=True)
    return Normalization.from_state(state)


def test_returns_are_those_of_the_environment():
    found = []
    for name, more in (("d", NORMALIZE), ("e", [])):
        _, out, _ = trawl("collect", "Pendulum-v1", *FRAMES, "--max-frames-per-traj", 10, *more,
                          "--out", name)  # fmt: skip
        found += [out, trawl("show", name)[1]]
    lines = [[line for line in text.splitlines() if "return" in line] for text in found]
    assert lines[0] == lines[1] == lines[2] == lines[3]
    assert lines[0]


def test_statistics_are_for_evaluation():
    collected("Pendulum-v1", *FRAMES, "--normalize-observations")
    found = statistics().observations["observation"]
    assert found.count == 40
    raw = expected()["observation"].double()
    assert torch.allclose(torch.as_tensor(found.mean), raw.mean(0))
    evaluate = ["--episodes", 1, "--max-steps", 5, "--normalization"]
    for path in ("d/normalization.pt", "d"):
        facts, out = evaluated("Pendulum-v1", *evaluate, path)
        assert facts["normalization"] == path
        assert "transforms  normalised observations" in out
    collected("Pendulum-v1", *FRAMES, "--normalize-rewards", out="rewards")
    for path, env, words in (
        ("d", "CartPole-v1", "doesn't fit the environment: it has statistics of 'observation'"),
        ("rewards", "Pendulum-v1", "rewards has statistics of rewards only"),
    ):
        said = refused("evaluate", env, *evaluate, path)
        assert said.startswith("--normalization ")
        assert words in said


@pytest.mark.parametrize(
    "more", [[], ["--envs", 2], INLINE], ids=["same", "new episodes", "workers"]
)
def test_statistics_continue(more):
    command = ["collect", "Pendulum-v1", *FRAMES, *NORMALIZE, "--out", "d", "--resume"]
    first = more if "--workers" in more else []
    assert trawl(*command, *first)[0] == 0
    assert statistics().observations["observation"].count == 40
    code, _, err = trawl(*command, *more, "--frames", 80)
    assert code == 0, err
    assert ("new episodes begin" in err) == (first != more)
    assert statistics().observations["observation"].count == 80
    assert statistics().rewards["reward"].count == 80
    assert "the statistics" not in err


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "there is no d/normalization.pt"), ("nothing", "d/normalization.pt can't be read")],
)
def test_statistics_that_are_missing_or_damaged_begin_anew(content, words):
    command = ["collect", "Pendulum-v1", "--normalize-observations", "--out", "d", "--resume"]
    trawl(*command, *FRAMES)
    os.unlink("d/normalization.pt")
    if content is not None:
        with open("d/normalization.pt", "w") as file:
            file.write(content)
    code, _, err = trawl(*command, "--frames", 80, "--envs", 2)
    assert code == 0, err
    assert f"the statistics begin anew: {words}" in err
    assert statistics().observations["observation"].count == 40


KILLED_AFTER_TWO_BATCHES = """
import os, signal, sys
from trawl.extras.cli import main, saving
saves, saving._SHARE, saving._SECONDS = sys.argv.pop(1) == "saves", 1e9, 0.0
note, left = saving.StateSaver.note, [1, 0]
def noted(self, batch):
    saves and note(self, batch)
    left.pop(0) or os.kill(os.getpid(), signal.SIGKILL)
saving.StateSaver.note = noted
main()
"""


@pytest.mark.parametrize("saves", [True, False])
def test_statistics_survive_a_kill(saves):
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


# --- arguments that the table of options declares


def test_the_arguments_are_those_of_the_table():
    """The command reads the table as text, or imports it if there is only compiled code."""
    declared = [name for name, one in table(CollectorConfig).items() if one.flag is not None]
    assert [one.name for one in table_flags()] == declared
    assert table_flags() == tuple(imported_flags())


def test_an_environment_that_fails_is_restarted_if_asked_for():
    command = ["collect", "cli_envs:breaks", "--frames", 30, "--frames-per-batch", 10]
    assert "it broke" in refused(*map(str, command), "--out", "d")
    code, _, err = trawl(*command, "--on-env-error", "restart", "--out", "e")
    assert code == 0, err
    assert info("e")["frames"] == 30
    # The message of its error begins like an option, but is none of it.
    assert "--trace" not in refused("collect", "cli_envs:traces", "--out", "f")
