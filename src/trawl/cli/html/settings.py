"""The section of the report on how a dataset was made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from typing import Any

from trawl.cli.errors import shown
from trawl.cli.html.markup import Markup, details, markup, note, section, table, tag
from trawl.cli.html.values import as_text

# Facts that the page shows elsewhere, or in another form.
_ELSEWHERE = {
    *("arguments", "versions", "stats", "throughput", "bottleneck", "episodes", "trace"),
    *("complete", "frames"),
}
# Number of rows of a table: a record from a stranger may be long.
_MOST_ROWS = 500


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
        content.append(details("Arguments", _table("arguments", "Arguments of the command", named)))
    else:
        content.append(note("No arguments were recorded: trawl collect records them."))
    if isinstance(versions, dict):
        content.append(details("Versions", _table("versions", "Versions of packages", versions)))
    others = {name: value for name, value in info.items() if name not in _ELSEWHERE}
    content.append(details("Record", _table("record", "Other facts in the record", others)))
    return section("settings", "Settings", *content)


def statistics_section(info: dict[str, Any]) -> Markup:
    """Returns the section with all statistics of the collector.

    Args:
        info: facts about the dataset, not yet checked.
    """
    found = info.get("stats")
    if isinstance(found, dict) and found:
        name = "Statistics of the collector at the end of the run"
        content = details("All statistics", _table("stats", name, found))
    else:
        content = note(
            "No statistics were recorded: trawl collect records them at the end of a run."
        )
    return section("statistics", "Statistics", content)


def _option(name: str) -> str:
    """Returns the name of an option on the command line."""
    return {"asynchronous": "async"}.get(name, name).replace("_", "-")


def _table(name: str, caption: str, found: Mapping[str, Any]) -> Markup:
    some = islice(found.items(), _MOST_ROWS)
    rows = [[tag("code", shown(key)), _value(value)] for key, value in some]
    if len(found) > _MOST_ROWS:
        caption += f", the first {_MOST_ROWS:,}"
    return table(f"{name}-table", caption, ("name", "value"), rows, text=2)


def _value(value: Any) -> Markup:
    if isinstance(value, dict | list):
        # JSON shows nested values in full; as_text cuts what is longer than a few lines.
        return tag("code", as_text(json.dumps(value)))
    return markup(as_text(value))
