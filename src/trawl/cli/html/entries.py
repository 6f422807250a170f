"""The section of the report on the entries of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from trawl.cli.errors import shown
from trawl.cli.html.axes import compact
from trawl.cli.html.charts import bars, svg
from trawl.cli.html.histograms import MOST_ENTRIES, MOST_TEXTS, EntrySummary
from trawl.cli.html.markup import Markup, details, figure, note, section, table, tag
from trawl.data.sinks.record import Record
from trawl.keys import show_key
from trawl.observe.formats import plural, short, show_bytes

# Numbers from here on are written with an exponent.
_LARGE = 1e9
# A bar of a bin with values has at least this height, so that it can be seen.
_LOWEST = 0.015
# Number of texts to list, the most frequent ones.
_LISTED = 10


def entries_section(record: Record, found: Sequence[EntrySummary]) -> Markup:
    """Returns the section.

    Args:
        record: record of the dataset.
        found: summaries of its entries.
    """
    content: list[str] = [_table(record, found)]
    if sum(each.size > 0 for each in record.entries) > len(found):
        content.append(note(f"Only the first {MOST_ENTRIES} entries have histograms."))
    if any(each.step > 1 for each in found):
        content.append(note("Entries with very many values are sampled: see their captions."))
    flags = [each for each in found if each.entry.dtype == torch.bool]
    others = [each for each in found if each.entry.dtype != torch.bool]
    drawings = [_figure(f"entry-{index}", each) for index, each in enumerate(others)]
    content += [tag("div", *drawings, class_="small-charts")] if drawings else []
    content += [_booleans(flags)] if flags else []
    return section("entries", "Entries", *content)


def _table(record: Record, found: Iterable[EntrySummary]) -> Markup:
    by_key = {each.entry.key: each for each in found}
    rows = []
    for entry in sorted(record.entries, key=lambda entry: entry.key):
        shape = f"({', '.join(f'{n:,}' for n in (record.frames, *entry.shape))})"
        size = "" if entry.dtype is None else show_bytes(record.frames * entry.row)
        values = _values(by_key[entry.key]) if entry.key in by_key else [""] * 4
        rows.append([tag("code", shown(show_key(entry.key))), shape, entry.kind, size, *values])
    heads = ("entry", "shape", "dtype", "size", "mean", "std", "min", "max")
    caption = "Entries of each frame, with statistics over all their values"
    return table("entries-table", caption, heads, rows, text=3)


def _values(each: EntrySummary) -> list[str]:
    """Returns mean, standard deviation, minimum and maximum, as text."""
    found = each.moments
    if not found.count:
        return [""] * 4
    return [_number(value) for value in (found.mean, found.std, found.low, found.high)]


def _number(value: float) -> str:
    """Formats a number with about four digits, however large it is."""
    return f"{value:.4g}" if abs(value) >= _LARGE else short(value)


def _figure(name: str, each: EntrySummary) -> Markup:
    caption = shown(show_key(each.entry.key))
    if each.step > 1:
        caption += f" (one of each {each.step:,} frames)"
    if each.entry.dtype is None:
        content = _texts(name, each)
    elif not each.moments.count:
        content = [note("No value is finite.")]
    elif each.moments.low == each.moments.high:
        content = [note(f"{_all(each.moments.count)} {_number(each.moments.low)}.")]
    else:
        content = _histogram(name, each)
    return figure(f"{name}-caption", caption, *content, *_not_finite(each))


def _not_finite(each: EntrySummary) -> list[Markup]:
    """Returns a note that counts the values that the histogram lacks."""
    found = [(each.nan, "NaN"), (each.infinite, "infinite")]
    parts = [f"{plural(count, 'value')} {_is(count)} {what}" for count, what in found if count]
    return [note(f"{' and '.join(parts)}.")] if parts else []


def _all(count: int) -> str:
    return "The only value is" if count == 1 else f"All {count:,} values are"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _histogram(name: str, each: EntrySummary) -> list[Markup]:
    counts, edges = each.histogram.counts, each.histogram.edges
    # A bin of integers ends with the last integer in it.
    below = "to" if each.histogram.whole else "below"
    stops = edges[1:] - 1 if each.histogram.whole else edges[1:]
    highest = int(counts.argmax())
    description = (
        f"Histogram of {plural(each.moments.count, 'value')} in {plural(len(counts), 'bin')} from "
        f"{_number(edges[0])} to {_number(stops[-1])}. The bin from {_number(edges[highest])} to "
        f"{_number(stops[highest])} has the most, {counts[highest]:,}."
    )
    places = np.linspace(0, 1, len(counts) + 1)
    heights = np.where(counts > 0, np.maximum(counts / counts.max(), _LOWEST), 0.0)
    drawing = svg(description, bars(places, heights, "c-env"))
    ends = (tag("span", compact(edges[0])), tag("span", compact(stops[-1])))
    axis = tag("div", *ends, class_="ends", aria_hidden="true")
    rows = [
        [f"{low:.6g}", f"{high:.6g}", f"{count:,}"]
        for low, high, count in zip(edges[:-1], stops, counts, strict=True)
    ]
    values = table(
        f"{name}-values", "Number of values in each bin", ("from", below, "values"), rows
    )
    return [tag("div", drawing, axis, class_="histogram"), details("Data", values)]


def _booleans(found: Sequence[EntrySummary]) -> Markup:
    rows = []
    for each in found:
        total = each.moments.count
        true = round(each.moments.mean * total)
        bar = tag("span", class_="bar c-env", style=f"width:{100 * true / total:.2f}%")
        rows.append(
            [
                tag("code", shown(show_key(each.entry.key))),
                tag("span", bar, class_="bar-row", aria_hidden="true"),
                f"{true:,}",
                f"{total - true:,}",
                f"{true / total:.2%}",
            ]
        )
    heads = ("entry", "share of True", "True", "False", "share")
    return table("booleans", "Booleans", heads, rows, text=2)


def _texts(name: str, each: EntrySummary) -> list[Markup]:
    rows = [[shown(text), f"{count:,}"] for text, count in each.texts.most_common(_LISTED)]
    caption = f"{plural(len(each.texts), 'different text')}"
    if each.other_texts:
        caption = f"More than {MOST_TEXTS:,} different texts, some of them"
    elif len(each.texts) > _LISTED:
        caption += f", the {_LISTED} most frequent"
    return [table(f"{name}-values", caption, ("text", "count"), rows)]
