"""Writes what the benchmarks measured into README.md and docs/performance.md.

    python docs/scripts/speed_table.py
    python docs/scripts/speed_table.py --results benchmarks/results/single.json

The script replaces the text between pairs of markers such as ``<!-- speed:begin -->`` and
``<!-- speed:end -->``. In README.md, ``speed`` becomes a table of Trawl's speed and its ratio to
the speeds of others. In docs/performance.md, ``speed`` becomes a table of every contender's speed,
``multi`` the results of many processes, ``weights`` the cost of new weights, ``clusters`` the
results of clusters, ``gpu`` those of ``benchmarks/gpu.py``, and ``wakeups`` the comparison of
``benchmarks/wakeups.py``. ``benchmarks/run.py`` writes the other results and the pictures.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "single.json"
MULTI = ROOT / "benchmarks" / "results" / "multi.json"
WEIGHTS = ROOT / "benchmarks" / "results" / "weights.json"
CLUSTERS = ROOT / "benchmarks" / "results" / "clusters.json"
WAKEUPS = ROOT / "benchmarks" / "results" / "wakeups.json"
GPU = ROOT / "benchmarks" / "results" / "cuda.json"
PICTURE = "![Frames per second, relative to the hand-written loop]({}/speed.png)"
GROWTH = (
    "![By number of workers: frames per second, seconds to the first batch, and the driver's "
    "memory. By size of observations: frames per second]({})"
)
TRAWL = "Trawl"
TITLES = {"hand-written": "hand-written loop"}
# What the contenders' names begin with.
OTHERS = ("hand-written", "TorchRL", "Stable-Baselines3", "Tianshou", "RLlib", "Sample Factory")
# Alternatives in the README, whose table has at most five columns.
FEW = OTHERS[:3]


def short_table(results: dict[str, Any]) -> str:
    """One row for each kind of work: Trawl's speed, and its ratio to the others'."""
    cases = results["cases"].values()
    others = [name for name in FEW if any(_times(case, name) for case in cases)]
    rows = [["Work", "Trawl, frames/s", *[TITLES.get(name, name) for name in others]]]
    for case in cases:
        trawl = [each for each in case["contenders"] if each["name"] == TRAWL]
        if trawl:
            ratios = [_times(case, name) for name in others]
            rows.append([case["title"], f"{_speed(trawl[0]):,.0f}", *ratios])
    about = (
        "The last columns give Trawl's speed as a multiple of each alternative's speed. Each "
        f"alternative is shown at its fastest measured configuration. {_measured(results)}"
    )
    return "\n\n".join([_table(rows, numbers_from=1), about, PICTURE.format("docs/assets")])


def full_table(results: dict[str, Any]) -> str:
    """One row for each contender of each kind of work, and the import times."""
    about = f"{_measured(results)} {_packages(results)}"
    parts = [_contenders(results), about, PICTURE.format("assets")]
    imports = [each for each in results["import"] if each["median_ms"] is not None]
    if imports:
        times = [[f"`{each['statement']}`", f"{each['median_ms']:.0f}"] for each in imports]
        parts.append(
            "Import times, measured after torch, tensordict and Gymnasium were imported:\n\n"
            + _table([["Statement", "ms"], *times], numbers_from=1)
        )
    return "\n\n".join(parts)


def gpu_table(results: dict[str, Any]) -> str:
    """One row for each contender of each kind of work, and what the host waits for."""
    facts = results["device"].values()
    waits = sorted({each["waits_per_batch"] for each in facts})
    memory = [
        f"{each[key]:.0f} MiB ({key.removeprefix('mib_')})".replace("_", " ")
        for each in facts
        for key in each
        if key.startswith("mib_after")
    ]
    about = (
        f"{_circumstances(results, 'one GPU')} The GPU is {results['machine']['gpu']}. "
        f"{_packages(results)} In each batch, the host waits {' or '.join(map(str, waits))} times "
        f"for the device, whatever the number of steps. Memory of the device: {', '.join(memory)}."
    )
    return f"{_contenders(results)}\n\n{about}"


def _contenders(results: dict[str, Any]) -> str:
    rows = [["Work", "Contender", "µs/frame", "frames/s", "Ratio", "Range", "Notes"]]
    for case in results["cases"].values():
        trawl = next((each for each in case["contenders"] if each["name"] == TRAWL), None)
        title = case["title"]
        for each in case["contenders"]:
            if each["frames_per_second"]:
                rows.append([title, *_contender(each, trawl)])
                title = ""
    return _table(rows, numbers_from=2)


def _packages(results: dict[str, Any]) -> str:
    versions = results["versions"].items()
    packages = ", ".join(f"{name} {version}" for name, version in versions if version)
    return f"Versions: {packages}."


def _contender(each: dict[str, Any], trawl: dict[str, Any] | None) -> list[str]:
    speed = _speed(each)
    cells = [each["name"], f"{1e6 / speed:.{1 if speed < 1e6 else 3}f}", f"{speed:,.0f}"]
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
    return _circumstances(results, "one thread")


def _circumstances(results: dict[str, Any], threads: str) -> str:
    settings, machine = results["settings"], results["machine"]
    clocks = {"wall": "wall clock", "cpu": "processor time"}
    return (
        f"Measured on {results['date'][:10]} on {machine['processor']} ({machine['cores']} cores), "
        f"with Python {machine['python']} and {threads}. Values are medians of "
        f"{settings['rounds']} rounds of {settings['seconds']} s each "
        f"({clocks[settings.get('clock', 'wall')]}). All contenders took turns in a single run."
    )


def _table(rows: list[list[str]], numbers_from: int) -> str:
    """A Markdown table; from column ``numbers_from`` on, cells are set to the right."""
    head, *body = [["" if cell is None else str(cell) for cell in row] for row in rows]
    rule = ["---" if i < numbers_from or head[i] == "Notes" else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *body])


def multi_table(results: dict[str, Any]) -> str:
    """One row for each contender and measure of each kind of work, and how things grow."""
    rows = [["Work", "Contender", "Result", "Ratio", "Range", "Notes"]]
    by_count = {}
    for name, case in results["cases"].items():
        if name.startswith("workers_"):
            by_count[int(name.removeprefix("workers_"))] = case
            continue
        title = case["title"]
        for row in _measured_rows(case):
            rows.append([title, *row])
            title = ""
    parts = [_table(rows, numbers_from=2)]
    if by_count:
        parts.append(_count_table(by_count))
    added = results["per_further_worker"].get(TRAWL)
    if added:
        parts.append(
            f"From {added['fewest']} to {added['most']} workers, each additional worker takes "
            f"{added['start_ms']:.0f} ms to start, and {added['rss_mib']:.2f} MiB of the driver's "
            f"memory. Its part of each batch accounts for {added['batch_mib']:.2f} MiB of this."
        )
    parts.append(_circumstances(results, "one thread in each process"))
    parts.append(GROWTH.format("assets/growth.png"))
    return "\n\n".join(parts)


def weights_table(results: dict[str, Any]) -> str:
    """One row for each contender and measure of each kind of work."""
    rows = [["Work", "Contender", "Result", "Ratio", "Range", "Notes"]]
    for case in results["cases"].values():
        title = case["title"]
        for row in _measured_rows(case):
            rows.append([title, *row])
            title = ""
    about = _circumstances(results, "one thread in each process")
    return f"{_table(rows, numbers_from=2)}\n\n{about}"


def _measured_rows(case: dict[str, Any]) -> list[list[str]]:
    trawl = next((each for each in case["contenders"] if each["name"] == TRAWL), None)
    rows = []
    for each in case["contenders"]:
        name, note = each["name"], each["note"]
        for key, measure in case["measures"].items():
            values = each["rounds"].get(key)
            if not values:
                continue
            value = f"{statistics.median(values):,.{measure['digits']}f} {measure['unit']}"
            ratios = _ratios(trawl, each, key, measure["less"])
            median = f"{statistics.median(ratios):.2f}" if ratios else ""
            span = f"{min(ratios):.2f} – {max(ratios):.2f}" if ratios else ""
            rows.append([name, value, median, span, note])
            name = note = ""
    return rows


def _ratios(
    trawl: dict[str, Any] | None, other: dict[str, Any], key: str, less: bool
) -> list[float]:
    """How many times as good Trawl was, in each round; nothing if there is nothing to compare."""
    if trawl is None or other is trawl or not trawl["rounds"].get(key):
        return []
    if not all(trawl["rounds"][key] + other["rounds"][key]):
        return []  # one of them needs nothing of it
    pairs = list(zip(trawl["rounds"][key], other["rounds"][key], strict=True))
    return [theirs / ours if less else ours / theirs for ours, theirs in pairs]


def _count_table(by_count: dict[int, dict[str, Any]]) -> str:
    """One row for each number of workers: the contenders' speeds, and how long they took."""
    names = [each["name"] for each in by_count[min(by_count)]["contenders"]]
    started = [name for name in names if not name.startswith("hand-written")]
    head = ["Workers", *[f"{name}, frames/s" for name in names]]
    rows = [[*head, *[f"{name}, s to the first batch" for name in started]]]
    for count, case in sorted(by_count.items()):
        rounds = {each["name"]: each["rounds"] for each in case["contenders"]}
        cells = [_median(rounds, name, "speed", ",.0f") for name in names]
        cells += [_median(rounds, name, "first_batch", ".2f") for name in started]
        rows.append([str(count), *cells])
    return _table(rows, numbers_from=0)


