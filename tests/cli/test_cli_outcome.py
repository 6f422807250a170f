"""What ``trawl collect`` records about the course of a collection."""

import json
import math

import numpy as np
import pytest

from trawl.cli.arguments import CollectArguments
from trawl.cli.outcome import bottleneck_finder, plain
from trawl.data import info
from trawl.data.sinks.record import RECORD


def strict(directory):
    """The record, read as JSON that has neither NaN nor infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    with open(f"{directory}/{RECORD}") as file:
        return json.load(file, parse_constant=refuse)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_record_has_the_statistics(workers, trawl):
    trawl("collect", "Pendulum-v1", "--frames", 300, "--frames-per-batch", 100,
          "--workers", workers, "--out", "d")  # fmt: skip
    facts = strict("d")
    stats = facts["stats"]
    assert (stats["frames"], stats["batches"]) == (300, 3)
    # With workers, no environment has taken 200 steps.
    assert stats["episode_return_mean"] is None if workers else stats["episode_return_mean"] < 0
    parts = ("env", "policy", "overhead", "weights", "idle")
    assert sum(stats[f"{part}_share"] for part in parts) == pytest.approx(1)
    assert [f"worker_{index}/frames" in stats for index in range(3)] == [
        index < workers for index in range(3)
    ]
    if workers:
        # They were ended, but did not die.
        assert stats["workers_alive"] == 2
        assert stats["worker_0/alive"] is True


def test_the_record_has_the_throughput(trawl):
    trawl("collect", "Pendulum-v1", "--frames", 3000, "--frames-per-batch", 10, "--out", "d")
    facts = strict("d")
    points = facts["throughput"]
    assert points[0] == [0.0, 0]
    assert points[-1] == [facts["seconds"], 3000]
    assert 2 < len(points) <= 200
    assert points == sorted(points)
    assert len({frames for _, frames in points}) == len(points)


def test_a_resumed_run_has_its_own_throughput(trawl):
    for frames, more in ((300, ()), (500, ("--resume",))):
        code, _, _ = trawl("collect", "Pendulum-v1", "--frames", frames, "--frames-per-batch", 100,
                           "--seed", 1, "--out", "d", *more)  # fmt: skip
        assert code == 0
    facts = strict("d")
    assert facts["throughput"][0] == [0.0, 0]
    assert facts["throughput"][-1] == [facts["seconds"], 200]
    assert facts["stats"]["frames"] == 500


def test_the_bottleneck_is_recorded_and_told(trawl):
    _, out, _ = trawl("collect", "Pendulum-v1", "--frames", 2000, "--out", "d")
    found = info("d")["bottleneck"]
    assert set(found) == {"part", "share", "sentence", "worker"}
    assert 0 < found["share"] <= 1
    assert found["worker"] is None
    (line,) = [line for line in out.splitlines() if line.split()[:1] == ["limit"]]
    assert line == f"      limit  {found['sentence']}"


def test_a_dataset_without_these_facts_is_readable(trawl):
    trawl("collect", "Pendulum-v1", "--frames", 300, "--seed", 1, "--out", "d")
    record = strict("d")
    for name in ("stats", "throughput", "bottleneck"):
        del record[name]
    with open(f"d/{RECORD}", "w") as file:
        json.dump(record, file)
    assert trawl("show", "d")[0] == 0
    assert trawl("collect", "Pendulum-v1", "--frames", 600, "--out", "d", "--resume")[0] == 0
    assert strict("d")["throughput"]


def test_a_run_that_fails_at_once_resumes_without_a_bottleneck(trawl):
    trawl("collect", "Pendulum-v1", "--policy", "cli_policies:fails", "--frames", 1000,
          "--frames-per-batch", 100, "--out", "d")  # fmt: skip
    assert strict("d")["bottleneck"]["part"]
    code, _, err = trawl("collect", "Pendulum-v1", "--policy", "cli_policies:fails",
                         "--frames", 1000, "--frames-per-batch", 300, "--out", "d",
                         "--resume")  # fmt: skip
    assert code == 2
    assert "kept the 200 frames" in err.splitlines()[-1]
    assert strict("d")["bottleneck"] is None
    assert strict("d")["throughput"] == [[0.0, 0]]


def test_values_become_plain_json():
    given = {"a": math.nan, "b": np.float32(0.5), "c": True, "d": [1, np.int64(2)], 3: (-9e999,)}
    assert plain(given) == {"a": None, "b": 0.5, "c": True, "d": [1, 2.0], "3": [None]}
    assert plain({"e": None, "f": "text", "g": object}) == {
        "e": None,
        "f": "text",
        "g": str(object),
    }


SHARES = {"env": 0.0, "policy": 0.0, "overhead": 0.0, "weights": 0.0, "idle": 0.0}
DRIVER = {"learner": 0.0, "wait": 1.0, "driver": 0.0}


@pytest.mark.parametrize(
    ("shares", "arguments", "words"),
    [
        ({"env": 1.0}, {}, "The environment limits the rate (100% of busy time): use more --work"),
        ({"policy": 1.0}, {}, "The policy limits the rate (100% of busy time): use more --envs"),
        ({"overhead": 1.0}, {}, "use a larger --frames-per-batch."),
        ({"env": 1.0, "learner": 0.9, "wait": 0.1}, {}, "Writing the dataset limits the rate (90%"),
        ({"env": 1.0, "driver": 0.9, "wait": 0.1}, {}, "Receiving batches limits the rate (90%"),
        ({"env": 0.5, "idle": 0.5, "workers": 2, "worker_0/idle": 0.9, "worker_1/idle": 0.1},
         {}, "Worker 1 limits the rate, because the others wait for it: with --async"),
        ({"env": 0.5, "idle": 0.5, "workers": 2, "worker_0/idle": 0.9, "worker_1/idle": 0.1},
         {"asynchronous": True}, "Worker 1 limits the rate, because the others wait for it."),
    ],
)  # fmt: skip
def test_the_sentence_names_options_of_the_command(shares, arguments, words):
    workers = shares.get("workers", 0)
    named = {name: value for name, value in (SHARES | DRIVER | shares).items() if name != "workers"}
    stats = {"workers": workers} | {f"{name}_share": value for name, value in named.items()}
    find = bottleneck_finder(CollectArguments(env="e", workers=workers, **arguments))
    assert words in find(stats).sentence
    assert len(find(stats).sentence) < 100


def test_before_the_first_batch_there_is_no_bottleneck():
    find = bottleneck_finder(CollectArguments(env="e"))
    assert find({}).sentence == "No batch has been collected yet."
