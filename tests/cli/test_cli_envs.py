"""ENV as a function, ``--env-kwargs``, ``--deterministic``, and environments that speak."""

import shutil
from pathlib import Path

import pytest
from cli_parts import run

from trawl.data import info, load

HERE = Path(__file__).parent


WAYS = pytest.mark.parametrize(
    "more", [[], ["--workers", 2], ["--envs", 2]], ids=["one", "workers", "envs"]
)


def collected(trawl, *arguments, frames=40, out="d"):
    """The frames that the command collects."""
    command = ["collect", *arguments, "--frames", frames, "--seed", 1, "--out", out]
    if "--frames-per-batch" not in arguments:
        command += ["--frames-per-batch", 20]
    if "--workers" in arguments or any(".py:" in str(each) for each in arguments):
        # In a process of its own, whose workers find what it finds.
        done = run(*command, cwd=".")
        assert done.returncode == 0, done.stderr
    else:
        code, _, err = trawl(*command)
        assert code == 0, err
    return load(out)


@pytest.mark.parametrize("name", ["pendulum", "name", "vector", "torchrl", "Saying"])
def test_a_function_makes_the_environment(name, trawl):
    if name == "torchrl":
        pytest.importorskip("torchrl")
    frames = 42 if name == "vector" else 40
    batch = collected(trawl, f"cli_envs:{name}", "--format", "parquet", "--frames-per-batch",
                      frames // 2, frames=frames)  # fmt: skip
    assert len(batch) == frames
    assert info("d")["env"] == f"cli_envs:{name}"


@WAYS
def test_a_file_has_the_function(more, trawl, tmp_path):
    # The name of a module that there is, another beside it, and an id that is registered.
    (tmp_path / "sub").mkdir()
    shutil.copy(HERE / "cli_envs.py", tmp_path / "sub" / "random.py")
    (tmp_path / "sub" / "uses.py").write_text(
        "import beside\nfrom gymnasium import register\n"
        "def make(): return beside.pendulum()\n"
        "register('Registered-v0', beside.pendulum)\n"
    )
    shutil.copy(HERE / "cli_envs.py", tmp_path / "sub" / "beside.py")
    assert collected(trawl, "sub/random.py:pendulum", *more).shape == (40,)
    assert collected(trawl, "sub/uses.py:make", *more, out="e").shape == (40,)
    assert collected(trawl, "sub/uses.py:Registered-v0", *more, out="f").shape == (40,)


def test_a_file_has_the_policy(trawl, tmp_path):
    shutil.copy(HERE / "cli_envs.py", tmp_path / "mine.py")
    batch = collected(trawl, "Pendulum-v1", "--policy", "mine.py:gaussian", "--workers", 1)
    assert batch["action"].std() > 0.5


@WAYS
@pytest.mark.parametrize("env", ["Pendulum-v1", "cli_envs:pendulum"])
def test_the_environment_gets_its_arguments(env, more, trawl):
    name = "g" if env == "Pendulum-v1" else "gravity"
    usual = collected(trawl, env, *more)
    floating = collected(trawl, env, "--env-kwargs", f'{{"{name}": 0.0}}', *more, out="e")
    assert (usual["observation"] != floating["observation"]).any()
    assert info("e")["env_kwargs"] == {name: 0.0}
    assert "env_kwargs" not in info("d")
    _, out, _ = trawl("show", "e")
    assert f"{env} {{'{name}': 0.0}}" in out


def test_arguments_of_ours_are_taken_too(trawl):
    batch = collected(trawl, "CartPole-v1", "--env-kwargs", '{"categorical_action_encoding": true}')
    assert batch["action"].shape == (40,)


@pytest.mark.parametrize("more", [[], ["--env-kwargs", '{"g": 3.0}']], ids=["plain", "arguments"])
def test_minari_is_told_the_arguments(more, trawl):
    minari = pytest.importorskip("minari")
    collected(trawl, "Pendulum-v1", "--format", "minari", *more)
    env = minari.MinariDataset("d/data").recover_environment()
    assert env.unwrapped.g == (3.0 if more else 10.0)


def test_minari_is_told_the_spaces_of_a_function(trawl):
    minari = pytest.importorskip("minari")
    collected(trawl, "cli_envs:Saying", "--format", "minari")
    dataset = minari.MinariDataset("d/data")
    assert dataset.observation_space["said"].max_length == 20
    assert dataset[0].observations["said"] == [f"é step {n}" for n in range(6)]
    loaded = load("d")
    assert loaded["next", "said"][:5] == [f"é step {n}" for n in range(1, 6)]


def test_only_the_same_arguments_go_on(trawl):
    collected(trawl, "Pendulum-v1", "--env-kwargs", '{"g": 3.0}')
    code, _, err = trawl("collect", "Pendulum-v1", "--frames", 80, "--out", "d", "--resume")
    assert code == 2
    assert "was collected with --env-kwargs {'g': 3.0}" in err
    code, _, _ = trawl("collect", "Pendulum-v1", "--frames", 80, "--out", "d", "--resume",
                       "--env-kwargs", '{"g": 3.0}')  # fmt: skip
    assert (code, len(load("d"))) == (0, 80)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Pendulum-v1", "--env-kwargs", "{"], "must be a JSON object, but it is not valid JSON"),
        (["Pendulum-v1", "--env-kwargs", "[1]"], "but it is [1]"),
        (["Pendulum-v1", "--env-kwargs", '{"gg": 1}'], "can't be made"),
        (["cli_envs:pendulum", "--env-kwargs", '{"g": 1}'], "can't be made: TypeError"),
        (["cli_envs:nothing"], "module 'cli_envs' has no attribute 'nothing'"),
        (["cli_envs:NUMBER"], "NUMBER must be a function, but it is int"),
        (["cli_envs:fails"], "ZeroDivisionError: no environment today"),
        (["nowhere:make"], "No module named 'nowhere'"),
        (["nowhere.py:make"], "nowhere.py: No such file or directory"),
        (["cli_envs:Saying", "--env-kwargs", '{"kind": "sequence"}'], "without a fixed shape"),
        (["cli_envs:Saying"], "('said'), which the format memmap can't hold: pass --format"),
        (["Pendulum-v1", "--deterministic"], "--deterministic needs a policy"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_a_line(arguments, words, trawl):
    code, _, err = trawl("collect", *arguments, "--frames", 20, "--out", "d")
    assert code == 2
    assert words in err.splitlines()[-1]
    assert not Path("d").exists()


@pytest.mark.parametrize("more", [[], ["--workers", 1]], ids=["here", "worker"])
def test_a_policy_acts_deterministically(more, trawl):
    policy = ["--policy", "cli_envs:gaussian"]
    batch = collected(trawl, "Pendulum-v1", *policy, "--deterministic", *more)
    assert (batch["action"] == 0.25).all()
    assert "gaussian, deterministic" in trawl("show", "d")[1]
    assert collected(trawl, "Pendulum-v1", *policy, *more, out="e")["action"].std() > 0.5
    command = ["collect", "Pendulum-v1", *policy, "--frames", 80, "--out", "d", "--resume"]
    code, _, err = trawl(*command)
    assert code == 2
    assert "collected with --deterministic, and can't be resumed without it" in err


# --- text


@WAYS
@pytest.mark.parametrize("kind", ["parquet", "minari"])
def test_text_is_written_and_read_back(kind, more, trawl):
    pytest.importorskip("minari")
    batch = collected(trawl, "cli_envs:Saying", "--format", kind, *more)
    assert [f"é step {int(x)}" for x in batch["x"][:, 0]] == list(batch["said"])
    assert [f"é step {int(x)}" for x in batch["next", "x"][:, 0]] == list(batch["next", "said"])
    parts = [text for part in load("d", batch_size=7) for text in part["said"]]
    assert parts == list(batch["said"])
    code, out, _ = trawl("show", "d")
    assert code == 0
    assert ["'said'", "(40)", "str"] in [line.split() for line in out.splitlines()]
    assert "8 episodes" in out


def test_text_is_gone_on_with(trawl):
    collect = ["collect", "cli_envs:Saying", "--format", "parquet", "--out", "d", "--resume"]
    for frames in (20, 40):
        assert trawl(*collect, "--frames", frames)[0] == 0
    assert len(load("d")["said"]) == 40


def test_others_read_the_text(trawl):
    pandas = pytest.importorskip("pandas")
    batch = collected(trawl, "cli_envs:Saying", "--format", "parquet")
    assert pandas.read_parquet("d")["next.said"].tolist() == list(batch["next", "said"])
