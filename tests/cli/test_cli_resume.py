"""Formats of datasets, and going on with them."""

import os
import signal
import subprocess

import pytest
import torch
from cli_parts import run, start

from trawl.data import info, load

FORMATS = ["memmap", "minari", "parquet"]


@pytest.mark.parametrize("kind", FORMATS)
def test_each_format_is_written_and_shown(kind, trawl):
    code, out, _ = trawl("collect", "Pendulum-v1", "--frames", 500, "--frames-per-batch", 100,
                         "--seed", 1, "--out", "d-v0", "--format", kind)  # fmt: skip
    assert code == 0
    assert "500 in " in out
    facts = info("d-v0")
    assert (facts["format"], facts["frames"], facts["complete"]) == (kind, 500, True)
    assert load("d-v0")["next", "reward"].shape == (500, 1)
    code, out, _ = trawl("show", "d-v0")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert ["frames", "500"] in lines
    assert ["('next',", "'reward')", "(500,", "1)", "float32", "2.0", "kB"] in lines


def test_formats_hold_the_same_frames(trawl):
    for kind in FORMATS:
        trawl("collect", "Pendulum-v1", "--frames", 400, "--seed", 1, "--out", kind,
              "--format", kind)  # fmt: skip
    first, *others = (load(kind) for kind in FORMATS)
    assert all((first == other).all() for other in others)


@pytest.mark.parametrize(
    ("kind", "workers"),
    [*((kind, []) for kind in FORMATS), ("minari", ["--workers", 2])],
    ids=[*FORMATS, "workers"],
)
def test_what_was_killed_goes_on_to_the_exact_count(kind, workers, tmp_path):
    arguments = ["collect", "Pendulum-v1", "--policy", "cli_policies:slow", "--seed", "1",
                 "--frames", "1000", "--frames-per-batch", "100", "--max-frames-per-traj", "30",
                 "--format", kind, "--out", "d", *map(str, workers)]  # fmt: skip
    process = start(*arguments, cwd=tmp_path, stderr=subprocess.PIPE)
    try:
        for line in process.stderr:
            if line.startswith("300/1,000 frames"):
                break
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    kept = info(tmp_path / "d")["frames"]
    assert kept < 1000
    if kind == "memmap":
        assert kept >= 200
    before = load(tmp_path / "d").clone() if kept else None
    done = run(*arguments, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts, frames = info(tmp_path / "d"), load(tmp_path / "d")
    assert len(frames) == facts["frames"] == 1000
    assert facts["complete"]
    if before is not None:
        # Frames that were committed after the last state are collected again, to the same.
        assert (frames[:kept] == before).all()
    for each in facts.get("resumed", ()):
        assert each["frames"] <= kept
        assert f"after {each['frames']} frames: 1,000 in all" in done.stdout
    # No frame is there twice, and no id is used for two trajectories.
    assert len(torch.unique(frames["observation"], dim=0)) > 990
    ids = frames["collector", "traj_ids"]
    for one in torch.unique(ids):
        part = frames[ids == one]
        assert torch.equal(part["next", "observation"][:-1], part["observation"][1:])


def test_what_was_interrupted_is_what_it_would_have_been(trawl):
    trawl("collect", "Pendulum-v1", "--frames", 600, "--frames-per-batch", 200, "--seed", 1,
          "--out", "whole")  # fmt: skip
    trawl("collect", "Pendulum-v1", "--frames", 200, "--frames-per-batch", 200, "--seed", 1,
          "--out", "parts")  # fmt: skip
    code, out, _ = trawl("collect", "Pendulum-v1", "--frames", 600, "--frames-per-batch", 200,
                         "--seed", 1, "--out", "parts", "--resume")  # fmt: skip
    assert code == 0
    assert "after 200 frames: 600 in all" in out
    whole, parts = load("whole"), load("parts")
    assert whole.shape == parts.shape == (600,)
    assert (whole == parts).all()
    _, out, _ = trawl("show", "parts")
    assert "after 200 frames: 600 in all" in out


def test_a_resumed_run_can_be_done_again(trawl):
    for name in "ab":
        for frames in (200, 400):
            trawl("collect", "Pendulum-v1", "--frames", frames, "--frames-per-batch", 200,
                  "--seed", 7, "--out", name, "--resume")  # fmt: skip
    assert (load("a") == load("b")).all()


def test_what_is_whole_is_left_as_it_is(trawl):
    arguments = ["collect", "Pendulum-v1", "--frames", 200, "--out", "d", "--resume"]
    assert trawl(*arguments)[0] == 0
    before = load("d").clone()
    code, _, err = trawl(*arguments)
    assert code == 0
    assert (
        "d already has 200 frames, and --frames 200 asks for no more: nothing was collected" in err
    )
    assert (load("d") == before).all()
    assert info("d")["complete"]


def test_one_that_was_to_be_larger_is_not_complete_by_asking_for_less(trawl):
    collect = ["collect", "Pendulum-v1", "--frames-per-batch", 100, "--out", "d"]
    code, _, _ = trawl(*collect, "--frames", 1000, "--policy", "cli_policies:ctrl_c")
    assert code == 130
    before = info("d")
    assert not before["complete"]
    code, _, err = trawl(*collect, "--frames", 100, "--policy", "cli_policies:ctrl_c", "--resume")
    assert code == 0
    assert f"d already has {before['frames']} frames" in err
    assert "(the last run asked for --frames 1000)" in err
    assert not info("d")["complete"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--policy", "cli_policies:slow"], "with --policy random, and can't be resumed with"),
        (["--format", "parquet"], "with --format memmap"),
        (["--seed", 2], "with --seed 1"),
        (["--max-frames-per-traj", 3], "without --max-frames-per-traj, and"),
    ],
)
def test_only_the_same_goes_on(change, words, trawl):
    trawl("collect", "Pendulum-v1", "--frames", 100, "--seed", 1, "--out", "d")
    code, _, err = trawl("collect", "Pendulum-v1", "--frames", 200, "--out", "d", "--resume",
                         *change)  # fmt: skip
    assert code == 2
    assert words in err.splitlines()[-1]
    assert len(load("d")) == 100


def test_another_environment_does_not_go_on(trawl):
    trawl("collect", "Pendulum-v1", "--frames", 100, "--out", "d")
    code, _, err = trawl("collect", "CartPole-v1", "--frames", 200, "--out", "d", "--resume")
    assert code == 2
    assert "d was collected with ENV Pendulum-v1" in err


def test_to_resume_a_place_is_needed(trawl):
    code, _, err = trawl("collect", "Pendulum-v1", "--frames", 100, "--resume")
    assert code == 2
    assert "pass --out too" in err
    assert not os.path.exists("runs")


def test_what_is_no_dataset_is_not_touched(trawl):
    os.mkdir("d")
    open("d/mine", "w").close()
    code, _, err = trawl("collect", "Pendulum-v1", "--frames", 100, "--out", "d", "--resume")
    assert code == 2
    assert "is not a dataset that can be continued" in err
    assert os.listdir("d") == ["mine"]
