"""ENV of any library, id or function; its arguments, its text and its infos, in each format."""

import os
import shutil
from pathlib import Path

import numpy as np
import nursery
import pytest
import torch
from cli_parts import INLINE, collected, evaluated, lines_of, trawl

from trawl.data import info, load

HERE = Path(__file__).parent
FRAMES = ["--frames", 40, "--frames-per-batch", 20, "--seed", 1]
PLACES = {
    "one": [],
    "workers": [*INLINE, "--envs", 2],
    "processes": ["--envs", 2, "--env-processes", 2],
}
FORMATS = ("memmap", "parquet", "minari")
# Package, arguments of the environment, and an entry with its shape in 20 frames.
IDS = {
    "pettingzoo:mpe2/simple_spread_v3": (
        "mpe2", '{"N": 2}', ("agent", "observation"), (20, 2, 12)
    ),
    "dm_control:cartpole/balance": ("dm_control", "{}", "position", (20, 3)),
    "vmas:balance": (
        "vmas", '{"num_envs": 2, "max_steps": 5}', ("agents", "observation"), (20, 3, 16)
    ),
    "envpool:Pong-v5": ("envpool", '{"img_height": 21, "img_width": 21}', "observation",
                        (20, 4, 21, 21)),
    "ALE/Pong-v5": ("ale_py", '{"obs_type": "ram"}', "observation", (20, 128)),
    "HalfCheetah-v5": ("mujoco", "{}", "observation", (20, 17)),
}  # fmt: skip


@pytest.mark.parametrize("env_id", IDS)
def test_from_an_id_to_a_dataset(env_id):
    package, kwargs, key, shape = IDS[env_id]
    pytest.importorskip(package)
    arguments = [env_id, "--env-kwargs", kwargs]
    frames = collected(*arguments, "--frames", 20, "--seed", 1)
    assert frames[key].shape == frames["next", key].shape == shape
    code, out, err = trawl("show", "d")
    assert (code, err) == (0, "")
    assert env_id in out
    assert "frames  20" in out
    if "agent" in key[0]:
        assert evaluated(*arguments, "--episodes", 2, "--max-steps", 5)[0]["lengths"] == [5, 5]


def test_rewards_of_several_groups():
    pytest.importorskip("pygame")
    facts, out = evaluated("pettingzoo:classic/tictactoe-v3", "--episodes", 2)
    assert {"player_1", "player_2"} <= set(out.split())
    one, other = (np.array(facts["groups"][f"player_{n}"]["returns"]) for n in (1, 2))
    assert (one == -other).all()
    assert facts["returns"] == [0.0, 0.0]


def test_why_a_process_can_not_be_resumed_is_one_line():
    pytest.importorskip("Box2D")
    arguments = ["--frames", 20, "--out", "d", *PLACES["processes"]]
    code, _, err = trawl("collect", "BipedalWalker-v3", *arguments)
    assert code == 0, err
    (note,) = (line for line in err.splitlines() if "note:" in line)
    assert "can't be captured" in note
    assert "raceback" not in note


def test_environments_are_in_so_many_processes():
    frames = collected("cli_envs:Placed", *FRAMES, "--envs", 4, "--env-processes", 2)
    found = frames["observation"].unique().tolist()
    assert len(found) == 2
    assert os.getpid() not in found


@pytest.mark.parametrize("name", ["pendulum", "name", "vector", "torchrl", "Saying"])
def test_a_function_makes_the_environment(name):
    if name == "torchrl":
        pytest.importorskip("torchrl")
    frames = 42 if name == "vector" else 40
    assert len(collected(f"cli_envs:{name}", "--frames", frames, "--format", "parquet")) == frames
    assert info("d")["env"] == f"cli_envs:{name}"


_EACH = """
    import sys
    from trawl.extras.cli import main

    for number, name in enumerate(sys.argv[1].split(",")):
        if code := main(["collect", f"sub/{name}", *sys.argv[2:], "--out", str(number)]):
            sys.exit(code)
"""


@pytest.mark.parametrize("place", ["one", "workers"])
def test_a_file_has_the_function(place):
    # The name of a module that there is, another beside it, and an id that is registered.
    Path("sub").mkdir()
    for name in ("random", "beside"):
        shutil.copy(HERE / "cli_envs.py", f"sub/{name}.py")
    Path("sub/uses.py").write_text(
        "import beside\nfrom gymnasium import register\n"
        "def make(): return beside.pendulum()\n"
        "register('Registered-v0', beside.pendulum)\n"
    )
    names = ("random.py:pendulum", "uses.py:make", "uses.py:Registered-v0")
    done = nursery.run(_EACH, ",".join(names), *FRAMES, *PLACES[place], cwd=".")
    assert done.returncode == 0, done.stderr
    for number in range(3):
        assert load(str(number))["observation"].shape == (40, 3)


