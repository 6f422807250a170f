"""Timelines in a report: traces of any kind, and what is left of long ones."""

import gzip
import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
from report_parts import counter, events, frames, label, report, span, write, write_trace

from trawl.extras.report import trace as trace_module
from trawl.extras.report.timeline import Lane, thinned, thinned_series
from trawl.extras.report.trace import SPANS, Series, Spans, load_trace


def reported(found):
    """The page of a report on a dataset with a trace, and what was printed on stderr."""
    write(frames(), "d")
    write_trace(found, "d/trace.json.gz")
    return report()


def test_a_trace_becomes_lanes_and_counters():
    page, err = reported(events(2))
    assert err == ""
    described = [each["aria-label"] for each in page.all("svg") if "aria-label" in each]
    lanes = [text.partition(":")[0] for text in described]
    first = lanes.index("learner")
    assert lanes[first : first + 4] == ["learner", "scheduler", "worker 0", "worker 1"]
    assert "Counter policy version: 0 to 4, at the end 4" in described
    # Five batches of ten frames in worker 0, whose environment takes 70 µs a step: 3.5 ms.
    table = page.text.partition("Time of each part, by lane")[2]
    row = table.partition("worker 0")[2].partition("worker 1")[0].split()
    at = row.index("env")
    assert row[at : at + 4] == ["env", "50", "3.5", "ms"]


