"""The page of the report, and its sections of settings, entries, episodes and rates."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trawl.data.sinks.record import Record
from trawl.extras.cli.errors import shown
from trawl.extras.monitors.plots import mean_window, running_mean
from trawl.extras.report.charts import Axis, bars, chart, compact, dots, line, svg
from trawl.extras.report.histograms import MOST_ENTRIES, MOST_TEXTS, EntrySummary
from trawl.extras.report.markup import (
    Markup,
    as_text,
    details,
    figure,
    is_number,
    markup,
    note,
    section,
    table,
    tag,
)
from trawl.extras.report.timeline import timeline_section
from trawl.extras.report.trace import Trace
from trawl.keys import show_key
from trawl.observe.episodes import Episodes, EpisodeStats, Moments
from trawl.observe.formats import plural, short, show_bytes
from trawl.observe.waits import DRIVER_PARTS, WORKER_PARTS
from trawl.versions import version

_SECTIONS = {
    "settings": "Settings",
    "episodes": "Episodes",
    "throughput": "Throughput",
    "bottleneck": "Bottleneck",
    "timeline": "Timeline",
    "entries": "Entries",
    "statistics": "Statistics",
}


@dataclass(frozen=True)
class HtmlReport:
    """Content of a report.

    Attributes:
        title: name of the run.
        facts: the most important facts about the run, as text.
        record: record of the dataset.
        stats: statistics of its episodes; None if there are no suitable entries.
        episodes: its episodes.
        entries: summaries of its entries.
        trace: its trace, if there is one.
        trace_note: reason why there is no trace, or why it is not complete; else an empty string.
    """

    title: str
    facts: Mapping[str, str]
    record: Record
    stats: EpisodeStats | None
    episodes: Episodes
    entries: Sequence[EntrySummary]
    trace: Trace | None
    trace_note: str

    def render(self) -> str:
        """Returns the report as an HTML page, which needs no other file and no network."""
        info = self.record.facts()
        sections = (
            settings_section(self.facts, info),
            returns_section(self.stats, self.episodes, self.record.frames),
            throughput_section(info),
            shares_section(info),
            timeline_section(self.trace, self.trace_note),
            entries_section(self.record, self.entries),
            statistics_section(info),
        )
        body = tag(
            "body",
            tag("a", "Skip to the report", class_="skip", href="#report"),
            _header(self.title, info),
            tag("main", *sections, id="report", tabindex=-1),
            tag("footer", tag("p", f"Made by trawl {version()}: trawl show --html")),
            tag("script", Markup(_asset("script.js"))),
        )
        page = tag("html", _head(self.title), body, lang="en")
        return f"<!DOCTYPE html>\n{page}\n"


def _header(title: str, info: dict[str, Any]) -> Markup:
    links = (tag("li", tag("a", name, href=f"#{place}")) for place, name in _SECTIONS.items())
    state = "complete" if info["complete"] else "not complete"
    return tag(
        "header",
        tag("h1", title),
        tag("p", f"{info['frames']:,} frames, {state}"),
        tag("nav", tag("ul", *links), aria_label="Sections"),
    )


def _head(title: str) -> Markup:
    # The page loads nothing, and runs no script but its own.
    digest = base64.b64encode(hashlib.sha256(_asset("script.js").encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content_=policy),
        tag("meta", name_="viewport", content_="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content_="light dark"),
        tag("title", f"{title}: trawl report"),
        # Browsers would ask a server for an icon otherwise.
        tag("link", rel="icon", href="data:,"),
        tag("style", Markup(_asset("style.css"))),
    )


def _asset(name: str) -> str:
    return files("trawl.extras.report").joinpath(name).read_text(encoding="utf-8")


# Facts that the page shows elsewhere, or in another form.
_ELSEWHERE = {
    *("arguments", "versions", "stats", "throughput", "bottleneck", "episodes", "trace"),
    *("complete", "frames"),
}
# Number of rows of a table: a record from a stranger may be long.
_MOST_SETTINGS = 500


def settings_section(facts: Mapping[str, str], info: dict[str, Any]) -> Markup:
    """Returns the section.

    Args:
        facts: the most important facts, as text.
        info: all facts about the dataset, not yet checked.
    """
    pairs = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()]
    content = [tag("dl", *pairs, class_="facts")]
    arguments, versions = info.get("arguments"), info.get("versions")
    if isinstance(arguments, dict):
        named = {f"--{_option(name)}": value for name, value in arguments.items() if name != "env"}
        content.append(
            details("Arguments", _settings_table("arguments", "Arguments of the command", named))
        )
    else:
        content.append(note("No arguments were recorded: trawl collect records them."))
    if isinstance(versions, dict):
        content.append(
            details("Versions", _settings_table("versions", "Versions of packages", versions))
        )
    others = {name: value for name, value in info.items() if name not in _ELSEWHERE}
    content.append(
        details("Record", _settings_table("record", "Other facts in the record", others))
    )
    return section("settings", "Settings", *content)


def statistics_section(info: dict[str, Any]) -> Markup:
    """Returns the section with all statistics of the collector.

    Args:
        info: facts about the dataset, not yet checked.
    """
    found = info.get("stats")
    if isinstance(found, dict) and found:
        name = "Statistics of the collector at the end of the run"
        content = details("All statistics", _settings_table("stats", name, found))
    else:
        content = note(
            "No statistics were recorded: trawl collect records them at the end of a run."
        )
    return section("statistics", "Statistics", content)


def _option(name: str) -> str:
    """Returns the name of an option on the command line."""
    return {"asynchronous": "async"}.get(name, name).replace("_", "-")


def _settings_table(name: str, caption: str, found: Mapping[str, Any]) -> Markup:
    some = islice(found.items(), _MOST_SETTINGS)
    rows = [[tag("code", shown(key)), _value(value)] for key, value in some]
    if len(found) > _MOST_SETTINGS:
        caption += f", the first {_MOST_SETTINGS:,}"
    return table(f"{name}-table", caption, ("name", "value"), rows, text=2)


def _value(value: Any) -> Markup:
    if isinstance(value, dict | list):
        # JSON shows nested values in full; as_text cuts what is longer than a few lines.
        return tag("code", as_text(json.dumps(value)))
    return markup(as_text(value))


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
    content: list[str] = [_entries_table(record, found)]
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


def _entries_table(record: Record, found: Iterable[EntrySummary]) -> Markup:
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


# Numbers of dots and of points of a line in a chart, and number of rows of a table of its data.
_MOST_DOTS, _MOST_POINTS, _MOST_EPISODE_ROWS = 2000, 1000, 20


def returns_section(stats: EpisodeStats | None, episodes: Episodes, frames: int) -> Markup:
    """Returns the section.

    Args:
        stats: statistics of the episodes; None if the dataset has no suitable entries.
        episodes: the episodes.
        frames: number of frames in the dataset.
    """
    content: list[Markup] = []
    if stats is None:
        why = (
            "The dataset has no rewards, done flags and trajectory ids from which episodes follow."
        )
        content = [note(why)]
    elif not len(episodes):
        content = [note("No episode has ended, so there are no returns and lengths.")]
    else:
        content = [
            _moments(stats),
            _chart("return", episodes.returns, episodes, frames),
            _chart("length", episodes.lengths.astype(np.float64), episodes, frames),
        ]
    return section("episodes", "Episodes", *content)


def _moments(stats: EpisodeStats) -> Markup:
    rows = [["return", *_numbers(stats.returns)], ["length", *_numbers(stats.lengths)]]
    caption = f"{plural(stats.count, 'episode')} that ended"
    return table("episodes-table", caption, ("", "mean", "std", "min", "max"), rows)


def _numbers(found: Moments) -> list[str]:
    return [short(value) for value in (found.mean, found.std, found.low, found.high)]


def _chart(name: str, values: NDArray[Any], episodes: Episodes, frames: int) -> Markup:
    x = Axis(0.0, float(max(frames, 1)), "frames")
    y = Axis.around(values, name, 0.0 if name == "length" else None)
    every = slice(None, None, -(-len(values) // _MOST_DOTS))
    layers = [dots(x.place(episodes.ends[every]), y.place(values[every]), "c-env")]
    legend = [("dots c-env", "an episode")]
    window = mean_window(len(values))
    if window > 1:
        ends, means = episodes.ends[window - 1 :], running_mean(values, window)
        some = slice(None, None, -(-len(means) // _MOST_POINTS))
        layers.append(line(x.place(ends[some]), y.place(means[some]), "c-policy"))
        legend.append(("line c-policy", f"mean of the last {window:,} episodes"))
    finite = values[np.isfinite(values)]
    missing = len(values) - len(finite)
    notes = [note(f"Not drawn: {plural(missing, 'episode')} without a finite {name}.")]
    return chart(
        name,
        f"{name.capitalize()} of each episode, over the number of frames when it ended",
        _description(name, finite, len(values), frames),
        x,
        y,
        layers,
        *(notes if missing else ()),
        details("Data", _episode_rows(name, values, episodes)),
        legend=legend,
    )


def _description(name: str, finite: NDArray[Any], count: int, frames: int) -> str:
    text = f"{name.capitalize()} of {plural(count, 'episode')} over {plural(frames, 'frame')}"
    if not len(finite):
        return f"{text}; none is finite."
    tenth = max(1, len(finite) // 10)
    first, last = finite[:tenth].mean(), finite[-tenth:].mean()
    return (
        f"{text}, from {short(finite.min())} to {short(finite.max())}. The mean of the first "
        f"{plural(tenth, 'episode')} is {short(first)}, and that of the last {short(last)}."
    )


def _episode_rows(name: str, values: NDArray[Any], episodes: Episodes) -> Markup:
    """Returns a table with the episodes in a few groups."""
    groups = np.array_split(np.arange(len(values)), min(_MOST_EPISODE_ROWS, len(values)))
    rows = []
    for group in groups:
        found = values[group]
        numbers = (found.mean(), found.min(), found.max())
        rows.append(
            [
                f"{episodes.ends[group[-1]]:,}",
                f"{len(group):,}",
                *(short(float(n)) for n in numbers),
            ]
        )
    heads = ("up to frame", "episodes", "mean", "min", "max")
    return table(
        f"{name}-values", f"{name.capitalize()} in groups of episodes", heads, rows, text=1
    )


# Number of workers to draw.
_MOST_WORKERS = 256
# A part is labelled in its bar if it takes at least this share.
_LABELLED = 0.12


def shares_section(info: dict[str, Any]) -> Markup:
    """Returns the section.

    Args:
        info: facts about the dataset, not yet checked.
    """
    stats = info.get("stats")
    stats = stats if isinstance(stats, dict) else {}
    workers, driver = _workers(stats), _shares(stats, DRIVER_PARTS)
    content = _sentence(info.get("bottleneck"))
    if workers:
        whose = "workers" if len(workers) > 1 else "collector"
        content += [_bars("workers", f"Time of the {whose}", WORKER_PARTS, workers)]
    if driver:
        rows = [("driver thread", driver)]
        content += [_bars("driver", "Time of the driver thread", DRIVER_PARTS, rows)]
    if not workers and not driver:
        why = "No shares of time were recorded: trawl collect records them at the end of a run."
        content.append(note(why))
        if is_number(info.get("env_time_share")):
            share = info["env_time_share"]
            content.append(note(f"Of the time to make frames, the environment took {share:.0%}."))
    return section("bottleneck", "Bottleneck", *content)


def _sentence(found: Any) -> list[Markup]:
    sentence = found.get("sentence") if isinstance(found, dict) else None
    if not isinstance(sentence, str) or not sentence:
        return []
    return [tag("p", tag("strong", shown(sentence)), class_="lead")]


def _workers(stats: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Returns names and shares of all workers together, and of each one if there are several."""
    numbers = {int(m[1]) for name in stats if (m := re.fullmatch(r"worker_(\d{1,6})/\w+", name))}
    found = [("all workers" if numbers else "collector", _shares(stats, WORKER_PARTS))]
    for number in sorted(numbers)[:_MOST_WORKERS]:
        shares = _shares(stats, WORKER_PARTS, f"worker_{number}/")
        found.append((f"worker {number}", shares))
    return [(name, shares) for name, shares in found if shares]