def _median(rounds: dict[str, dict[str, list[float]]], name: str, key: str, form: str) -> str:
    values = rounds.get(name, {}).get(key)
    return format(statistics.median(values), form) if values else ""


def wakeups_table(results: dict[str, Any]) -> str:
    """One row for each protocol: what a step takes, and what it costs the owner."""
    head, rows = ["Protocol"], {}
    for load, measured in results["loads"].items():
        head += [f"{load}: µs per step", "µs of the owner's processor"]
        for each in measured:
            cells = rows.setdefault(each["protocol"], [])
            cells += [f"{statistics.median(each[key]):.0f}" for key in ("step_us", "owner_us")]
    table = _table([head, *([name, *cells] for name, cells in rows.items())], numbers_from=1)
    return f"{table}\n\n{_circumstances(results, 'one thread in each process')}"


def replaced(page: str, block: str, mark: str = "speed") -> str:
    """The page with another text between the markers.

    Raises:
        ValueError: if the page doesn't have each marker once, in their order.
    """
    opening, closing = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    before, begin, rest = page.partition(opening)
    _, end, after = rest.partition(closing)
    if not (begin and end) or opening in rest or closing in before + after:
        raise ValueError(f"a page must have {opening} and {closing} once each, in this order")
    return f"{before}{opening}\n\n{block}\n\n{closing}{after}"


