"""The command takes the ids of all libraries."""

import json
from functools import partial

import numpy as np
import pytest

from trawl.data import load

# Package, options of the environment, and an entry with its shape in 20 frames.
IDS = {
    "pettingzoo:mpe2/simple_spread_v3": (
        "mpe2", {"N": 2}, ("agent", "observation"), (20, 2, 12)
    ),
    "dm_control:cartpole/balance": ("dm_control", {}, "position", (20, 3)),
    "vmas:balance": (
        "vmas", {"num_envs": 2, "max_steps": 5}, ("agents", "observation"), (20, 3, 16)
    ),
    "envpool:Pong-v5": ("envpool", {"img_height": 21, "img_width": 21}, "observation",
                        (20, 4, 21, 21)),
    "ALE/Pong-v5": ("ale_py", {"obs_type": "ram"}, "observation", (20, 128)),
    "HalfCheetah-v5": ("mujoco", {}, "observation", (20, 17)),
}  # fmt: skip
MANY = ["pettingzoo:mpe2/simple_spread_v3", "vmas:balance"]


def options(env_id):
    package, kwargs, *_ = IDS[env_id]
    pytest.importorskip(package)
    return [env_id, *(["--env-kwargs", json.dumps(kwargs)] if kwargs else [])]


@pytest.mark.parametrize("env_id", IDS)
def test_from_an_environment_to_a_dataset(env_id, trawl):
    command = ["collect", *options(env_id), "--frames", 20, "--seed", 1, "--out", "d"]
    code, _, err = trawl(*command)
    assert code == 0, err
    _, _, key, shape = IDS[env_id]
    frames = load("d")
    assert frames[key].shape == frames["next", key].shape == shape
    code, out, err = trawl("show", "d")
    assert code == 0, err
    assert env_id in out
    assert "frames  20" in out


@pytest.mark.parametrize("env_id", MANY)
def test_rewards_of_several_agents(env_id, trawl):
    arguments = options(env_id)
    code, _, err = trawl(
        "evaluate", *arguments, "--episodes", 2, "--max-steps", 5, "--out", "e.json"
    )
    assert code == 0, err
    code, _, err = trawl("collect", *arguments, "--frames", 20, "--out", "d", "--format", "minari")
    assert code == 2
    assert "one reward for each step: pass --format memmap or parquet" in err.splitlines()[-1]


def test_minari_has_the_spaces_of_an_environment_that_gymnasium_does_not_make(trawl):
    minari = pytest.importorskip("minari")
    arguments = options("dm_control:cartpole/balance")
    collect = partial(trawl, "collect", *arguments, "--frames", 20, "--out", "d")
    code, _, err = collect("--format", "minari")
    assert code == 0, err
    space = minari.MinariDataset("d/data").observation_space
    assert set(space.spaces) == {"position", "velocity", "discount"}


def test_rewards_of_several_groups(trawl):
    pytest.importorskip("pygame")
    arguments = ["pettingzoo:classic/tictactoe-v3", "--episodes", 2, "--out", "e.json"]
    code, out, err = trawl("evaluate", *arguments)
    assert code == 0, err
    assert {"player_1", "player_2"} <= set(out.split())
    with open("e.json") as file:
        facts = json.load(file)
    one, other = (np.array(facts["groups"][f"player_{n}"]["returns"]) for n in (1, 2))
    assert (one == -other).all()
    assert facts["returns"] == [0.0, 0.0]


def test_why_a_process_can_not_be_resumed_is_one_line(trawl):
    pytest.importorskip("Box2D")
    arguments = ["--frames", 20, "--out", "d", "--envs", 2, "--env-processes", 2]
    code, _, err = trawl("collect", "BipedalWalker-v3", *arguments)
    assert code == 0, err
    (note,) = (line for line in err.splitlines() if "note:" in line)
    assert "can't be captured" in note
    assert "raceback" not in note
