"""``trawl collect --resume`` comes to the same frames, bit for bit, as an unbroken run."""

import os
import signal

import nursery
import pytest
import torch
from resume_parts import broken, collect, equal, whole

from trawl.data import info, load
from trawl.data.sinks.states import load_state

RUN = ["Pendulum-v1", "--policy", "cli_envs:gaussian", "--seed", "1", "--frames", "600",
       "--frames-per-batch", "60", "--max-frames-per-traj", "45"]  # fmt: skip


def states(directory):
    return [name for name in os.listdir(directory) if name.startswith("_state")]


@pytest.mark.parametrize(("kind", "envs"), [("memmap", 1), ("minari", 3), ("parquet", 2)])
def test_a_killed_run_comes_to_the_same(kind, envs, tmp_path):
    arguments = [*RUN, "--format", kind, "--envs", envs]
    expected, count = whole(arguments, tmp_path)
    assert equal(broken(arguments, tmp_path, count, 3, seed=envs), expected)
    assert len(states(tmp_path / "parts-v0")) == 1


def test_a_killed_run_with_environments_in_processes_comes_to_the_same(tmp_path):
    arguments = [*RUN, "--envs", "4", "--env-processes", "2"]
    expected, count = whole(arguments, tmp_path)
    assert equal(broken(arguments, tmp_path, count, 2, seed=1), expected)


KILLED_AFTER_A_BATCH = """
import os, signal, sys
from trawl.cli import main, saving
saving.StateSaver.note = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main()
"""