def _shares(stats: dict[str, Any], parts: Iterable[str], prefix: str = "") -> dict[str, float]:
    """Returns the shares that statistics have, from 0 to 1, by the names of the parts."""
    found = {part: stats.get(f"{prefix}{part}_share") for part in parts}
    return {part: min(1.0, max(0.0, s)) for part, s in found.items() if is_number(s)}


def _bars(
    name: str, title: str, parts: Mapping[str, str], rows: Sequence[tuple[str, dict[str, float]]]
) -> Markup:
    """Returns a figure with a bar for each row, its legend, and a table of the same numbers."""
    drawn = [
        tag("div", tag("span", row, class_="bar-name"), _bar(parts, shares), class_="bar-line")
        for row, shares in rows
    ]
    keys = [
        tag(
            "li",
            tag("span", class_=f"box c-{part}"),
            tag("span", tag("b", part), f": {meaning.replace('`', '')}"),
        )
        for part, meaning in parts.items()
    ]
    cells = [
        [row, *(f"{shares[part]:.1%}" if part in shares else "–" for part in parts)]
        for row, shares in rows
    ]
    return figure(
        f"{name}-caption",
        f"{title}, in parts",
        tag("div", *drawn, class_="stacked", aria_hidden="true"),
        tag("ul", *keys, class_="legend"),
        table(f"{name}-shares", f"{title}, as shares", ("", *parts), cells),
    )