def write(
    results: dict[str, Any],
    root: Path = ROOT,
    multi: dict[str, Any] | None = None,
    weights: dict[str, Any] | None = None,
    clusters: dict[str, Any] | None = None,
    wakeups: dict[str, Any] | None = None,
    gpu: dict[str, Any] | None = None,
) -> None:
    """Writes the tables into the pages under ``root``."""
    for name, table in (("README.md", short_table), ("docs/performance.md", full_table)):
        path = root / name
        page = replaced(path.read_text(encoding="utf-8"), table(results))
        if multi is not None and table is full_table:
            page = replaced(page, multi_table(multi), "multi")
        if weights is not None and table is full_table:
            page = replaced(page, weights_table(weights), "weights")
        if clusters is not None and table is full_table:
            page = replaced(page, weights_table(clusters), "clusters")
        if gpu is not None and table is full_table:
            page = replaced(page, gpu_table(gpu), "gpu")
        if wakeups is not None and table is full_table:
            page = replaced(page, wakeups_table(wakeups), "wakeups")
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="default: %(default)s")
    parser.add_argument("--multi", type=Path, default=MULTI, help="default: %(default)s")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="default: %(default)s")
    parser.add_argument("--clusters", type=Path, default=CLUSTERS, help="default: %(default)s")
    parser.add_argument("--wakeups", type=Path, default=WAKEUPS, help="default: %(default)s")
    parser.add_argument("--gpu", type=Path, default=GPU, help="default: %(default)s")
    given = parser.parse_args()
    more = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in (
            ("multi", given.multi),
            ("weights", given.weights),
            ("clusters", given.clusters),
            ("wakeups", given.wakeups),
            ("gpu", given.gpu),
        )
        if path.exists()
    }
    write(json.loads(given.results.read_text(encoding="utf-8")), **more)
