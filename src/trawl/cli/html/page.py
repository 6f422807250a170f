"""The page of the report."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from trawl.cli.html.entries import entries_section
from trawl.cli.html.histograms import EntrySummary
from trawl.cli.html.markup import Markup, tag
from trawl.cli.html.returns import returns_section
from trawl.cli.html.settings import settings_section, statistics_section
from trawl.cli.html.shares import shares_section
from trawl.cli.html.throughput import throughput_section
from trawl.cli.html.timeline import timeline_section
from trawl.cli.html.trace import Trace
from trawl.data.sinks.record import Record
from trawl.observe.episodes import Episodes, EpisodeStats
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
    return files("trawl.cli.html").joinpath(name).read_text(encoding="utf-8")
