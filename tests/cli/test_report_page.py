"""The page of a report: its sections, and datasets of strangers."""

import json
from pathlib import Path

import pytest
import torch
from cli_parts import collected
from report_parts import FACTS, events, frames, report, write, write_trace
from tensordict import NonTensorData, TensorDict

from trawl.data import ParquetSink

SECTIONS = ["settings", "episodes", "throughput", "bottleneck", "timeline", "entries", "statistics"]


@pytest.mark.parametrize("kind", ["memmap", "parquet", "minari"])
def test_it_reports_on_a_collection(kind):
    pytest.importorskip({"memmap": "torch", "parquet": "pyarrow"}.get(kind, "minari"))
    collected("CartPole-v1", "--frames", 300, "--seed", 7, "--format", kind, out="d-v0")
    Path("report.html").write_text("an old one" * 100_000)
    page, err = report("d-v0")
    assert err == ""
    assert [attributes["id"] for attributes in page.all("section")] == SECTIONS
    for text in (
        "CartPole-v1, policy random",
        "300 frames, complete",
        "--frames-per-batch",
        f"torch {torch.__version__}",
        "Return of each episode",
        "('next', 'observation')",
        "No trace was recorded",
    ):
        assert text in page.text


def test_what_an_old_dataset_lacks_is_absent_with_a_reason():
    write(frames())
    page, err = report()
    assert err == ""
    assert "<h1>d</h1>" in page.source
    for reason in (
        "No arguments were recorded",
        "No throughput was recorded",
        "No shares of time were recorded",
        "No trace was recorded: trawl collect --trace records one.",
        "No statistics were recorded",
    ):
        assert reason in page.text
    assert page.source.count('class="plot"') == 2


def test_all_that_a_new_record_has_is_shown():
    write(frames(), env="Pendulum-v1", policy="random", trace="trace.json.gz", **FACTS)
    write_trace(events(), "d/trace.json.gz")
    page, err = report()
    assert err == ""
    shares = ("62.5%", "worker 2", "50.0%", "wait 55%")
    for text in ("Add workers.", *shares, "10,412.3", "env_path", "arrays"):
        assert text in page.text
    # By their numbers, not as texts.
    assert page.text.index("worker 2") < page.text.index("worker 10")
    assert "2,000 frames/s" in page.text  # the mean from 500 frames on
    assert "from 1,000 to 3,000" in page.source
    assert "No " not in page.text.partition("Timeline")[2].partition("Entries")[0]


HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e\x00"


def test_no_value_is_taken_for_markup():
    stats = {HOSTILE: HOSTILE, "worker_0/env_share": 0.5, "worker_0/<b>_share": 1}
    write(
        frames(**{HOSTILE.replace("\x00", ""): torch.zeros(12)}),
        **dict.fromkeys(("env", "policy", "seed", "date"), HOSTILE),
        env_kwargs={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE},
        arguments={HOSTILE: HOSTILE, "policy": [HOSTILE]},
        stats=stats,
        bottleneck={"sentence": HOSTILE},
        throughput=[[1, 2], [2, HOSTILE], HOSTILE, None, [3, 4]],
        trace="trace.json.gz",
    )
    bad = [
        {"ph": "X", "name": HOSTILE, "ts": 1, "dur": 5, "pid": 1, "tid": 0},
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": HOSTILE}},
        {"ph": "C", "name": HOSTILE, "ts": 1, "pid": 0, "args": {HOSTILE: 2, "b": 3}},
    ]
    write_trace(bad, "d/trace.json.gz")
    page, _ = report()
    assert "alert(1)</script>" not in page.source
    assert len(page.all("script")) == 1
    assert page.text.count("<script>alert(1)") >= 10
    assert not {"\x1b", "\u202e", "\x00"} & set(page.source)


def test_texts_of_frames_are_escaped():
    pytest.importorskip("pyarrow")
    texts = [NonTensorData(HOSTILE if number % 3 else "plain") for number in range(12)]
    batch = frames()
    batch["said"] = torch.stack([TensorDict(said=text) for text in texts])["said"]
    with ParquetSink("d") as sink:
        sink.write(batch)
    page, _ = report()
    assert "alert(1)</script>" not in page.source
    assert "2 different texts" in page.text


