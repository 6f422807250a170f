"""``--resume``: the frames are those of an unbroken run, bit for bit, or a note says why not."""

import hashlib
import json
import os
import signal
from pathlib import Path

import nursery
import pytest
import torch
from cli_parts import collected, lines_of, logged, run, trawl
from resume_parts import broken, collect, equal, whole

from trawl.data import info, load
from trawl.data.sinks.states import load_state
from trawl.observe import read_trace

FORMATS = ["memmap", "minari", "parquet"]
RUN = ["Pendulum-v1", "--policy", "cli_envs:gaussian", "--seed", "1", "--frames", "360",
       "--frames-per-batch", "60", "--max-frames-per-traj", "45"]  # fmt: skip
SHORT = [each if each != "360" else "120" for each in RUN]


def states(directory):
    return [name for name in os.listdir(directory) if name.startswith("_state")]


def resumed(*arguments, out="d"):
    """Resumes a run in this process; gives what it prints."""
    code, printed, said = trawl("collect", *arguments, "--resume", "--out", out)
    assert code == 0, said
    return printed, said


@pytest.mark.parametrize(
    ("options", "kills", "number"),
    [
        (["--format", "memmap"], 2, signal.SIGKILL),
        (["--format", "minari", "--envs", 3], 1, signal.SIGINT),
        (["--format", "minari", "--workers", 2], 1, signal.SIGKILL),
        (["--format", "parquet", "--workers", 2, "--async"], 1, signal.SIGKILL),
    ],
    ids=str,
)
def test_a_broken_run_comes_to_the_same(options, kills, number, tmp_path):
    arguments = [*RUN, *options]
    expected, count = whole(arguments, tmp_path)
    found = broken(arguments, tmp_path, count, kills, len(options), number)
    assert len(found) == len(expected) == 360
    assert len(states(tmp_path / "parts-v0")) == 1
    if "--async" not in options:
        assert equal(found, expected)
        return
    # How many frames a worker has depends on its speed. Its trajectories have every n-th id.
    for worker in range(2):
        one, other = (
            each[each["collector", "traj_ids"] % 2 == worker] for each in (found, expected)
        )
        shared = min(len(one), len(other))
        assert equal(one[:shared], other[:shared])


KILLED_AFTER_A_BATCH = """
import os, signal, sys
from trawl.extras.cli import main, saving
saving.StateSaver.note = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main()
"""


