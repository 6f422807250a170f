"""Ids of environments that Gymnasium does not make."""

import sys

import gymnasium
import nursery
import pytest

from trawl import Collector
from trawl.envs import GymEnv, JaxEnv, PettingZooEnv, VmasEnv
from trawl.envs.build import build_one
from trawl.envs.kinds import is_known


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


SPREAD = "pettingzoo:mpe2/simple_spread_v3"


def test_pettingzoo():
    pytest.importorskip("mpe2")
    env = build_one(SPREAD, {"N": 2, "categorical_actions": False})
    assert isinstance(env, PettingZooEnv)
    assert env.rollout(3)["agent", "action"].shape == (3, 2, 5)
    env.close()
    env = build_one(SPREAD, {"parallel": False})
    assert list(env.group_map) == ["agent_0", "agent_1", "agent_2"]
    env.close()
    pytest.importorskip("pygame")
    env = build_one("pettingzoo:classic/tictactoe-v3")  # there is no parallel one
    assert list(env.group_map) == ["player_1", "player_2"]
    env.close()


def test_several_environments_of_pettingzoo():
    pytest.importorskip("mpe2")
    options = {"num_envs": 4, "N": 2}
    with Collector(SPREAD, frames_per_batch=8, create_env_kwargs=options) as collector:
        batch = collector.next()
        assert collector.stats()["env_path"] == "array"
    assert batch["agent", "observation"].shape[:3] == (4, 2, 2)
    assert len(batch["agent", "observation"][:, 0].flatten(1).unique(dim=0)) == 4


def test_vmas():
    pytest.importorskip("vmas")
    options = {"num_envs": 2, "max_steps": 3}
    with Collector("vmas:balance", frames_per_batch=8, create_env_kwargs=options) as collector:
        batch = collector.next()
    assert isinstance(collector.env, VmasEnv)
    assert batch["next", "done"][:, 2].all()
    assert build_one("vmas:balance").batch_size == (1,)


EXTRA = "pip install 'trawl-rl\\[{}\\]'"


@pytest.mark.parametrize(
    ("env_id", "missing", "error", "words"),
    [
        ("vmas:balance", "vmas", ImportError, "needs VMAS: .*" + EXTRA.format("vmas")),
        (SPREAD, "pettingzoo", ImportError,
         "needs PettingZoo: .*" + EXTRA.format("pettingzoo")),
        ("dm_control:cheetah/run", "dm_control", ImportError,
         "dm_control:cheetah/run needs .*: " + EXTRA.format("dm_control")),
        ("envpool:Pong-v5", "envpool", ImportError,
         "envpool:Pong-v5 needs .*: " + EXTRA.format("envpool")),
        *((f"{name}:some", name, ImportError, f"needs another package: pip install {name}$")
          for name in ("gymnax", "brax", "jumanji")),
        *((f"{name}:some", "jax", ImportError, EXTRA.format("jax"))
          for name in ("gymnax", "brax", "jumanji")),
        (SPREAD, "mpe2", ValueError,
         "no package 'mpe2' is installed: pip install"),
        ("brax:fast", "mujoco", ImportError,
         "brax:fast needs another package: pip install mujoco$"),
    ],
)  # fmt: skip
def test_a_missing_package_is_named(env_id, missing, error, words, monkeypatch):
    prefix = env_id.partition(":")[0]
    if prefix != missing and missing != "jax":
        pytest.importorskip(prefix)
    for name in [name for name in sys.modules if name.split(".")[0] in (missing, "brax")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setitem(sys.modules, f"{missing}.envs", None)
    with pytest.raises(error, match=words):
        build_one(env_id)
    if missing == "jax":
        with pytest.raises(ImportError, match="JaxEnv needs JAX: " + EXTRA.format("jax")):
            JaxEnv(object(), 1)


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
