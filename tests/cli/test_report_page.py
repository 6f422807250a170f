from importlib.resources import files
from pathlib import Path

import pytest
import torch
from report_parts import (
    FACTS,
    Page,
    add_facts,
    check_structure,
    events,
    frames,
    write,
    write_trace,
)
from tensordict import NonTensorData, TensorDict

from trawl.data import MemmapSink, ParquetSink


@pytest.fixture
def report(trawl):
    """Writes a report on the dataset in ``d``; gives the page, and what was printed on stderr."""

    def make(directory="d"):
        code, out, err = trawl("show", directory, "--html", "report.html")
        assert code == 0, err
        assert out.endswith("the report is written to report.html\n")
        page = Page()
        check_structure(page)
        return page, err

    return make


def sections(page):
    """The ids of the sections, in order."""
    return [attributes["id"] for attributes in page.all("section")]


@pytest.mark.parametrize("format", ["memmap", "parquet", "minari"])
def test_it_reports_on_a_collection(trawl, report, format):
    pytest.importorskip({"memmap": "torch", "parquet": "pyarrow"}.get(format, "minari"))
    collected = ("CartPole-v1", "--frames", 300, "--seed", 7, "--format", format, "--out", "d-v0")
    assert trawl("collect", *collected)[0] == 0
    page, err = report("d-v0")
    assert err == ""
    names = ["settings", "episodes", "throughput", "bottleneck", "timeline", "entries"]
    assert sections(page) == [*names, "statistics"]
    assert "CartPole-v1, policy random" in page.text
    assert "300 frames, complete" in page.text
    for text in ("--frames-per-batch", f"torch {torch.__version__}", "Return of each episode"):
        assert text in page.text
    assert "('next', 'observation')" in page.text
    assert "No trace was recorded" in page.text


def test_what_an_old_dataset_lacks_is_absent_with_a_reason(report):
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


def test_all_that_a_new_record_has_is_shown(report):
    write(frames(), env="Pendulum-v1", policy="random", trace="trace.json.gz", **FACTS)
    write_trace(events(), "d/trace.json.gz")
    page, err = report()
    assert err == ""
    assert "Add workers." in page.text
    for text in ("62.5%", "worker 2", "50.0%", "wait 55%", "10,412.3", "env_path", "arrays"):
        assert text in page.text
    # By their numbers, not as texts.
    assert page.text.index("worker 2") < page.text.index("worker 10")
    assert "2,000 frames/s" in page.text  # the mean from 500 frames on
    assert "from 1,000 to 3,000" in page.source
    assert "No " not in page.text.partition("Timeline")[2].partition("Entries")[0]


HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\u202e\x00"


