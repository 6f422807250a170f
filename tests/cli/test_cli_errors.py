"""Whatever is wrong is one line on stderr and exit code 2, and leaves nothing behind."""

import os

import gymnasium
import pytest
from gymnasium import spaces

from trawl.cli.errors import describe, message_of, one_line


def tree():
    return sorted(os.path.join(top, name) for top, _, names in os.walk(".") for name in names)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["NoSuchThing-v0"], "environment NoSuchThing-v0 can't be made: Environment"),
        (["no_such_module:Thing-v0"], "environment no_such_module:Thing-v0 can't be made"),
        (["Pendulum-v1", "--frames", "0"], "--frames must be at least 1, but it is 0"),
        (["Pendulum-v1", "--frames", "-5"], "--frames must be at least 1, but it is -5"),
        (["Pendulum-v1", "--frames-per-batch", "0"], "--frames-per-batch must be at least 1"),
        (["Pendulum-v1", "--max-frames-per-traj", "0"], "--max-frames-per-traj must be at least"),
        (["Pendulum-v1", "--envs", "0"], "--envs must be at least 1"),
        (["Pendulum-v1", "--envs", "4", "--env-processes", "3"], "--env-processes must divide"),
        (["Pendulum-v1", "--env-processes", "-1"], "--env-processes must divide"),
        (
            ["Pendulum-v1", "--envs", "2", "--env-processes", "4"],
            "--env-processes must divide the number of environments (--envs), which is 2, but",
        ),
        (["Pendulum-v1", "--seed", "-1"], "--seed must be between 0 and 2**63 - 1"),
        (["Pendulum-v1", "--policy", "none.pt2"], "--policy none.pt2: there is no such file"),
        (["Pendulum-v1", "--policy", "none:here"], "--policy none:here: No module named 'none'"),
        (["Pendulum-v1", "--policy", "file"], "file is not a policy"),
        (
            ["Pendulum-v1", "--policy", "full/f.py"],
            "full/f.py is not a policy: it is neither a program",
        ),
        (["Pendulum-v1", "--trace", ""], "--trace must name a file, such as run.json.gz"),
        (["Pendulum-v1", "--trace", "full"], "--trace full can't be written: Is a directory"),
        (
            ["Pendulum-v1", "--trace", "no/run.json.gz", "--workers", "2"],
            "--trace no/run.json.gz can't be written: No such file or directory",
        ),
        (["Pendulum-v1", "--out", "file"], "file already exists"),
        (["Pendulum-v1", "--out", "full"], "full already exists"),
        (["Pendulum-v1", "--out", "file/d"], "file/d can't be written: Not a directory"),
        (["Pendulum-v1", "--out", "/proc/d"], "/proc/d can't be written: No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_collect_says_what_is_wrong(arguments, words, trawl):
    os.mkdir("full")
    for name in ("file", "full/f.py"):
        with open(name, "w") as file:
            file.write("mine")
    code, out, err = trawl("collect", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"trawl: {words}")
    assert err.count("\n") == 1
    assert tree() == ["./file", "./full/f.py"]
    assert "full/f.py:NAME" in err or "full/f.py" not in arguments


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_named(trawl):
    os.mkdir("locked", 0o500)
    code, _, err = trawl("collect", "Pendulum-v1", "--out", "locked/d")
    assert (code, err) == (2, "trawl: locked/d can't be written: Permission denied\n")


@pytest.mark.parametrize("policy", ["random", "cli_envs:untrained"])
@pytest.mark.parametrize(
    ("env", "more"),
    [
        ("Broken", []),
        ("Broken", ["--workers", 1]),
        ("Broken", ["--envs", 2]),
        ("Broken", ["--format", "parquet", "--env-kwargs", '{"text": true}']),
        ("broken_vector", []),
        ("broken_parallel", []),
        ("broken_torchrl", []),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else value,
)
def test_an_environment_that_fails_is_blamed_and_not_the_policy(env, more, policy, trawl):
    if env == "broken_torchrl":
        pytest.importorskip("torchrl")
    code, _, err = trawl("collect", f"cli_envs:{env}", "--policy", policy, *more, "--out", "d")
    assert code == 2
    assert err.startswith(f"trawl: environment cli_envs:{env} failed: RuntimeError: no licence")
    assert err.count("\n") == 1
    assert not os.path.exists("d")


def test_an_environment_that_takes_no_seed_is_blamed(trawl):
    code, _, err = trawl("collect", "cli_envs:Unseeded", "--format", "parquet", "--out", "d")
    assert code == 2
    assert err.startswith("trawl: environment cli_envs:Unseeded failed: TypeError: ")


def test_random_actions_are_not_blamed(trawl):
    code, _, err = trawl("collect", "cli_envs:spends_steps", "--max-frames-per-traj", 5)
    assert code == 2
    assert "trawl: the run can't start: ValueError: max_frames_per_traj=5 can't be" in err


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("policy", ["random", "cli_envs:untrained"])
def test_evaluate_blames_an_environment_that_fails(policy, workers, trawl):
    code, _, err = trawl(
        "evaluate", "cli_envs:Broken", "--policy", policy, "--workers", workers, "--out", "d"
    )
    assert code == 2
    assert err.startswith("trawl: environment cli_envs:Broken failed: RuntimeError: no licence")


@pytest.mark.parametrize("command", ["collect", "evaluate"])
def test_what_makes_no_environment_is_the_argument_env(command, trawl):
    code, _, err = trawl(command, "cli_envs:untrained", "--out", "d")
    assert code == 2
    assert (
        "environment cli_envs:untrained can't be made: TypeError: ENV made an object that is not an"
        in err
    )
    assert "create_env_fn" not in err


class Texts(gymnasium.Env):
    observation_space = spaces.Text(9)
    action_space = spaces.Discrete(2)


def test_text_is_refused_with_the_name_of_the_format(trawl):
    gymnasium.register("Texts-v0", Texts, disable_env_checker=True)
    try:
        code, _, err = trawl("collect", "Texts-v0")
    finally:
        del gymnasium.registry["Texts-v0"]
    assert (code, err.count("\n")) == (2, 1)
    words = "Texts-v0 has text ('observation'), which the format memmap can't hold"
    assert words in err


@pytest.mark.parametrize(
    ("directory", "why"),
    [("nowhere", "there is no such folder"), (".", "it has no _dataset.json")],
)
def test_show_says_that_there_is_no_dataset(directory, why, trawl):
    code, out, err = trawl("show", directory)
    assert (code, out) == (2, "")
    assert err == f"trawl: {directory} is not a dataset: {why}\n"


@pytest.mark.parametrize(
    ("frames", "file", "words"),
    [
        (100, "a.png", "no episode has ended"),
        (200, "a.foo", "--plot a.foo: Format 'foo' is not supported"),
        (200, "no/a.png", "no/a.png can't be written: No such file or directory"),
    ],
)
def test_show_says_why_it_can_not_plot(frames, file, words, trawl):
    trawl("collect", "Pendulum-v1", "--frames", frames, "--out", "d")
    code, out, err = trawl("show", "d", "--plot", file)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["collect"], ["collect", "Pendulum-v1", "--frames", "many"], ["--nothing"], ["gather"]],
    ids=" ".join,
)
def test_wrong_arguments_are_explained(arguments, trawl):
    code, out, err = trawl(*arguments)
    assert (code, out) == (2, "")
    assert "help" in err


def test_without_arguments_there_is_help(trawl):
    code, out, _ = trawl()
    assert code == 2
    assert "usage: trawl" in out


def test_a_message_is_its_first_line():
    assert one_line("\n  \x1b[33mWARN: so\x1b[0m  \nand so\n") == "WARN: so"
    assert one_line("") == ""


def test_the_message_of_a_key_error_has_no_quotes():
    assert message_of(KeyError("it's not there")) == "it's not there"


def test_an_error_is_told_with_its_notes():
    error = ValueError("so")
    error.__notes__ = ["at step 3"]
    assert describe(error) == "ValueError: so (at step 3)"
    assert describe(ValueError()) == "ValueError"