def _bar(parts: Iterable[str], shares: dict[str, float]) -> Markup:
    segments = []
    for part in parts:
        share = shares.get(part, 0.0)
        if share > 0:
            label = f"{part} {share:.0%}" if share >= _LABELLED else ""
            style = f"flex-grow:{share:.4f}"
            segments.append(tag("span", label, class_=f"bar c-{part}", style=style))
    return tag("span", *segments, class_="bar-row")


# Limits for values from a record, which may come from a stranger.
_MOST_RATES, _MOST_RATE_ROWS = 2000, 20


def throughput_section(info: dict[str, Any]) -> Markup:
    """Returns the section.

    Args:
        info: facts about the dataset, not yet checked.
    """
    content = _content(_points(info.get("throughput")))
    if not content:
        why = "No throughput was recorded: trawl collect records it at the end of a run."
        content = [note(why), *_overall(info)]
    return section("throughput", "Throughput", *content)


def _overall(info: dict[str, Any]) -> list[Markup]:
    seconds, frames = info.get("seconds"), info.get("frames")
    if info.get("resumed") or not is_number(seconds) or not is_number(frames) or seconds <= 0:
        return []
    rate = f"{frames / seconds:,.0f} frames/s"
    return [note(f"Over the whole collection, {frames:,} frames took {seconds:,} s: {rate}.")]


