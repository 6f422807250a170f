"""Writes the costs of a driver, and the workers it can serve, into docs/planning-clusters.md.

    python docs/scripts/planning_page.py

Measurements are read from ``benchmarks/results/driver_cost.json``. The limits that follow from them
are calculated, and written into ``benchmarks/results/planning.json``. On the page, the script
replaces the text between ``<!-- costs:begin -->`` and ``<!-- costs:end -->``, the text between the
same markers of ``limits``, and the picture.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "docs" / "scripts"
SIMULATE = ROOT / "benchmarks" / "clusters" / "simulate.py"
PACES = {"async": "at their own pace", "sync": "in lockstep"}
WAYS = {
    "async": "at their own pace",
    "sync": "in lockstep",
    "written": "writing into a replay buffer",
}


def module(path: Path) -> ModuleType:
    """A script, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def costs(found: dict[str, Any]) -> str:
    """Returns the table of a driver's costs, by place and pace of the workers."""
    rows = [["Workers are", "They collect", "`a`: µs per batch of a worker", "`b`: µs per MB"]]
    for place in found["places"].values():
        title = place["title"]
        for kind, fit in place["fits"].items():
            rows.append([title, PACES[kind], *(_micro(fit[key]) for key in ("part", "megabyte"))])
            title = ""
    errors = [
        error
        for place in found["places"].values()
        for fit in place["fits"].values()
        for error in fit["error"][:1]
    ]
    machine = found["machine"]
    about = (
        f"Measured on {found['date'][:10]} on {machine['processor']} ({machine['cores']} cores), "
        f"Python {machine['python']}. Depending on the row, the formula's median error is "
        f"{100 * min(errors):.0f} to {100 * max(errors):.0f} %."
    )
    return f"{_table(rows, 2)}\n\n{_wrapped(about)}"


def limits(found: dict[str, Any]) -> str:
    """Returns the table of the numbers of workers that keep one processor of the driver busy."""
    work = found["work"]
    about = (
        "The table shows how many workers keep one processor of the driver busy, and how many "
        "frames and bytes per second that is. Each worker makes "
        f"{work['speed']:,.0f} frames/s, in batches of {work['frames']:,} frames. A frame has "
        f"{work['frame_bytes']:,} bytes, so a batch has {work['megabytes']:.1f} MB."
    )
    rows = [["Workers are", "They collect", "Workers", "Frames/s", "GB/s"]]
    for where, place in found["places"].items():
        title = place["title"]
        for way, called in WAYS.items():
            one = found["curves"].get(f"{where}, {way}")
            if one is None or way == "sync":
                continue
            if where == "tree":
                called = f"{PACES[way]}, {found['branch']} for each actor"
            # What doesn't come to the driver has no limit there.
            far = "" if way == "written" else f"{one['most_gigabytes']:,.1f}"
            rows.append(
                [
                    title,
                    called,
                    f"{one['most_workers']:,.0f}",
                    f"{one['most_frames']:,.0f}",
                    far,
                ]
            )
            title = ""
    picture = "![Frames per second by the number of workers](assets/planning.svg)"
    legend = (
        "Lines show the formulas. Dots show a simulation in which the time for a batch varies by "
        f"{100 * found['spread']:.0f} %. The grey dotted line shows the frames that all workers "
        "together can make."
    )
    return "\n\n".join([_wrapped(about), _table(rows, 2), picture, _wrapped(legend)])


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 119, break_long_words=False, break_on_hyphens=False)


def _table(rows: list[list[str]], numbers_from: int) -> str:
    head, *body = rows
    rule = ["---" if i < numbers_from else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *body])


def write(found: dict[str, Any], root: Path = ROOT) -> None:
    """Writes the tables and the picture into the page under ``root``."""
    replaced = module(SCRIPTS / "speed_table.py").replaced
    path = root / "docs" / "planning-clusters.md"
    page = replaced(path.read_text(encoding="utf-8"), costs(found), "costs")
    path.write_text(replaced(page, limits(found), "limits"), encoding="utf-8")
    drawing = module(SCRIPTS / "draw_planning.py").drawing
    picture = root / "docs" / "assets" / "planning.svg"
    picture.write_text(drawing(found), encoding="utf-8")


if __name__ == "__main__":
    simulate = module(SIMULATE)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--costs", type=Path, default=simulate.RESULTS / "driver_cost.json")
    options = simulate.Options(costs=parser.parse_args().costs)
    found = simulate.planning(options)
    options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    write(found)