TEXT = json.dumps(list(events(1))).encode()
CUT = gzip.compress(json.dumps(list(events(2, 200))).encode())[:-5000]
EARLY = "is damaged: the file ends too early"
# The place in the record, whether it is a link, the content, the note, and whether it is shown.
PLACES = [
    ("d/other.json", False, TEXT, "", True),
    # The record names it by a link, or there is one in the dataset, which is not followed.
    ("link.json", True, TEXT[:-200], EARLY, True),
    ("d/trace.json.gz", True, gzip.compress(TEXT), "links are not followed", False),
    ("gone.json.gz", False, None, "is missing", False),
    ("d/trace.json.gz", False, CUT, EARLY, True),
    *(
        ("d/trace.json.gz", False, content, "is damaged: ", False)
        for content in (
            b"",
            b"\x1f\x8b",
            b"\x1f\x8bgarbage that is no gzip",
            b"no json",
            b"{}",
            b'{"traceEvents": [{"ph": "X"',
            b'{"traceEvents": [{"ph": nonsense}]}',
            b'{"traceEvents": ' + b"[" * 100_000,
            b'{"traceEvents": [{"ts": ' + b"9" * 5000 + b"}]}",
            b"\xff\xfe\x00" * 100,
        )
    ),
    # Places that a stranger has chosen.
    *((place, False, None, None, False) for place in (
        "/dev/zero", "/", "/no\0where", "/" + "x" * 5000
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "is_link", "content", "note", "shown"), PLACES, ids=range(len(PLACES))
)
def test_the_trace_that_the_record_names_is_shown_or_noted(place, is_link, content, note, shown):
    name = place.removeprefix("d/")
    given = name if place.startswith("d/") else os.path.abspath(place)
    write(frames(), trace=given)
    if content is not None:
        file = Path("real" if is_link else place)
        file.write_bytes(content)
        if is_link:
            Path(place).symlink_to(file.resolve())
    page, err = report()
    assert ("worker 0" in page.text) == shown
    if note is None:
        assert 'class="timeline"' not in page.source
    elif not note:
        assert err == ""
    else:
        assert err.startswith("trawl: note: d: the trace ")
        assert name in err
        assert note in err
        assert err.count("\n") == 1
        said = err.removeprefix("trawl: note: d: t").rstrip()
        assert f"T{said}" in page.text


def test_events_of_unexpected_forms_are_ignored():
    good = [span("env", 10, 5), label("process", "worker 0", 1)]
    bad = [
        None, 3, "x", [], {}, {"ph": "X"}, {"ph": "X", "name": 3, "ts": 1, "dur": 1},
        {**span("env", 0, 1), "ts": "1"}, {**span("env", 0, 1), "ts": True},
        {**span("env", 0, 1), "dur": -1}, {**span("env", 0, 1), "dur": None},
        span("env", 1e300, 1), span("env", 1, 1e300), span("env", float("nan"), 1),
        {"ph": "C", "name": "c", "ts": 1, "args": 5}, counter("c", 1, "x"), counter("c", 1, None),
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": 7}},
        {"ph": "M", "name": "thread_name", "pid": {}, "tid": [], "args": None},
    ]  # fmt: skip
    page, err = reported([*bad, *good, *bad])
    assert err == ""
    assert 'aria-label="worker 0: env 100.0%"' in page.source


def test_processes_with_several_threads_have_lanes_for_them():
    found = [
        *(label("process", "worker 0", 1), label("thread", "render", 1, 7)),
        *(span("env", 0, 1, 1, 7), span("env", 0, 1, 1, 8), span("odd", 0, 1, 5)),
    ]
    page, _ = reported(found)
    for text in ("worker 0, render", ">worker 0<", "process 5: other 100.0%"):
        assert text in page.source
    write_trace([], "d/trace.json.gz")
    assert "The trace has no events." in report()[0].text


def test_a_huge_trace_is_thinned():
    page, _ = reported(events(8, 30, 150))
    assert len(page.source) < 3_000_000
    assert re.search(r"Spans shorter than [\d.]+ (ms|µs) are joined", page.text)
    # The table counts every span.
    assert page.text.count("4,500") >= 16


def test_a_trace_with_very_many_lanes_is_cut():
    found = [span("env", at * 10, 5, pid) for pid in range(1, 301) for at in range(100)]
    page, _ = reported([*found, *(counter(f"c{n}", 1, 1) for n in range(40))])
    assert len(page.source) < 3_000_000
    assert page.source.count('class="lane dense"') == 256
    assert "Not drawn: 4,408 events beyond 256 lanes and 32 counters." in page.text


def test_only_the_first_characters_of_an_endless_trace_are_read(monkeypatch):
    monkeypatch.setattr(trace_module, "_MOST_CHARS", 10_000)
    assert "only the first 10,000 characters are read" in reported(events(2, 50))[1]


def test_it_makes_no_difference_where_a_trace_is_divided(monkeypatch):
    text = json.dumps({"traceEvents": [*events(2)]}, indent=1).encode()
    half = len(text) // 2
    Path("t.json").write_bytes(text)
    # Several gzipped files in one.
    Path("t.json.gz").write_bytes(gzip.compress(text[:half]) + gzip.compress(text[half:]))
    whole = load_trace(Path(), "t.json")
    assert whole.damage == ""
    assert len(whole.lanes[1, 0].starts) == 5 * (3 + 20) + 1
    for size in (1, 7, 4096):
        monkeypatch.setattr(trace_module, "_READ", size)
        for name in ("t.json", "t.json.gz"):
            assert load_trace(Path(), name) == whole


def random_lane(count, seed=1):
    """A lane with spans of any length, one after the other, with gaps."""
    generator = random.Random(seed)
    time, spans = 0.0, Spans()
    for _ in range(count):
        time += generator.choice([0, 0, 1, 50])
        length = generator.choice([0.5, 1, 2, 3, 100])
        spans.starts.append(time)
        spans.lengths.append(length)
        spans.names.append(generator.choice([1, 2, 3]))
        time += length
    return Lane.of(spans, 0.0), time


def test_thinning_keeps_the_time_of_each_part_in_each_bucket():
    lane, duration = random_lane(5000)
    [thin], bucket = thinned([lane], duration, 2000)
    assert len(thin) <= 2000
    assert bucket > 3
    assert (np.diff(thin.starts) >= 0).all()
    assert {n: t for n, (_, t) in thin.totals().items()} == pytest.approx(
        {n: t for n, (_, t) in lane.totals().items()}
    )
    # At the beginning of each bucket, no more than the span that lasts on is out of place.
    edges = np.arange(0, duration, bucket)
    for name in ("env", "policy", "weights"):
        apart = lane.of_name(name).busy(edges) - thin.of_name(name).busy(edges)
        assert np.abs(apart).max() <= bucket

    # Few spans are kept as they are.
    [same], bucket = thinned([lane], duration, 5000)
    assert same is lane
    assert bucket == 0


def test_joined_spans_lie_side_by_side():
    lane, duration = random_lane(5000)
    short = lane.select(lane.lengths < 10)
    [thin], bucket = thinned([short], duration, 2000)
    assert bucket > 10
    assert (thin.starts[:-1] + thin.lengths[:-1] <= thin.starts[1:] + 1e-6).all()


def test_the_time_of_spans_before_a_time_is_exact():
    spans = Spans()
    for start, length in ((10, 5), (20, 10)):
        spans.starts.append(start)
        spans.lengths.append(length)
        spans.names.append(SPANS.index("env"))
    lane = Lane.of(spans, 0.0)
    times = np.array([0, 10, 12, 15, 19, 25, 30, 99.0])
    assert lane.busy(times).tolist() == [0, 0, 2, 5, 5, 10, 15, 15]


def test_a_thinned_counter_keeps_its_extremes():
    series = Series()
    for number in range(10_000):
        series.times.append(float(number))
        series.values.append(1e6 if number == 777 else -5.0 if number == 5000 else number % 7)
    times, values = thinned_series(series, 0.0, 9999.0, 100)
    assert len(times) <= 100
    assert (np.diff(times) > 0).all()
    assert (values.max(), values.min()) == (1e6, -5.0)
    assert times[values == 1e6].tolist() == [777.0]
