"""``trawl collect``: its frames, what it records and tells of a run, and how a run may end."""

import json
import math
import os
import signal
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cli_parts import INLINE, collected, lines_of, logged, trawl, working_in
from cli_policies import Net
from tensordict import TensorDict

from trawl import Collector, MultiSyncCollector
from trawl.data import info, load
from trawl.data.sinks.record import RECORD
from trawl.extras.cli.arguments import CollectArguments, parse
from trawl.extras.cli.collect import bottleneck_finder, plain
from trawl.extras.cli.collectors import batch_size
from trawl.observe import EpisodeStats, read_trace


def strict(directory="d"):
    """The record, read as JSON that has neither NaN nor infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(Path(directory, RECORD).read_text(), parse_constant=refuse)


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "workers"])
def ran(request, tmp_path_factory):
    """A run in which all is recorded that there is."""
    place = tmp_path_factory.mktemp("ran")
    with working_in(place):
        code, out, err = trawl(
            "collect", "Pendulum-v1", "--frames", 800, "--frames-per-batch", 200, "--seed", 7,
            "--envs", 2, "--workers", request.param, "--max-frames-per-traj", 50, "--out", "d",
            "--trace", "run.json.gz", "--log", "csv:stats.csv",
        )  # fmt: skip
        assert code == 0, err
        shown, html = trawl("show", "d"), trawl("show", "d", "--html", "report.html")
    return SimpleNamespace(
        workers=request.param, place=place, out=out, err=err, shown=shown, html=html
    )


def test_the_frames_are_those_of_the_collector(ran):
    options = {"frames_per_batch": 200, "total_frames": 800, "max_frames_per_traj": 50}
    envs, cls = ["Pendulum-v1"] * 2, Collector
    if ran.workers:
        envs, cls, options["start_method"] = [envs] * 2, MultiSyncCollector, "inline"
    with cls(envs, **options) as collector:
        collector.set_seed(7)
        expected = torch.cat([batch.reshape(-1).clone() for batch in collector])
    assert (load(ran.place / "d") == expected).all()
    assert TensorDict.load_memmap(ran.place / "d" / "frames").shape == (800,)
    left = {"d", "report.html", "run.json.gz", "stats.csv"}
    assert set(os.listdir(ran.place)) == left


def test_the_record_tells_how_it_was_made(ran):
    facts = strict(ran.place / "d")
    expected = {
        "format": "memmap",
        "env": "Pendulum-v1",
        "policy": "random",
        "policy_sha256": None,
        "seed": 7,
        "frames": 800,
        "frames_per_batch": 200,
        "complete": True,
        "stopped_by": None,
        "trace": str(ran.place / "run.json.gz"),
    }
    assert expected.items() <= facts.items()
    given = {"env": "Pendulum-v1", "seed": 7, "out": "d", "log": ["csv:stats.csv"], "envs": 2}
    assert given.items() <= facts["arguments"].items()
    packages = {"trawl": "trawl-rl", "torch": "torch", "gymnasium": "gymnasium"}
    versions = {name: metadata.version(package) for name, package in packages.items()}
    assert versions.items() <= facts["versions"].items()
    assert set(facts["versions"]) == {*packages, "tensordict", "python"}
    assert facts["date"].startswith("20")
    absent = {"env_kwargs", "info_keys", "deterministic", "resumed", "frame_stack"}
    assert not absent & set(facts)


def test_the_record_tells_what_came_of_it(ran):
    facts = strict(ran.place / "d")
    assert facts["seconds"] > 0
    assert 0 < facts["env_time_share"] < 1
    episodes = facts["episodes"]
    assert (episodes["count"], episodes["length"]["mean"], episodes["length"]["std"]) == (16, 50, 0)
    expected = EpisodeStats()
    expected.update(load(ran.place / "d"))
    assert episodes["return"]["mean"] == pytest.approx(expected.returns.mean)
    assert episodes["return"]["min"] == pytest.approx(expected.returns.low)
    stats = facts["stats"]
    assert (stats["frames"], stats["batches"], stats["episodes"]) == (800, 4, 16)
    parts = ("env", "policy", "overhead", "weights", "idle")
    assert sum(stats[f"{part}_share"] for part in parts) == pytest.approx(1)
    own = [stats.get(f"worker_{index}/frames") for index in range(3)]
    assert own == ([400, 400, None] if ran.workers else [None] * 3)
    if ran.workers:
        # They were ended, but did not die.
        assert (stats["workers_alive"], stats["worker_0/alive"]) == (2, True)
    points = facts["throughput"]
    assert (points[0], points[-1]) == ([0.0, 0], [facts["seconds"], 800])
    assert points == sorted(points)
    assert len({frames for _, frames in points}) == len(points) == 5
    found = facts["bottleneck"]
    assert set(found) == {"part", "share", "sentence", "worker"}
    assert 0 < found["share"] <= 1
    workers = {"count": 2, "sync": True, "restarts": 0, "frames": [400, 400]}
    assert facts.get("workers") == (workers if ran.workers else None)


def test_the_summary_and_show_tell_the_same(ran):
    code, shown, err = ran.shown
    assert (code, err) == (0, "")
    assert "800/800 frames" in ran.err
    assert "note" not in ran.err
    assert "800 in " in ran.out
    table = ran.out[ran.out.index("16 episodes") :]
    assert table in shown
    assert ["length", "50.0", "0", "50.0", "50.0"] in lines_of(table)
    (line,) = [line for line in ran.out.splitlines() if line.split()[:1] == ["limit"]]
    assert line == f"      limit  {strict(ran.place / 'd')['bottleneck']['sentence']}"
    for text in (ran.out, shown):
        assert ("workers  2, synchronous; 400 frames each" in text) == bool(ran.workers)
    made = ("environment  Pendulum-v1", "policy  random", "seed  7", "frames  800\n")
    for words in (*made, f"torch {metadata.version('torch')}"):
        assert words in shown
    for row in (
        ["'observation'", "(800,", "3)", "float32", "9.6", "kB"],
        ["('next',", "'reward')", "(800,", "1)", "float32", "3.2", "kB"],
        ["('collector',", "'traj_ids')", "(800)", "int64", "6.4", "kB"],
    ):
        assert row in lines_of(shown)


def test_the_timeline_has_all_batches(ran):
    timeline = read_trace(ran.place / "run.json.gz")
    assert timeline.complete
    spans = timeline.lane("learner")
    assert [span.args["frames"] for span in spans if span.name == "collect"] == [200] * 4
    lanes = ["worker 0", "worker 1"] if ran.workers else ["collector"]
    made = [span for lane in lanes for span in timeline.lane(lane) if span.name == "batch"]
    assert sum(span.args["frames"] for span in made) == 800
    code, _, err = ran.html
    assert (code, err) == (0, "")
    page = (ran.place / "report.html").read_text()
    for lane in ("learner", *lanes):
        (parts,) = page.split(f'aria-label="{lane}: ')[1:]
        parts = parts.partition('"')[0]
        assert ("collect" if lane == "learner" else "env") in parts
        assert "other" not in parts


def test_the_last_statistics_are_logged(ran):
    last = logged(ran.place / "stats.csv")[-1]
    assert (last["frames"], last["completed"]) == ("800", "True")
    assert ("worker_1/frames" in last) == bool(ran.workers)


# --- small runs


def test_a_run_without_options_is_repeated_by_the_seed_that_it_has_drawn():
    for _ in range(2):
        code, out, _ = trawl("collect", "Pendulum-v1", "--frames", 40, "--envs", 3)
        assert code == 0
        # The last batch is cut.
        assert "no episode has ended" in out
        os.rename("runs", f"runs{len(os.listdir())}")
    (one,), (other,) = (list(Path(name).iterdir()) for name in ("runs1", "runs2"))
    assert one.name.startswith("Pendulum-v1-20")
    assert len(load(one)) == len(load(other)) == 40
    assert (load(one)["action"] != load(other)["action"]).any()
    assert not [name for name in os.listdir(one) if "trace" in name]
    assert "trace" not in info(one)
    again = ["--frames", 40, "--envs", 3, "--seed", info(one)["seed"], "--out", "[red]d[/red]"]
    assert "[red]d[/red]" in trawl("collect", "Pendulum-v1", *again)[1]
    assert (load(one) == load("[red]d[/red]")).all()


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ("--frames 3000", 1000),
        ("--frames 40 --envs 3", 39),
        ("--frames 1 --envs 2", 2),
        ("--frames 3000 --workers 3 --envs 4", 996),
        ("--frames 1 --workers 3", 3),
        ("--frames 3000 --workers 3 --async", 1000),
        ("--frames 100 --workers 3 --async --envs 2", 34),
    ],
)
def test_batches_that_are_not_asked_for_suit_the_environments(options, size):
    assert batch_size(parse(["collect", "Pendulum-v1", *options.split()])) == size


def test_the_first_weights_of_a_policy_come_from_the_seed():
    """Also those of the workers."""
    frames = collected("Pendulum-v1", "--policy", "cli_policies:Net", "--frames", 40, "--seed", 3,
                       *INLINE)  # fmt: skip
    torch.manual_seed(3)
    net = Net()
    with torch.no_grad():
        assert torch.allclose(net(frames["observation"]), frames["action"], atol=1e-6)


def failing(policy, frames=1000, each=100, *more):
    """A run with one of the policies that end it, by batches of a size."""
    return trawl("collect", "Pendulum-v1", "--policy", f"cli_policies:{policy}", "--frames", frames,
                 "--frames-per-batch", each, "--out", "d", *more)  # fmt: skip


def test_a_failing_policy_keeps_what_was_collected():
    code, out, err = failing("fails")
    assert code == 2
    last = err.splitlines()[-1]
    assert last.startswith("trawl: collection failed: ValueError: no more (")
    assert "kept the 200 frames" in last
    assert "Traceback" not in err
    assert "200 in " in out
    assert len(load("d")) == 200
    assert not info("d")["complete"]
    assert "no more" in info("d")["stopped_by"]
    assert strict()["bottleneck"]["part"]
    words = "not complete: stopped by an error: collection failed: ValueError: no more"
    assert f"frames  200, {words}" in trawl("show", "d")[1]
    # A run that goes on and fails in its first batch has no figures.
    code, _, err = failing("fails", 1000, 300, "--resume", "--traceback")
    assert code == 2
    assert 'raise ValueError("no more' in err
    assert "kept the 200 frames" in err.splitlines()[-1]
    assert (strict()["bottleneck"], strict()["throughput"]) == (None, [[0.0, 0]])


def test_a_policy_that_fails_in_the_first_batch_leaves_nothing():
    code, _, err = failing("fails", 1000, 1000)
    assert code == 2
    assert err.splitlines()[-1].endswith("; no batch was complete, so nothing was written")
    assert os.listdir() == []


def test_a_policy_that_leaves_the_program_is_an_error():
    code, _, err = failing("leaves")
    assert code == 2
    assert "collection failed: SystemExit: enough" in err.splitlines()[-1]
    assert len(load("d")) == 100


@pytest.mark.parametrize(
    ("policy", "total", "code", "frames", "name"),
    [
        ("ctrl_c", 1000, 130, 200, "SIGINT"),
        ("terminate", 1000, 143, 200, "SIGTERM"),
        ("ctrl_c_twice", 1000, 130, 100, "SIGINT"),
        ("ctrl_c", 200, 130, 200, "SIGINT"),
    ],
)
def test_a_signal_keeps_what_was_collected(policy, total, code, frames, name):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    found, out, err = failing(policy, total)
    kept = f"trawl: interrupted; kept the {frames} frames collected so far, in d"
    assert (found, err.splitlines()[-1]) == (code, kept)
    assert len(load("d")) == frames
    assert (info("d")["complete"], info("d")["stopped_by"]) == (frames == total, name)
    assert f"{frames} in " in out
    told = f"frames  {frames}, not complete: stopped by {name}\n"
    assert (told in trawl("show", "d")[1]) == (frames < total)
    assert os.listdir() == ["d"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_ctrl_c_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code, _, _ = failing("ctrl_c", 300)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (code, len(load("d"))) == (0, 300)


# --- facts about a run


def test_values_become_plain_json():
    given = {"a": math.nan, "b": np.float32(0.5), "c": True, "d": [1, np.int64(2)], 3: (-9e999,)}
    found = {"a": None, "b": 0.5, "c": True, "d": [1, 2.0], "3": [None]}
    assert plain({**given, "e": None, "f": "x", "g": object}) == {
        **found, "e": None, "f": "x", "g": str(object),
    }  # fmt: skip


STRAGGLER = {"env": 0.5, "idle": 0.5, "workers": 2, "worker_0/idle": 0.9, "worker_1/idle": 0.1}
WAITED_FOR = "Worker 1 limits the rate, because the others wait for it"


@pytest.mark.parametrize(
    ("shares", "order", "words"),
    [
        ({"env": 1.0}, False, "The environment limits the rate (100% of busy time): use more --wo"),
        ({"policy": 1.0}, False, "The policy limits the rate (100% of busy time): use more --envs"),
        ({"overhead": 1.0}, False, "batches limits the rate (100% of busy time): use a larger --"),
        ({"env": 1.0, "learner": 0.9, "wait": 0.1}, False, "Writing the dataset limits the rate ("),
        ({"env": 1.0, "driver": 0.9, "wait": 0.1}, False, "Receiving batches limits the rate (90%"),
        (STRAGGLER, False, f"{WAITED_FOR}: with --async, no worker waits."),
        (STRAGGLER, True, f"{WAITED_FOR}."),
    ],
)  # fmt: skip
def test_the_sentence_names_options_of_the_command(shares, order, words):
    parts = dict.fromkeys(
        ("env", "policy", "overhead", "weights", "idle", "learner", "driver"), 0.0
    )
    shares = parts | {"wait": 1.0, "workers": 0} | shares
    workers = shares.pop("workers")
    stats = {"workers": workers} | {f"{name}_share": value for name, value in shares.items()}
    find = bottleneck_finder(CollectArguments(env="e", workers=workers, asynchronous=order))
    assert words in find(stats).sentence
    assert len(find(stats).sentence) < 100
    assert find({}).sentence == "No batch has been collected yet."