def test_the_first_frames_have_a_state_too(tmp_path):
    """The first batch is committed, but the process is killed before it saves another state."""
    arguments = [*RUN, "--resume", "--out"]
    killed = nursery.run(KILLED_AFTER_A_BATCH, "collect", *arguments, "d", cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    assert info(tmp_path / "d")["frames"] == 60
    assert load_state(tmp_path / "d").sink.frames == 0
    for name in ("d", "whole"):
        assert collect(*arguments, name, cwd=tmp_path).returncode == 0
    assert equal(load(tmp_path / "d"), load(tmp_path / "whole"))


@pytest.mark.parametrize(("kind", "workers"), [("memmap", 1), ("minari", 3)])
def test_killed_with_its_workers_it_comes_to_the_same(kind, workers, tmp_path):
    arguments = [*RUN, "--format", kind, "--workers", workers]
    expected, count = whole(arguments, tmp_path)
    assert equal(broken(arguments, tmp_path, count, 2, seed=workers), expected)


def streams(frames, workers):
    """The frames of each worker, whose trajectories have every n-th id."""
    ids = frames["collector", "traj_ids"]
    return [frames[ids % workers == index] for index in range(workers)]


def test_each_asynchronous_worker_comes_to_the_same(tmp_path):
    arguments = [*RUN, "--format", "parquet", "--workers", "2", "--async"]
    expected, count = whole(arguments, tmp_path)
    found = broken(arguments, tmp_path, count, 2, seed=0)
    assert len(found) == len(expected) == 600
    for one, other in zip(streams(found, 2), streams(expected, 2), strict=True):
        # How many frames a worker has depends on its speed.
        shared = min(len(one), len(other))
        assert equal(one[:shared], other[:shared])


@pytest.mark.parametrize("kind", ["minari", "parquet"])
def test_an_interrupted_run_comes_to_the_same(kind, tmp_path):
    arguments = [*RUN, "--format", kind, "--envs", 2]
    expected, count = whole(arguments, tmp_path)
    assert equal(broken(arguments, tmp_path, count, 2, 0, signal.SIGINT), expected)


@pytest.mark.parametrize(
    ("kind", "first", "envs"), [("memmap", 250, 3), ("minari", 250, 3), ("parquet", 240, 2)]
)
def test_more_frames_than_before_come_to_the_same(kind, first, envs, tmp_path):
    """With 250, the last batch is cut, and its missing frames are collected later."""
    arguments = [*RUN, "--format", kind, "--envs", envs]
    expected, _ = whole(arguments, tmp_path)
    short = [str(first) if each == "600" else each for each in arguments]
    assert collect(*short, "--out", "d-v0", cwd=tmp_path).returncode == 0
    before = load(tmp_path / "d-v0").clone()
    assert len(before) == first
    done = collect(*arguments, "--resume", "--out", "d-v0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "new episodes" not in done.stderr
    assert equal(load(tmp_path / "d-v0"), expected)


def test_a_second_ctrl_c_loses_nothing_that_can_be_collected_again(tmp_path):
    policy = ["--policy", "cli_policies:ctrl_c_twice"]
    stopped = collect(*RUN, *policy, "--out", "d", cwd=tmp_path)
    assert stopped.returncode == 130
    saved = load_state(tmp_path / "d")
    assert saved.sink.frames == 120


def test_the_last_state_is_that_of_the_last_batch(tmp_path):
    """The end of a run saves its state, even if it is not yet time to."""
    short = [each if each != "600" else "120" for each in RUN]
    assert collect(*short, "--out", "d", cwd=tmp_path, always=False).returncode == 0
    assert load_state(tmp_path / "d").sink.frames == 120
    assert collect(*RUN, "--resume", "--out", "d", cwd=tmp_path, always=False).returncode == 0
    assert load_state(tmp_path / "d").sink.frames == 600


# --- new episodes


def resumed(tmp_path, *options, kind="memmap"):
    """A run with 120 frames that is resumed with other options; gives what it says."""
    short = [each if each != "600" else "120" for each in RUN]
    assert collect(*short, "--format", kind, "--out", "d-v0", cwd=tmp_path).returncode == 0
    before = load(tmp_path / "d-v0").clone()
    done = collect(*RUN, "--format", kind, *options, "--resume", "--out", "d-v0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = load(tmp_path / "d-v0")
    assert len(found) == 600
    assert equal(found[:120], before)
    ids = found["collector", "traj_ids"]
    assert ids[120:].min() > ids[:120].max()
    return done.stderr


@pytest.mark.parametrize("kind", ["minari", "parquet"])
def test_with_other_environments_new_episodes_begin(kind, tmp_path):
    said = resumed(tmp_path, "--envs", "2", kind=kind)
    assert "note: new episodes begin: --envs was 1, and is 2 now" in said


def test_with_batches_of_another_size_new_episodes_begin(tmp_path):
    said = resumed(tmp_path, "--frames-per-batch", "50")
    assert "new episodes begin: --frames-per-batch was 60, and is 50 now" in said


def edit_state(place, change):
    """Changes the state of a dataset, and the digest in its name."""
    import hashlib
    import json

    (name,) = states(place)
    content = torch.load(place / name, weights_only=True)
    change(content)
    (place / name).unlink()
    torch.save(content, place / "x")
    digest = hashlib.sha256((place / "x").read_bytes()).hexdigest()[:16]
    (place / "x").rename(place / f"_state-{digest}.pt")
    record = json.loads((place / "_dataset.json").read_text())
    record["layout"]["state"] = f"_state-{digest}.pt"
    (place / "_dataset.json").write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state.update(trawl="0.0.1"), "the state was saved by Trawl 0.0.1"),
        (lambda state: state["collector"].pop("frames"), "state_dict has no 'frames'"),
        (
            lambda state: state["collector"]["resume"]["envs"][0]["env"]["identity"].update(id="X"),
            "'id' of environment 0 is X there",
        ),
        (
            lambda state: state["collector"]["resume"]["envs"][0]["env"].update(way="pickle"),
            "has no 'pickle'; it has",
        ),
        (lambda state: state.update(collector={}), "the state can't be loaded"),
        (lambda state: state["sink"].update(frames=700), "counts 700 frames"),
    ],
    ids=["version", "frames", "environment", "way", "empty", "more"],
)
def test_with_a_state_that_does_not_fit_new_episodes_begin(change, why, tmp_path):
    short = [each if each != "600" else "120" for each in RUN]
    assert collect(*short, "--out", "d", cwd=tmp_path).returncode == 0
    edit_state(tmp_path / "d", change)
    done = collect(*RUN, "--resume", "--out", "d", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "new episodes begin" in done.stderr
    assert why in done.stderr
    assert len(load(tmp_path / "d")) == 600


def test_without_a_way_to_capture_it_new_episodes_begin(tmp_path):
    arguments = ["cli_envs:async_vector", "--seed", "1", "--frames-per-batch", "60"]
    done = collect(*arguments, "--frames", "120", "--out", "d", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "note: --resume will begin new episodes" in done.stderr
    assert not states(tmp_path / "d")
    done = collect(*arguments, "--frames", "180", "--resume", "--out", "d", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "new episodes begin: the dataset has no state of its environments" in done.stderr
    assert info(tmp_path / "d")["frames"] == 180