def _points(found: Any) -> NDArray[np.float64]:
    """Returns pairs of seconds and frames, in ascending order; what is no such pair is left out."""
    pairs: list[tuple[float, float]] = []
    for each in found[:_MOST_RATES] if isinstance(found, list) else ():
        if isinstance(each, list) and len(each) == 2 and all(map(is_number, each)):
            seconds, frames = float(each[0]), float(each[1])
            if not pairs or (seconds > pairs[-1][0] and frames >= pairs[-1][1]):
                pairs.append((seconds, frames))
    return np.array(pairs).reshape(-1, 2)


def _content(points: NDArray[np.float64]) -> list[Markup]:
    if len(points) < 2:
        return []
    seconds, frames = points.T
    rates = np.diff(frames) / np.diff(seconds)
    overall = float((frames[-1] - frames[0]) / (seconds[-1] - seconds[0]))
    x = Axis(float(min(0.0, seconds[0])), float(seconds[-1]), "seconds")
    y = Axis.around(np.array([0.0, rates.max() or 1.0]), "frames/s", 0.0)
    # The first rate holds from the first point on.
    times, steps = seconds, np.concatenate([rates[:1], rates])
    mean = np.full(2, overall)
    layers = [
        line(np.array([0.0, 1.0]), y.place(mean), "c-policy dashed"),
        line(x.place(times), y.place(steps), "c-env", steps=True),
    ]
    description = (
        f"Frames per second over {short(float(seconds[-1]))} seconds, from "
        f"{short(float(rates.min()))} to {short(float(rates.max()))}; {short(overall)} on average."
    )
    legend = [
        ("line c-env", "frames per second"),
        ("line c-policy dashed", f"mean, {overall:,.0f} frames/s"),
    ]
    values = details("Data", _rate_rows(seconds, frames))
    caption = "Frames per second, over time"
    return [chart("rate", caption, description, x, y, layers, values, legend=legend)]


def _rate_rows(seconds: NDArray[np.float64], frames: NDArray[np.float64]) -> Markup:
    """Returns a table with the mean rates of a few spans of time."""
    places = np.linspace(0, len(seconds) - 1, min(_MOST_RATE_ROWS + 1, len(seconds))).astype(int)
    rows = []
    for a, b in pairwise(places):
        rate = (frames[b] - frames[a]) / (seconds[b] - seconds[a])
        rows.append([f"{seconds[b]:,.4g}", f"{frames[b]:,.0f}", short(float(rate))])
    heads = ("seconds", "frames", "frames/s")
    return table("rate-values", "Frames per second in spans of time", heads, rows)