def test_the_first_frames_have_a_state_too(tmp_path):
    """The first batch is committed, but the process is killed before it saves another state."""
    killed = nursery.run(KILLED_AFTER_A_BATCH, "collect", *RUN, "--out", "d", cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    assert (info("d")["frames"], load_state("d").sink.frames) == (60, 0)
    resumed(*RUN)
    assert equal(load("d"), collected(*RUN, out="whole"))
    # A second Ctrl-C loses nothing that can be collected again.
    policy = ["--policy", "cli_policies:ctrl_c_twice"]
    assert collect(*RUN, *policy, "--out", "e", cwd=tmp_path).returncode == 130
    assert load_state("e").sink.frames == 120


@pytest.mark.parametrize(
    ("kind", "first", "envs"), [("memmap", 150, 3), ("minari", 150, 3), ("parquet", 120, 2)]
)
def test_more_frames_than_before_come_to_the_same(kind, first, envs):
    """With 150, the last batch is cut, and its missing frames are collected later."""
    arguments = [*RUN, "--format", kind, "--envs", envs]
    assert len(collected(*arguments, "--frames", first, out="d-v0")) == first
    printed, said = resumed(*arguments, out="d-v0")
    assert "new episodes" not in said
    facts = info("d-v0")
    assert (facts["frames"], facts["complete"], facts["stats"]["frames"]) == (360, True, 360)
    # Its throughput is its own.
    points = facts["throughput"]
    assert (points[0], points[-1][0]) == ([0.0, 0], facts["seconds"])
    if kind == "parquet":
        # The end of the first run has saved its state, even if it was not yet time to.
        assert [each["frames"] for each in facts["resumed"]] == [first]
        assert points[-1][1] == 360 - first
        for text in (printed, trawl("show", "d-v0")[1]):
            assert f"after {first} frames: 360 in all" in text
    assert equal(load("d-v0"), collected(*arguments, out="whole-v0"))


def test_formats_hold_and_show_the_same_frames():
    """And what is whole is left as it is."""
    frames = []
    for kind in FORMATS:
        command = ["Pendulum-v1", "--frames", 400, "--seed", 1, "--format", kind]
        frames.append(collected(*command, out=f"{kind}-v0"))
        facts = info(f"{kind}-v0")
        assert (facts["format"], facts["frames"], facts["complete"]) == (kind, 400, True)
        lines = lines_of(trawl("show", f"{kind}-v0")[1])
        assert ["frames", "400"] in lines
        assert ["('next',", "'reward')", "(400,", "1)", "float32", "1.6", "kB"] in lines
        said = resumed(*command, out=f"{kind}-v0")[1]
        assert "already has 400 frames, and --frames 400 asks for no more: nothing was" in said
        assert equal(load(f"{kind}-v0"), frames[0])
        assert info(f"{kind}-v0")["complete"]


def test_one_that_was_to_be_larger_is_not_complete_by_asking_for_less():
    command = ["Pendulum-v1", "--frames-per-batch", 100, "--policy", "cli_policies:ctrl_c"]
    assert trawl("collect", *command, "--frames", 1000, "--out", "d")[0] == 130
    said = resumed(*command, "--frames", 100)[1]
    assert "d already has 200 frames" in said
    assert "(the last run asked for --frames 1000)" in said
    assert not info("d")["complete"]


PENDULUM = "Pendulum-v1 --seed 1"


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (PENDULUM, f"{PENDULUM} --policy cli_policies:slow", "with --policy random, and can't be"),
        (PENDULUM, f"{PENDULUM} --format parquet", "with --format memmap"),
        (PENDULUM, "Pendulum-v1 --seed 2", "with --seed 1"),
        (PENDULUM, "CartPole-v1", "d was collected with ENV Pendulum-v1"),
        (f'{PENDULUM} --env-kwargs {{"g":3.0}}', PENDULUM, "with --env-kwargs {'g': 3.0}"),
        (f"{PENDULUM} --policy cli_envs:gaussian --deterministic",
         f"{PENDULUM} --policy cli_envs:gaussian",
         "collected with --deterministic, and can't be resumed without it"),
        ("FrozenLake-v1 --info-keys prob", "FrozenLake-v1", "collected with --info-keys ['prob']"),
        (f"{PENDULUM} --frame-stack 3", f"{PENDULUM} --frame-stack 2",
         "can't be resumed with --frame-stack 2"),
        (PENDULUM, f"{PENDULUM} --normalize-rewards",
         "without --normalize-rewards, and can't be resumed with it: leave"),
        (f"{PENDULUM} --normalize-observations", PENDULUM, "with --normalize-observations, and"),
    ],
)  # fmt: skip
def test_only_the_same_goes_on(before, now, words):
    collected(*before.split(), "--frames", 20)
    command = ["--frames", 40, "--out", "d", "--resume"]
    code, _, err = trawl("collect", *now.split(), *command)
    assert code == 2
    assert words in err.splitlines()[-1]
    assert len(load("d")) == 20
    resumed(*before.split(), "--frames", 40)
    assert len(load("d")) == 40


# --- new episodes


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("minari", ["--envs", "2"], "--envs was 1, and is 2 now"),
        ("parquet", ["--frames-per-batch", "50"], "--frames-per-batch was 60, and is 50 now"),
    ],
)
def test_with_other_options_new_episodes_begin(kind, options, words):
    before = collected(*SHORT, "--format", kind, out="d-v0").clone()
    said = resumed(*RUN, "--format", kind, *options, out="d-v0")[1]
    assert f"note: new episodes begin: {words}" in said
    found = load("d-v0")
    assert len(found) == 360
    assert equal(found[:120], before)
    ids = found["collector", "traj_ids"]
    assert ids[120:].min() > ids[:120].max()


