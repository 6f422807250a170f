"""Examples with ``--checkpoint`` that are killed come to the same results as those that are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nursery
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# Runs an example in processes that are killed at random moments of their work with checkpoints,
# until one of them comes to its end, and compares its result and its last checkpoint, with all
# weights, with those of an unbroken run.
PROGRAM = """
import dataclasses, glob, importlib, json, os, random, signal, sys
import torch

name, settings, kills = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, sys.argv[4])
example = importlib.import_module(name)
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir"}

def forked(at, out, **more):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = 0

    def hook(event, args):
        nonlocal count
        text = isinstance(args[0], (str, os.PathLike)) if event in EVENTS else False
        if text and "checkpoint" in os.fspath(args[0]):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    code = 1
    try:
        found = dataclasses.asdict(example.main(example.Config(**settings, **more)))
        with open(out, "w") as file:
            json.dump([{k: v for k, v in found.items() if "seconds" not in k}, count], file)
        code = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    os._exit(code)

assert forked(0, "whole", checkpoint="whole-checkpoint") == 0
expected, count = json.load(open("whole"))
draw, got = random.Random(0), 0
while forked(draw.randint(1, count) if got < kills else 0, "parts", checkpoint="checkpoint"):
    got += 1
    assert got <= kills
found, _ = json.load(open("parts"))
assert found == expected, (found, expected)

def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    return one == other or one != one

def last(folder):
    return torch.load(sorted(glob.glob(f"{folder}/*.pt"))[-1], weights_only=True)

one, other = last("whole-checkpoint"), last("checkpoint")
assert [name for name in one["extra"] if not same(one["extra"][name], other["extra"][name])] == []
assert same(one["state"], other["state"])
print(got, count)
"""

PPO = {"total_frames": 2048, "num_envs": 4, "num_epochs": 2, "log_every": 512}
DQN = {"total_frames": 1024, "random_frames": 256, "eval_every": 512, "eval_episodes": 2,
       "steps_per_batch": 16, "epsilon_frames": 800, "buffer_size": 1024}  # fmt: skip
SAC = {"total_frames": 400, "random_frames": 200, "minibatch_size": 32, "samples_per_insert": 32,
       "eval_every": 100, "eval_episodes": 2, "workers": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "kills"),
    [
        ("ppo", {**PPO, "checkpoint_every": 512}, 3),
        pytest.param(
            *("ppo", {**PPO, "checkpoint_every": 512, "recurrent": True}, 2),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *("ppo", {**PPO, "checkpoint_every": 512, "workers": 2, "prefetch": True}, 2),
            marks=pytest.mark.long,
        ),
        ("dqn", {**DQN, "checkpoint_every": 256}, 3),
        pytest.param("sac", {**SAC, "checkpoint_every": 50}, 4, marks=pytest.mark.long),
    ],
    ids=["ppo", "recurrent ppo", "ppo with workers", "dqn", "sac"],
)
def test_a_killed_example_comes_to_the_same(
    name: str, settings: dict[str, Any], kills: int, tmp_path: Path
) -> None:
    arguments = name, json.dumps(settings), kills, EXAMPLES
    done = nursery.run(PROGRAM, *arguments, cwd=tmp_path, within=nursery.tested())
    assert done.returncode == 0, done.stderr
    got, events = map(int, done.stdout.splitlines()[-1].split())
    assert got
    assert events > 10


def test_sac_takes_its_steps_while_a_worker_collects_and_goes_on(
    example: Callable[[str], Any], tmp_path: Path
) -> None:
    sac = example("sac")
    settings = {**SAC, "workers": 1, "checkpoint": str(tmp_path / "c"), "checkpoint_every": 100}
    first = sac.main(sac.Config(**settings))
    assert first.frames == 400
    assert [steps for steps, _ in first.curve] == [100, 200, 300, 400]
    # The worst return of an episode is about -2000, the best 0.
    assert all(-2100 < mean_return < 0 for _, mean_return in first.curve)
    assert not first.solved
    again = sac.main(sac.Config(**settings))
    assert again.frames == 400
    # Only what came after the last checkpoint is done again; the rest of the curve is kept.
    assert again.curve[:4] == first.curve[:4]