def test_no_value_is_taken_for_markup(report):
    stats = {HOSTILE: HOSTILE, "worker_0/env_share": 0.5, "worker_0/<b>_share": 1}
    write(
        frames(**{HOSTILE.replace("\x00", ""): torch.zeros(12)}),
        env=HOSTILE,
        policy=HOSTILE,
        env_kwargs={HOSTILE: HOSTILE},
        seed=HOSTILE,
        date=HOSTILE,
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


def test_texts_of_frames_are_escaped(report):
    pytest.importorskip("pyarrow")
    texts = [NonTensorData(HOSTILE if number % 3 else "plain") for number in range(12)]
    batch = frames()
    batch["said"] = torch.stack([TensorDict(said=text) for text in texts])["said"]
    with ParquetSink("d") as sink:
        sink.write(batch)
    page, _ = report()
    assert "alert(1)</script>" not in page.source
    assert "2 different texts" in page.text


@pytest.mark.parametrize(
    "facts",
    [
        {"stats": [1], "throughput": {"a": 1}, "bottleneck": "x", "trace": 3, "arguments": 1},
        {"stats": {"env_share": "a", "idle_share": None}, "throughput": [[1]], "versions": 5},
        {"throughput": [[2, 5], [1, 6], [3, 4]], "bottleneck": {"sentence": 5}, "seconds": "x"},
        {"stats": {"env_share": -3, "worker_99999999999999999999/env_share": 1}, "trace": "../x"},
        {"throughput": [[1.0, 5], [2.0, 1e400], [1e400, 8], [True, False]]},
        {"stats": {"env_share": 1e400, "a": 10**30}, "seconds": 0, "resumed": 3, "env": {"a": []}},
    ],
)
def test_facts_of_unexpected_types_do_no_harm(report, facts):
    write(frames())
    add_facts("d", **facts)
    page, _ = report()
    assert page.source.count('class="plot"') == 2


def test_rewards_that_are_nan_leave_gaps(report):
    rewards = torch.ones(400, 1)
    rewards[::40] = torch.nan
    write(frames(400, next__reward=rewards))
    page, _ = report()
    assert "Not drawn: 10 episodes without a finite return." in page.text
    assert "10 values are NaN." in page.text
    assert "nan" not in page.source.replace("NaN", "")


def test_rewards_that_are_all_nan_or_infinite_are_reported(report):
    rewards = torch.full((12, 1), torch.nan)
    rewards[0] = torch.inf
    write(frames(next__reward=rewards))
    page, _ = report()
    assert "11 values are NaN and 1 value is infinite." in page.text
    assert "No value is finite." in page.text


def test_without_an_end_of_an_episode_there_are_no_curves(report):
    write(frames(12, 100))
    page, _ = report()
    assert "No episode has ended" in page.text
    assert 'class="plot"' not in page.source


def test_frames_without_rewards_have_no_episodes_but_histograms(report):
    write(TensorDict({"x": torch.arange(30.0)}, [30]))
    page, _ = report()
    assert "The dataset has no rewards" in page.text
    assert "Histogram of 30 values" in page.source


def test_entries_of_all_kinds_are_summarized(report):
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


def test_rewards_of_agents_make_episodes(report):
    batch = TensorDict(batch_size=[4])
    batch["collector", "traj_ids"] = torch.tensor([0, 0, 1, 1])
    batch["next", "agents", "reward"] = torch.tensor([1.0, 3.0]).expand(4, 2).unsqueeze(-1)
    batch["next", "done"] = torch.tensor([False, True, False, True]).unsqueeze(-1)
    write(batch)
    page, _ = report()
    assert "2 episodes that ended" in page.text


def test_one_frame_is_enough(report):
    write(frames(1, 1))
    page, _ = report()
    assert "1 episode that ended" in page.text


def test_an_unfinished_collection_is_called_so(report):
    with MemmapSink("d") as sink:
        sink.write(frames())
        sink.commit()
        page, _ = report()
    assert "12 frames, not complete" in page.text
    assert "still running, or it was killed" in page.text


def test_many_episodes_and_entries_keep_the_page_small(report):
    many = {f"entry{number:03}": torch.randn(20_000) for number in range(250)}
    write(frames(20_000, 2, **many))
    page, _ = report()
    assert len(page.source) < 2_500_000
    assert "Only the first 200 entries have histograms." in page.text
    assert "10,000 episodes that ended" in page.text


def test_the_numbers_do_not_depend_on_how_frames_are_read(trawl, report, monkeypatch):
    write(frames(500, 7, observation=torch.rand(500, 4), flags=torch.rand(500) < 0.3))
    whole, _ = report()
    monkeypatch.setattr("trawl.cli.show._CHUNK", 13)
    parts, _ = report()
    assert parts.source == whole.source


def test_an_existing_report_is_replaced(report):
    write(frames())
    Path("report.html").write_text("old" * 100_000)
    report()


@pytest.mark.parametrize("place", ["missing/report.html", "."])
def test_a_report_that_cannot_be_written_is_an_error(trawl, place):
    write(frames())
    code, out, err = trawl("show", "d", "--html", place)
    assert (code, out) == (2, "")
    assert err.startswith(f"trawl: {place} can't be written: ")
    assert err.count("\n") == 1


def test_the_assets_are_part_of_the_package():
    for name in ("style.css", "script.js"):
        assert files("trawl.cli.html").joinpath(name).is_file()