@pytest.mark.parametrize(
    ("env", "name", "place"),
    [
        ("Pendulum-v1", "g", "workers"),
        ("Pendulum-v1", "g", "processes"),
        ("cli_envs:pendulum", "gravity", "workers"),
    ],
)
def test_the_environment_gets_its_arguments(env, name, place):
    frames = collected(env, "--env-kwargs", f'{{"{name}": 0.0}}', *FRAMES, *PLACES[place])
    # Without gravity, only the action changes the speed.
    speed = frames["observation"][:, 2] + 0.15 * frames["action"][:, 0].clamp(-2, 2)
    assert torch.allclose(frames["next", "observation"][:, 2], speed.clamp(-8, 8), atol=1e-4)
    assert info("d")["env_kwargs"] == {name: 0.0}
    assert f"{env} {{'{name}': 0.0}}" in trawl("show", "d")[1]


def test_arguments_of_ours_are_taken_too():
    kwargs = '{"categorical_action_encoding": true}'
    assert collected("CartPole-v1", "--env-kwargs", kwargs, *FRAMES)["action"].shape == (40,)


def test_a_policy_acts_deterministically():
    command = ["Pendulum-v1", "--policy", "cli_envs:gaussian", *FRAMES, *INLINE]
    assert (collected(*command, "--deterministic")["action"] == 0.25).all()
    assert "gaussian, deterministic" in trawl("show", "d")[1]
    assert collected(*command, out="e")["action"].std() > 0.5


# --- text and infos, in each format and place


@pytest.mark.parametrize(("kind", "place"), [*zip(FORMATS, PLACES, strict=True)])
def test_observations_and_infos_are_written_and_read_back(kind, place):
    if kind != "memmap":
        pytest.importorskip("pyarrow" if kind == "parquet" else "minari")
    names = ["action_mask", "nested/half", "episode", *(["said"] if kind != "memmap" else [])]
    frames = collected("cli_envs:Informing", "--info-keys", *names, *FRAMES, "--format", kind,
                       *PLACES[place])  # fmt: skip
    for rows in (frames, frames["next"]):
        steps = rows["observation"]
        assert (rows["info", "action_mask"][:, 1:2] == steps % 2).all()
        assert (rows["info", "nested", "half"] == steps / 2).all()
        if kind != "memmap":
            assert list(rows["info", "said"]) == [f"é step {int(step)}" for step in steps]
    done = frames["next", "done"]
    assert (frames["next", "info", "episode", "l"] == 5 * done).all()
    assert (frames["info", "episode", "l"] == 0).all()
    assert info("d")["info_keys"] == names
    code, out, _ = trawl("show", "d")
    assert code == 0
    assert "'action_mask'" in out


@pytest.mark.parametrize(("kind", "place"), [("parquet", "workers"), ("minari", "one")])
def test_text_is_written_and_read_back(kind, place):
    pytest.importorskip("pyarrow" if kind == "parquet" else "minari")
    command = ["cli_envs:Saying", *FRAMES, "--format", kind, *PLACES[place], "--resume"]
    for total in (40, 60):
        frames = collected(*command, "--frames", total)
        for rows in (frames, frames["next"]):
            assert [f"é step {int(x)}" for x in rows["x"][:, 0]] == list(rows["said"])
        parts = [text for part in load("d", batch_size=7) for text in part["said"]]
        assert parts == list(frames["said"])
        assert len(parts) == total
    code, out, _ = trawl("show", "d")
    assert code == 0
    assert ["'said'", "(60)", "str"] in lines_of(out)
    assert "12 episodes" in out
    if kind == "parquet":
        pandas = pytest.importorskip("pandas")
        assert pandas.read_parquet("d")["next.said"].tolist() == list(frames["next", "said"])


def test_a_policy_reads_infos():
    command = ["cli_envs:Informing", "--info-keys", "action_mask", "--policy", "cli_envs:allowed"]
    frames = collected(*command, "--frames", 20)
    assert (frames["action"].argmax(-1, keepdim=True) == frames["observation"] % 2).all()
    assert evaluated(*command, "--episodes", 2)[0]["info_keys"] == ["action_mask"]


# --- what Minari is told


def dataset(*arguments):
    minari = pytest.importorskip("minari")
    collected(*arguments, *FRAMES, "--format", "minari")
    return minari.MinariDataset("d/data")


def test_minari_is_told_the_arguments():
    assert dataset("Pendulum-v1").recover_environment().unwrapped.g == 10.0
    shutil.rmtree("d")
    found = dataset("Pendulum-v1", "--env-kwargs", '{"g": 3.0}').recover_environment()
    assert found.unwrapped.g == 3.0


def test_minari_has_the_spaces_of_environments_that_gymnasium_does_not_make():
    found = dataset("cli_envs:Saying")
    assert found.observation_space["said"].max_length == 20
    assert found[0].observations["said"] == [f"é step {n}" for n in range(6)]
    shutil.rmtree("d")
    pytest.importorskip("dm_control")
    space = dataset("dm_control:cartpole/balance").observation_space
    assert set(space.spaces) == {"position", "velocity", "discount"}


def test_minari_has_infos_and_an_environment_without_them():
    found = dataset("FrozenLake-v1", "--info-keys", "prob")
    (episode,) = found.iterate_episodes([0])
    assert len(episode.infos["info.prob"]) == len(episode.rewards) + 1
    found.recover_environment().close()
