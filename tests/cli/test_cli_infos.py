"""``--info-keys``, and datasets with entries of the info."""

import json

import pytest
from cli_parts import run

from trawl.data import info, load


def collected(trawl, *arguments, out="d", frames=20):
    command = ["collect", *arguments, "--frames", frames, "--seed", 1, "--out", out]
    code, _, err = trawl(*command)
    assert code == 0, err
    return load(out)


def check(batch):
    """Compares the infos with the observations in the same rows."""
    for rows in (batch, batch["next"]):
        steps = rows["observation"]
        assert (rows["info", "action_mask"][:, 1:2] == steps % 2).all()
        assert (rows["info", "nested", "half"] == steps / 2).all()
    done = batch["next", "done"]
    assert (batch["next", "info", "episode", "l"] == 5 * done).all()
    assert (batch["info", "episode", "l"] == 0).all()


NAMES = ["--info-keys", "action_mask", "nested/half", "episode"]


@pytest.mark.parametrize("kind", ["memmap", "parquet", "minari"])
def test_each_format_stores_them(kind, trawl):
    if kind != "memmap":
        pytest.importorskip("pyarrow" if kind == "parquet" else "minari")
    check(collected(trawl, "cli_envs:Informing", *NAMES, "--format", kind))
    assert info("d")["info_keys"] == NAMES[1:]
    code, out, _ = trawl("show", "d")
    assert code == 0
    assert "'action_mask'" in out


def test_minari_has_them_as_infos(trawl):
    minari = pytest.importorskip("minari")
    collected(trawl, "FrozenLake-v1", "--info-keys", "prob", "--format", "minari")
    dataset = minari.MinariDataset("d/data")
    (episode,) = dataset.iterate_episodes([0])
    assert len(episode.infos["info.prob"]) == len(episode.rewards) + 1
    dataset.recover_environment().close()


@pytest.mark.parametrize("kind", ["parquet", "minari"])
def test_text_is_stored(kind, trawl):
    pytest.importorskip("pyarrow" if kind == "parquet" else "minari")
    batch = collected(trawl, "cli_envs:Informing", "--info-keys", "said", "--format", kind)
    for rows in (batch, batch["next"]):
        assert list(rows["info", "said"]) == [f"é step {int(x)}" for x in rows["observation"]]


def test_a_policy_reads_them(trawl):
    policy = ["--policy", "cli_envs:allowed"]
    batch = collected(trawl, "cli_envs:Informing", "--info-keys", "action_mask", *policy)
    assert (batch["action"].argmax(-1, keepdim=True) == batch["observation"] % 2).all()
    policy += ["--episodes", 2, "--out", "e.json"]
    code, _, err = trawl("evaluate", "cli_envs:Informing", "--info-keys", "action_mask", *policy)
    assert code == 0, err
    with open("e.json") as file:
        assert json.load(file)["info_keys"] == ["action_mask"]


def test_infos_of_jax(trawl):
    pytest.importorskip("gymnax")
    command = ["gymnax:CartPole-v1", "--info-keys"]
    batch = collected(trawl, *command, "discount")
    ended = batch["next", "terminated"]
    assert (batch["next", "info", "discount"] == ~ended).all()
    code, _, err = trawl("collect", *command, "absent", "--frames", 2, "--out", "other")
    assert code == 2
    assert "info_keys has 'absent', but the info of gymnax CartPole-v1 has only ['disc" in err


def test_in_workers_and_processes():
    for more in (["--workers", 2], ["--envs", 2, "--env-processes", 2]):
        out = "-".join(map(str, more)).replace("-", "")
        command = ["collect", "cli_envs:Informing", *NAMES, *more, "--frames", 40, "--out", out]
        done = run(*command, cwd=".")
        assert done.returncode == 0, done.stderr
        check(load(out))


def test_resuming_needs_the_same_names(trawl):
    collected(trawl, "FrozenLake-v1", "--info-keys", "prob")
    again = ["collect", "FrozenLake-v1", "--frames", 40, "--out", "d", "--resume"]
    code, _, err = trawl(*again)
    assert code == 2
    assert "was collected with --info-keys ['prob']" in err
    assert trawl(*again, "--info-keys", "prob")[0] == 0
    assert load("d")["info", "prob"].shape == (40, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["CartPole-v1", "--info-keys", "absent"], "info_keys has 'absent', but the info of"),
        (["cli_envs:Informing", "--info-keys", "absent"], "has only ['action_mask', 'episode'"),
        (["cli_envs:with_infos", "--info-keys", "said"], "pass info_keys to the object that makes"),
        (["cli_envs:Informing", "--info-keys", "object", "--format", "parquet"],
         "without a fixed shape (('info', 'object')"),
        (["cli_envs:Informing", "--info-keys", "said"], "can't hold: pass --format parquet"),
        (["FrozenLake-v1", "--info-keys", "prob", "--env-kwargs", '{"info_keys": ["prob"]}'],
         "pass one of them"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_a_line(arguments, words, trawl):
    code, _, err = trawl("collect", *arguments, "--frames", 20, "--out", "d")
    assert code == 2
    assert words in err.splitlines()[-1]
