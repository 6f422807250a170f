"""What was measured of many processes, as tables and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from harness import HAND, TRAWL
from multi.growth import PerWorker, verdicts
from multi.race import Contender, Result, Verdict
from report import circumstances


def tables(
    results: Sequence[Result],
    by_count: Sequence[Result],
    growth: dict[str, PerWorker],
    title: str = "Many processes",
) -> list[Table]:
    """All that there is to say."""
    made = [table(results, title)] if results else []
    made += [growth_table(by_count)] if by_count else []
    return [*made, goals_table([*results, *by_count], growth, title)]


def table(results: Sequence[Result], title: str) -> Table:
    """One row per contender and measure: its value, and how many times as good Trawl is."""
    made = Table(title=f"{title} (medians over the rounds)")
    for heading in ("case", "contender"):
        made.add_column(heading)
    for heading in ("measured", "to hand loop", "Trawl is x as good", "min - max"):
        made.add_column(heading, justify="right")
    made.add_column("note", style="dim")
    for result in results:
        case = result.race.name
        for contender in result.race.contenders:
            for cells in _rows(result, contender):
                made.add_row(case, *cells)
                case = ""
        made.add_section()
    return made


def _rows(result: Result, contender: Contender) -> list[list[str]]:
    name, note = contender.name, contender.note
    if name in result.missing:
        return [[name, *[""] * 4, f"left out: {result.missing[name]}"]]
    rows: list[list[str]] = []
    for key, measure in result.race.measures.items():
        value = result.median(name, key)
        if value is None:
            continue
        to_hand = result.ratios(key, HAND, name)
        ratios = [] if name == TRAWL else result.ratios(key, name)
        rows.append(
            [
                "" if rows else name,
                f"{value:,.{measure.digits}f} {measure.unit}",
                f"{statistics.median(to_hand):.2f}" if to_hand else "",
                f"{statistics.median(ratios):.2f}" if ratios else "",
                f"{min(ratios):.2f} - {max(ratios):.2f}" if ratios else "",
                "" if rows else note,
            ]
        )
    return rows


def growth_table(by_count: Sequence[Result]) -> Table:
    """One row per number of workers and contender."""
    made = Table(title="The same work with more workers (medians)")
    made.add_column("case")
    made.add_column("contender")
    measures = by_count[0].race.measures
    for measure in measures.values():
        made.add_column(measure.unit, justify="right")
    for result in by_count:
        case = result.race.name
        for contender in result.race.contenders:
            values = [result.median(contender.name, key) for key in measures]
            pairs = zip(values, measures.values(), strict=True)
            cells = ["" if value is None else f"{value:,.{m.digits}f}" for value, m in pairs]
            made.add_row(case, contender.name, *cells)
            case = ""
        made.add_section()
    return made


def goals_table(results: Sequence[Result], growth: dict[str, PerWorker], title: str) -> Table:
    """One row per goal: what it asks for, and what became of it."""
    made = Table(title=f"{title}: goals")
    made.add_column("case")
    made.add_column("goal")
    made.add_column("median", justify="right")
    made.add_column("min - max", justify="right")
    for name, verdict in all_verdicts(results, growth):
        low, high = min(verdict.rounds), max(verdict.rounds)
        median = f"{verdict.median:.2f}"
        made.add_row(
            name,
            verdict.wanted,
            median if verdict.met else f"[bold red]{median}[/]",
            f"{low:.2f} - {high:.2f}",
        )
    return made


def all_verdicts(
    results: Sequence[Result], growth: dict[str, PerWorker]
) -> list[tuple[str, Verdict]]:
    """Every goal that could be judged, with the name of its case."""
    judged = [(result.race.name, each) for result in results for each in result.verdicts()]
    return [*judged, *(("workers", each) for each in verdicts(growth))]


def as_json(
    results: Sequence[Result], growth: dict[str, PerWorker], settings: dict[str, Any]
) -> dict[str, Any]:
    """Everything measured, with what is needed to read it later."""
    return {
        **circumstances(settings),
        "cases": {result.race.name: _case_json(result) for result in results},
        "per_further_worker": {name: dataclasses.asdict(each) for name, each in growth.items()},
        "goals": [
            {
                "case": name,
                "measure": verdict.goal.measure,
                "wanted": verdict.wanted,
                "rounds": verdict.rounds,
                "median": verdict.median,
                "met": verdict.met,
            }
            for name, verdict in all_verdicts(results, growth)
        ],
    }


def _case_json(result: Result) -> dict[str, Any]:
    return {
        "title": result.race.title,
        "measures": {
            key: dataclasses.asdict(measure) for key, measure in result.race.measures.items()
        },
        "contenders": [
            {
                "name": contender.name,
                "note": contender.note,
                "missing": result.missing.get(contender.name),
                "rounds": result.values.get(contender.name, {}),
            }
            for contender in result.race.contenders
        ],
    }
