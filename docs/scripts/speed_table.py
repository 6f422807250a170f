"""Writes what the benchmarks measured into README.md and docs/performance.md.

    python docs/scripts/speed_table.py
    python docs/scripts/speed_table.py --results benchmarks/results/single.json

The text between ``<!-- speed:begin -->`` and ``<!-- speed:end -->`` is replaced: in README.md by
how many times as fast as the others Trawl is, in docs/performance.md by every contender's speed.
The results are what ``benchmarks/run.py`` writes, and so is the picture that goes with them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "single.json"
BEGIN, END = "<!-- speed:begin -->", "<!-- speed:end -->"
PICTURE = "![Frames per second, the hand-written loop being 1]({}/speed.png)"
TRAWL = "Trawl"
TITLES = {"hand-written": "hand-written loop"}
# What the contenders' names begin with.
OTHERS = ("hand-written", "TorchRL", "Stable-Baselines3", "Tianshou")


def short_table(results: dict[str, Any]) -> str:
    """One row for each kind of work: Trawl's speed, and its ratio to the others'."""
    cases = results["cases"].values()
    others = [name for name in OTHERS if any(_times(case, name) for case in cases)]
    rows = [["Work", "Trawl, frames/s", *[TITLES.get(name, name) for name in others]]]
    for case in cases:
        trawl = [each for each in case["contenders"] if each["name"] == TRAWL]
        if trawl:
            ratios = [_times(case, name) for name in others]
            rows.append([case["title"], f"{_speed(trawl[0]):,.0f}", *ratios])
    about = (
        "How many times as fast as each of the others Trawl was, in frames per second. Of those "
        "that were measured in several ways the fastest counts, even if it delivers less than "
        f"Trawl does. {_measured(results)}"
    )
    return "\n\n".join([_table(rows, numbers_from=1), about, PICTURE.format("docs/assets")])


def full_table(results: dict[str, Any]) -> str:
    """One row for each contender of each kind of work, and the import times."""
    rows = [["Work", "Who", "µs/frame", "frames/s", "Trawl is × as fast", "least – most", "How"]]
    for case in results["cases"].values():
        trawl = next((each for each in case["contenders"] if each["name"] == TRAWL), None)
        title = case["title"]
        for each in case["contenders"]:
            if each["frames_per_second"]:
                rows.append([title, *_contender(each, trawl)])
                title = ""
    versions = results["versions"].items()
    packages = ", ".join(f"{name} {version}" for name, version in versions if version)
    parts = [_table(rows, numbers_from=2), f"{_measured(results)} {packages}."]
    parts.append(PICTURE.format("assets"))
    imports = [each for each in results["import"] if each["median_ms"] is not None]
    if imports:
        times = [[f"`{each['statement']}`", f"{each['median_ms']:.0f}"] for each in imports]
        parts.append(
            "What an import costs once torch, tensordict and Gymnasium are imported:\n\n"
            + _table([["Statement", "ms"], *times], numbers_from=1)
        )
    return "\n\n".join(parts)


def _contender(each: dict[str, Any], trawl: dict[str, Any] | None) -> list[str]:
    speed = _speed(each)
    cells = [each["name"], f"{1e6 / speed:.1f}", f"{speed:,.0f}"]
    if trawl is None or each is trawl:
        return [*cells, "", "", each["note"]]
    pairs = zip(trawl["frames_per_second"], each["frames_per_second"], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    span = f"{min(ratios):.2f} – {max(ratios):.2f}"
    return [*cells, f"{statistics.median(ratios):.2f}", span, each["note"]]


def _times(case: dict[str, Any], name: str) -> str:
    """Trawl's speed in that of ``name``, which may have taken part in several ways."""
    ratios = [
        each["trawl_times_as_fast"]
        for each in case["contenders"]
        if each["name"].startswith(name) and each["trawl_times_as_fast"] is not None
    ]
    return f"{min(ratios):.2f}" if ratios else ""


def _speed(each: dict[str, Any]) -> float:
    return statistics.median(each["frames_per_second"])


def _measured(results: dict[str, Any]) -> str:
    settings, machine = results["settings"], results["machine"]
    clock = {"wall": "wall clock", "cpu": "processor time"}[settings["clock"]]
    return (
        f"Measured on {results['date'][:10]} with one thread on {machine['processor']} "
        f"({machine['cores']} cores), Python {machine['python']}: medians of "
        f"{settings['rounds']} rounds, {settings['seconds']} s each ({clock}), all in one run "
        "and in turns."
    )


def _table(rows: list[list[str]], numbers_from: int) -> str:
    """A Markdown table; from column ``numbers_from`` on, cells are set to the right."""
    head, *body = [["" if cell is None else str(cell) for cell in row] for row in rows]
    rule = ["---" if i < numbers_from or head[i] == "How" else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *body])


def replaced(page: str, block: str) -> str:
    """The page with another text between the markers.

    Raises:
        ValueError: if the page doesn't have each marker once, in their order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in before + after:
        raise ValueError(f"a page must have {BEGIN} and {END} once each, in this order")
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{after}"


def write(results: dict[str, Any], root: Path = ROOT) -> None:
    """Writes the tables into the two pages under ``root``."""
    for name, table in (("README.md", short_table), ("docs/performance.md", full_table)):
        path = root / name
        path.write_text(
            replaced(path.read_text(encoding="utf-8"), table(results)), encoding="utf-8"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    write(json.loads(parser.parse_args().results.read_text(encoding="utf-8")))
