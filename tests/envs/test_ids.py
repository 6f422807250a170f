"""Ids of environments that Gymnasium does not make."""

import sys

import gymnasium
import nursery
import pytest

from trawl import Collector
from trawl.envs import GymEnv, PettingZooEnv, VmasEnv
from trawl.envs.build import build_one
from trawl.envs.kinds import is_known
from trawl.envs.serial import build_env


def test_ids_of_gymnasium_are_left_alone():
    assert not is_known("CartPole-v1")
    assert not is_known("module:CartPole-v1")
    assert build_one("CartPole-v1").name == "CartPole-v1"


@pytest.mark.parametrize(
    ("env_id", "own"),
    [
        ("gymnax:CartPole-v1", "JaxEnv"),
        ("brax:ant", "JaxEnv"),
        ("jumanji:Snake-v1", "JaxEnv"),
        ("vmas:balance", "VmasEnv"),
        ("pettingzoo:classic/rps-v2", "PettingZooEnv"),
    ],
)
def test_gym_env_refuses_the_ids_of_other_libraries(env_id, own):
    words = f"pass the id to the collector, or the environment to {own}"
    with pytest.raises(ValueError, match=words):
        GymEnv(env_id)
    with pytest.raises(ValueError, match=words):
        GymEnv(env_id, num_envs=2)


def test_pettingzoo():
    pytest.importorskip("mpe2")
    env = build_one("pettingzoo:mpe2/simple_spread_v3", {"N": 2, "categorical_actions": False})
    assert isinstance(env, PettingZooEnv)
    assert env.rollout(3)["agent", "action"].shape == (3, 2, 5)
    env.close()
    env = build_one("pettingzoo:mpe2/simple_spread_v3", {"parallel": False})
    assert list(env.group_map) == ["agent_0", "agent_1", "agent_2"]
    env.close()


def test_an_environment_within_pettingzoo():
    pytest.importorskip("pygame")
    with Collector("pettingzoo:classic/rps-v2", frames_per_batch=10) as collector:
        assert collector.next()["player", "observation"].shape == (10, 2, 4)
    env = build_one("pettingzoo:classic/tictactoe-v3")  # there is no parallel one
    assert list(env.group_map) == ["player_1", "player_2"]
    env.close()


def test_several_environments_of_pettingzoo():
    pytest.importorskip("mpe2")
    options = {"num_envs": 4, "N": 2}
    env_id = "pettingzoo:mpe2/simple_spread_v3"
    with Collector(env_id, frames_per_batch=8, create_env_kwargs=options) as collector:
        batch = collector.next()
        assert collector.stats()["env_path"] == "array"
    assert batch["agent", "observation"].shape[:3] == (4, 2, 2)
    first = batch["agent", "observation"][:, 0].flatten(1)
    assert len(first.unique(dim=0)) == 4
    with pytest.raises(ValueError, match="num_envs must be at least 1, but it is 0"):
        build_env(env_id, {"num_envs": 0})


def test_vmas():
    pytest.importorskip("vmas")
    options = {"num_envs": 2, "max_steps": 3}
    with Collector("vmas:balance", frames_per_batch=8, create_env_kwargs=options) as collector:
        batch = collector.next()
    assert isinstance(collector.env, VmasEnv)
    assert batch["next", "done"][:, 2].all()
    assert build_one("vmas:balance").batch_size == (1,)


@pytest.mark.parametrize("env_id", ["pettingzoo:mpe2/nothing_v0", "pettingzoo:nothing/at_all"])
def test_an_unknown_module_of_pettingzoo(env_id):
    pytest.importorskip("pettingzoo")
    with pytest.raises(ValueError, match=r"there is no PettingZoo environment '.*nothing"):
        build_one(env_id)


def test_no_environments_of_vmas():
    pytest.importorskip("vmas")
    with pytest.raises(ValueError, match="num_envs must be at least 1, but it is 0"):
        build_one("vmas:balance", {"num_envs": 0})


def test_an_unknown_scenario_of_vmas():
    pytest.importorskip("vmas")
    with pytest.raises(ValueError, match=r"VMAS has no scenario 'balanc': it has balance, "):
        build_one("vmas:balanc")


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vmas", None)
    with pytest.raises(ImportError, match=r"vmas:balance needs VMAS: .*'trawl-rl\[vmas\]'"):
        build_one("vmas:balance")
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(ImportError, match=r"needs PettingZoo: .*'trawl-rl\[pettingzoo\]'"):
        build_one("pettingzoo:mpe2/simple_spread_v3")


@pytest.mark.parametrize(
    ("env_id", "package", "words"),
    [
        ("ALE/Pong-v5", "ale_py", r"ALE/Pong-v5 needs ALE: .*'trawl-rl\[atari\]'"),
        ("ale_py:ALE/Pong-v5", "ale_py", r"needs ALE: .*'trawl-rl\[atari\]'"),
        ("HalfCheetah-v5", "mujoco", r"HalfCheetah-v5 needs MuJoCo: .*'trawl-rl\[mujoco\]'"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"num_envs": 2}], ids=["one", "vector"])
def test_a_missing_package_of_gymnasium_names_the_extra(
    env_id, package, words, options, monkeypatch
):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.mujoco")]:
        monkeypatch.delitem(sys.modules, name)
    kept = {k: v for k, v in gymnasium.registry.items() if not k.startswith("ALE/")}
    monkeypatch.setattr(gymnasium.envs.registration, "registry", kept)
    monkeypatch.setattr(gymnasium, "registry", kept)
    with pytest.raises(ImportError, match=words):
        build_one(env_id, options)


def test_another_missing_package_keeps_its_error():
    gymnasium.register("Lacking-v0", "nowhere_at_all:Env")
    try:
        with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
            build_one("Lacking-v0")
    finally:
        del gymnasium.registry["Lacking-v0"]


def test_atari_games_are_registered_when_they_are_needed():
    pytest.importorskip("ale_py")
    code = """
from trawl.envs import GymEnv
env = GymEnv("ALE/Pong-v5", obs_type="ram", info_keys=["lives"])
print(env.reset()["info", "lives"].item())
env.close()
"""
    done = nursery.run(code, cwd=".")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "0"


def test_the_command_takes_several_environments_of_pettingzoo(tmp_path, monkeypatch):
    pytest.importorskip("mpe2")
    from trawl.cli import main
    from trawl.data import load

    monkeypatch.chdir(tmp_path)
    command = ["collect", "pettingzoo:mpe2/simple_spread_v3", "--env-kwargs", '{"num_envs": 2}']
    assert main([*command, "--frames", "20", "--out", "found"]) == 0
    assert load("found")["agent", "observation"].shape == (20, 3, 18)