def edit_state(change):
    """Changes the state of the dataset, and the digest in its name."""
    (name,) = states("d")
    content = torch.load(f"d/{name}", weights_only=True)
    change(content)
    Path("d", name).unlink()
    torch.save(content, "x")
    digest = hashlib.sha256(Path("x").read_bytes()).hexdigest()[:16]
    Path("x").rename(f"d/_state-{digest}.pt")
    record = json.loads(Path("d/_dataset.json").read_text())
    record["layout"]["state"] = f"_state-{digest}.pt"
    Path("d/_dataset.json").write_text(json.dumps(record))


def environment(state):
    return state["collector"]["resume"]["envs"][0]["env"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state.update(trawl="0.0.1"), "the state was saved by Trawl 0.0.1"),
        (lambda state: state["collector"].pop("frames"), "state_dict has no 'frames'"),
        (
            lambda state: environment(state)["identity"].update(id="X"),
            "'id' of environment 0 is X there",
        ),
        (lambda state: environment(state).update(way="pickle"), "has no 'pickle'; it has"),
        (lambda state: state.update(collector={}), "the state can't be loaded"),
        (lambda state: state["sink"].update(frames=700), "counts 700 frames"),
    ],
    ids=["version", "frames", "environment", "way", "empty", "more"],
)
def test_with_a_state_that_does_not_fit_new_episodes_begin(change, why):
    collected(*SHORT)
    edit_state(change)
    said = resumed(*RUN)[1]
    assert "new episodes begin" in said
    assert why in said
    assert len(load("d")) == 360


def test_without_a_way_to_capture_it_new_episodes_begin():
    arguments = ["collect", "cli_envs:async_vector", "--seed", "1", "--frames-per-batch", "60"]
    done = run(*arguments, "--frames", "120", "--out", "d")
    assert done.returncode == 0, done.stderr
    assert "note: --resume will begin new episodes" in done.stderr
    assert not states("d")
    done = run(*arguments, "--frames", "180", "--resume", "--out", "d")
    assert done.returncode == 0, done.stderr
    assert "new episodes begin: the dataset has no state of its environments" in done.stderr
    assert info("d")["frames"] == 180


def test_a_dataset_without_the_facts_of_a_run_is_shown_and_goes_on():
    collected(*SHORT)
    record = json.loads(Path("d/_dataset.json").read_text())
    for name in ("stats", "throughput", "bottleneck", "seconds"):
        del record[name]
    Path("d/_dataset.json").write_text(json.dumps(record))
    assert trawl("show", "d")[0] == 0
    resumed(*RUN)
    assert info("d")["throughput"]


def test_the_timeline_and_the_log_are_those_of_the_last_run():
    """Where new episodes begin, the collector does not count the frames of earlier runs."""
    log = ["--log", "csv:a.csv", "--trace"]
    resumed(*SHORT, *log, "first.json.gz")
    resumed(*RUN, *log, "second.json.gz")
    for name, batches in (("first", 2), ("second", 4)):
        spans = read_trace(f"{name}.json.gz").lane("collector")
        assert [span.name for span in spans].count("batch") == batches
    assert info("d")["trace"] == os.path.abspath("second.json.gz")
    frames = [int(row["frames"]) for row in logged("a.csv")]
    assert frames == sorted(frames)
    assert (frames[0], frames[-1]) == (0, 360)
    os.remove("second.json.gz")
    code, _, err = trawl("show", "d", "--html", "report.html")
    missing = os.path.abspath("second.json.gz")
    assert (code, err) == (0, f"trawl: note: d: the trace {missing} is missing\n")
    said = resumed(*RUN, "--frames", 480, "--envs", 2, "--log", "csv:b.csv")[1]
    assert "new episodes begin" in said
    found = logged("b.csv")
    assert [int(row["frames"]) for row in (found[0], found[-1])] == [360, 480]
    assert {row["total_frames"] for row in found} == {"480"}
    assert info("d")["trace"] is None
