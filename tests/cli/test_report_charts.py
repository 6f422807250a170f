import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from trawl.data.sinks.entries import Entry
from trawl.extras.report import histograms
from trawl.extras.report.charts import Axis, bars, compact, dots, line
from trawl.extras.report.histograms import MOST_BINS, EntrySummary, Histogram, followed, summaries
from trawl.extras.report.markup import Markup, tag

FLOATS = st.floats(allow_nan=False, allow_infinity=False)
WHOLES = st.integers(-(2**63), 2**63 - 1)


def parts_of(values, cuts):
    """The values, cut at some places."""
    return np.split(values, sorted(cut % (len(values) + 1) for cut in cuts))


def check(histogram, values):
    """Compares a histogram with NumPy's of the same bins."""
    edges = histogram.edges
    assert len(histogram.counts) <= MOST_BINS
    assert histogram.counts.sum() == len(values)
    assert (np.diff(edges) > 0).all()
    places = np.searchsorted(edges, values.astype(np.float64), side="right") - 1
    # The largest float may be the end of the last bin.
    places = np.minimum(places, len(histogram.counts) - 1)
    assert (np.bincount(places, minlength=len(histogram.counts)) == histogram.counts).all()
    # No bin at the ends is empty.
    assert histogram.counts[0] > 0
    assert histogram.counts[-1] > 0


@given(st.lists(FLOATS, min_size=1), st.lists(st.integers(0, 1000), max_size=5), st.randoms())
def test_a_histogram_of_floats_does_not_depend_on_the_order(values, cuts, random):
    whole = Histogram()
    whole.add(np.array(values))
    check(whole, np.array(values))
    random.shuffle(values)
    parts = Histogram()
    for part in parts_of(np.array(values), cuts):
        parts.add(part)
    assert parts.edges.tolist() == whole.edges.tolist()
    assert parts.counts.tolist() == whole.counts.tolist()


@given(st.lists(WHOLES, min_size=1), st.lists(st.integers(0, 1000), max_size=5))
def test_a_histogram_of_integers_counts_each(values, cuts):
    histogram = Histogram(whole=True)
    for part in parts_of(np.array(values, np.int64), cuts):
        histogram.add(part)
    assert histogram.counts.sum() == len(values)
    if max(values) - min(values) < MOST_BINS:
        first = int(histogram.edges[0])
        if abs(first) < 2**53:
            assert histogram.counts.tolist() == [
                values.count(first + number) for number in range(len(histogram.counts))
            ]


def test_values_that_are_not_finite_are_counted_apart():
    summary = EntrySummary(Entry(("x",), torch.float32, ()))
    summary.add(torch.tensor([1.0, torch.nan, torch.inf, -torch.inf, 3.0]))
    assert (summary.nan, summary.infinite, summary.moments.count) == (1, 2, 2)
    assert summary.histogram.counts.sum() == 2


@pytest.mark.parametrize(
    "dtype",
    [*(torch.uint8, torch.int16, torch.int64, torch.bool, torch.float16, torch.bfloat16),
     *(torch.float64, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.uint64)],
)  # fmt: skip
def test_values_of_all_dtypes_are_summarized(dtype):
    batch = TensorDict(x=torch.tensor([[0.0, 1.0], [1.0, 1.0]]).to(dtype), batch_size=[2])
    [summary] = summaries([Entry(("x",), dtype, (2,))], 2)
    assert len(list(followed([batch], [summary]))) == 1
    assert summary.moments.mean == 0.75
    assert summary.histogram.counts.sum() == 4


def test_entries_with_very_many_values_are_sampled_evenly(monkeypatch):
    monkeypatch.setattr(histograms, "_MOST_VALUES", 100)
    entries = [Entry(("x",), torch.int64, (3,)), Entry(("y",), torch.int64, ())]
    found = summaries(entries, 98)
    batches = TensorDict(
        x=torch.arange(98).unsqueeze(-1).expand(98, 3), y=torch.arange(98), batch_size=[98]
    ).split(7)
    list(followed(batches, found))
    x, y = found
    assert (x.step, y.step) == (3, 1)
    assert (x.moments.count, y.moments.count) == (99, 98)
    assert x.moments.mean == np.arange(0, 98, 3).mean()


def test_texts_are_counted_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(histograms, "MOST_TEXTS", 2)
    summary = EntrySummary(Entry(("x",), None, ()))
    summary.add_texts(["a", "b", "a", "c", "d"])
    assert (dict(summary.texts), summary.other_texts) == ({"a": 2, "b": 1}, 2)


@given(st.lists(FLOATS, min_size=1, max_size=20))
def test_an_axis_shows_all_values_and_few_ticks(values):
    axis = Axis.around(np.array(values), "x")
    places = axis.place(np.array(values))
    assert ((places >= 0) & (places <= 1)).all()
    ticks = axis.ticks()
    assert len(ticks) <= 6
    assert all(axis.low <= tick <= axis.high for tick in ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0.0, 0.3, [0, 0.1, 0.2, 0.3]),
        (0, 6000, [0, 2000, 4000, 6000]),
    ],
)
def test_ticks_are_round_numbers(low, high, ticks):
    assert Axis(low, high, "x").ticks() == pytest.approx(ticks)


def test_an_axis_begins_at_a_fixed_value_close_to_the_values_and_has_short_numbers():
    assert Axis.around(np.array([1.0, 10.0]), "x", 0.0).low == 0
    assert Axis.around(np.array([100.0, 101.0]), "x", 0.0).low > 90
    assert Axis.around(np.array([np.nan]), "x").ticks() != []
    assert Axis.around(np.array([5.0, 5.0]), "x").low < 5
    assert [compact(n) for n in (12_500, -1e6, 3e9, 2e12, 1e18)] == [
        *("12.5k", "-1M", "3G", "2T", "1e+18")
    ]


def test_lines_have_gaps_and_steps():
    x, y = np.array([0, 0.5, 0.75, 1.0]), np.array([0.0, 1.0, np.nan, 0.5])
    assert 'd="M0 300L500 0M1000 150"' in line(x, y, "k")
    assert 'd="M0 300V0H500"' in line(x[:2], y[:2], "k", steps=True)
    assert 'd="M0 300h0M500 0h0M1000 150h0"' in dots(x, y, "k")
    # Bars have the height of their counts.
    shape = bars(np.linspace(0, 1, 65), np.r_[1.0, np.zeros(62), 0.5], "k")
    assert re.search('d="M0 300V0H15.625V300zM984.3[78]5? 300V150H1000V300z"', shape)


def test_text_and_attributes_are_escaped():
    assert tag("p", "<b>", title='"&') == '<p title="&quot;&amp;">&lt;b&gt;</p>'
    assert tag("p", Markup("<b></b>"), "<") == "<p><b></b>&lt;</p>"
    assert tag("hr", hidden=True, id=None, title=False) == "<hr hidden>"