def test_facts_of_unexpected_types_do_no_harm():
    write(frames())
    path = Path("d/_dataset.json")
    record = json.loads(path.read_text())
    for facts in (
        {"stats": [1], "throughput": {"a": 1}, "bottleneck": "x", "trace": 3, "arguments": 1},
        {"stats": {"env_share": "a", "idle_share": None}, "throughput": [[1]], "versions": 5},
        {"throughput": [[2, 5], [1, 6], [3, 4]], "bottleneck": {"sentence": 5}, "seconds": "x"},
        {"stats": {"env_share": -3, "worker_99999999999999999999/env_share": 1}, "trace": "../x"},
        {"throughput": [[1.0, 5], [2.0, 1e400], [1e400, 8], [True, False]]},
        {"stats": {"env_share": 1e400, "a": 10**30}, "seconds": 0, "resumed": 3, "env": {"a": []}},
    ):
        path.write_text(json.dumps({**record, **facts}))
        assert report()[0].source.count('class="plot"') == 2


def nan_rewards(count, infinite=False):
    rewards = torch.ones(count, 1)
    rewards[:: 1 if infinite else 40] = torch.nan
    if infinite:
        rewards[0] = torch.inf
    return frames(count, next__reward=rewards)


def of_agents():
    batch = frames(4, 2).exclude(("next", "reward"))
    batch["next", "agents", "reward"] = torch.tensor([1.0, 3.0]).expand(4, 2).unsqueeze(-1)
    return batch


@pytest.mark.parametrize(
    ("batch", "texts", "plots"),
    [
        (nan_rewards(400), ["Not drawn: 10 episodes without a finite return.",
                             "10 values are NaN."], 2),
        (nan_rewards(12, True), ["11 values are NaN and 1 value is infinite.",
                                 "No value is finite."], 2),
        (frames(12, 100), ["No episode has ended"], 0),
        (TensorDict({"x": torch.arange(30.0)}, [30]), ["The dataset has no rewards"], 0),
        (of_agents(), ["2 episodes that ended"], 2),
        (frames(1, 1), ["1 episode that ended"], 2),
    ],
    ids=["NaN", "no finite", "no end", "no rewards", "agents", "one frame"],
)  # fmt: skip
def test_episodes_of_all_kinds_are_reported(batch, texts, plots):
    write(batch)
    page, _ = report()
    for text in texts:
        assert text in page.text
    assert page.source.count('class="plot"') == plots
    assert "nan" not in page.source.replace("NaN", "")
    if "x" in batch:
        assert "Histogram of 30 values" in page.source


def test_entries_of_all_kinds_are_summarized():
    images = torch.arange(12 * 8 * 8 * 3).reshape(12, 8, 8, 3) % 256
    write(
        frames(
            pixels=images.to(torch.uint8),
            nested__position=torch.randn(12, 2),
            nested__deep__flag=torch.arange(12 * 5).reshape(12, 5) % 2 == 0,
            agents__reward=torch.randn(12, 3, 1, dtype=torch.float64),
            empty=torch.zeros(12, 0),
            huge=torch.tensor([-1e308, 1e308]).double().repeat(6),
            complex=torch.complex(torch.zeros(12), torch.full((12,), 2.0)),
            half=torch.randn(12).to(torch.bfloat16),
            large=torch.tensor([-(2**62), 2**62, 0]).repeat(4),
        )
    )
    page, _ = report()
    assert "Histogram of 2,304 values in 64 bins from 0 to 255" in page.source
    assert "('nested', 'deep', 'flag')" in page.text
    assert "30 50.00%" in " ".join(page.text.split())
    assert "All 12 values are 2." in page.text
    assert "(12, 3, 1)" in page.text


def test_many_episodes_and_entries_keep_the_page_small():
    many = {f"entry{number:03}": torch.randn(20_000) for number in range(250)}
    write(frames(20_000, 2, **many))
    page, _ = report()
    assert len(page.source) < 2_500_000
    assert "Only the first 200 entries have histograms." in page.text
    assert "10,000 episodes that ended" in page.text
