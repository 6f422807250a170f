"""Timelines that ``trawl collect --trace`` writes."""

import os
import re
from pathlib import Path

import pytest

from trawl.data import info
from trawl.observe import read_trace


@pytest.mark.parametrize("workers", [0, 2])
def test_a_timeline_of_all_batches(trawl, workers):
    code, _, _ = trawl(
        "collect", "Pendulum-v1", "--frames", 200, "--frames-per-batch", 20, "--out", "d",
        "--trace", "run.json.gz", "--workers", workers,
    )  # fmt: skip
    assert code == 0
    timeline = read_trace("run.json.gz")
    assert timeline.complete
    assert info("d")["trace"] == os.path.abspath("run.json.gz")
    collected = [span.args["frames"] for span in timeline.lane("learner") if span.name == "collect"]
    assert collected == [20] * 10
    lanes = ["worker 0", "worker 1"] if workers else ["collector"]
    frames = [
        span.args["frames"]
        for lane in lanes
        for span in timeline.lane(lane)
        if span.name == "batch"
    ]
    assert sum(frames) == 200


def test_a_continued_dataset_has_the_timeline_of_the_last_run(trawl):
    for frames, name in ((100, "first.json.gz"), (200, "second.json.gz")):
        code, _, _ = trawl(
            "collect", "Pendulum-v1", "--frames", frames, "--frames-per-batch", 20, "--out", "d",
            "--resume", "--trace", name,
        )  # fmt: skip
        assert code == 0
        spans = read_trace(name).lane("collector")
        assert [span.name for span in spans].count("batch") == 5
        assert info("d")["trace"] == os.path.abspath(name)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_report_shows_the_timeline(trawl, workers):
    trawl(
        "collect", "Pendulum-v1", "--frames", 200, "--frames-per-batch", 20, "--out", "d",
        "--trace", "run.json.gz", "--workers", workers,
    )  # fmt: skip
    code, _, err = trawl("show", "d", "--html", "report.html")
    assert (code, err) == (0, "")
    described = re.findall(r'aria-label="([^"]*)"', Path("report.html").read_text())
    lanes = ["learner", *(["worker 0", "worker 1"] if workers else ["collector"])]
    for lane in lanes:
        (parts,) = [text for text in described if text.startswith(f"{lane}: ")]
        assert ("collect" if lane == "learner" else "env") in parts
        assert "other" not in parts


def test_the_report_names_a_timeline_that_was_deleted(trawl):
    trawl("collect", "Pendulum-v1", "--frames", 20, "--out", "d", "--trace", "run.json.gz")
    os.remove("run.json.gz")
    code, _, err = trawl("show", "d", "--html", "report.html")
    assert code == 0
    assert err == f"trawl: note: d: the trace {os.path.abspath('run.json.gz')} is missing\n"


def test_no_timeline_unless_asked(trawl):
    trawl("collect", "Pendulum-v1", "--frames", 20, "--out", "d")
    assert "trace" not in info("d")
    assert os.listdir() == ["d"]
