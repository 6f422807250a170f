"""How the benchmarks of many processes measure."""

from __future__ import annotations

import importlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("importable")
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


class Counting:
    """A contestant whose child counts all the time, and which tells how far it got."""

    def __init__(self, path: str) -> None:
        import subprocess

        program = (
            "import sys, time\n"
            "while True:\n"
            "    open(sys.argv[1], 'a').write('.')\n"
            "    time.sleep(0.001)\n"
        )
        self._child = subprocess.Popen([sys.executable, "-c", program, path])
        self._path = Path(path)
        self.facts = {"pid": float(self._child.pid)}
        self.layout: dict[str, str] = {}

    def turn(self, seconds: float) -> dict[str, float]:
        before = self._path.stat().st_size
        time.sleep(seconds)
        return {"speed": (self._path.stat().st_size - before) / seconds}

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


class Steady:
    """A contestant that always measures the same."""

    def __init__(self, **measured: float) -> None:
        self._measured = measured
        self.facts = {"first": 4.0 * measured["speed"]}
        self.layout: dict[str, str] = {}

    def turn(self, seconds: float) -> dict[str, float]:
        return self._measured

    def close(self) -> None:
        pass


def not_installed() -> Steady:
    raise ImportError("no such package")


def failing() -> Steady:
    print("said before")
    raise KeyError("what went wrong")


def test_a_contender_stands_still_between_its_turns(tmp_path: Path) -> None:
    from multi.host import Host

    path = tmp_path / "count"
    path.touch()
    host = Host(partial(Counting, str(path)))
    try:
        child = psutil.Process(int(host.facts["pid"]))
        assert host.turn(0.3)["speed"] > 0
        # The signal is sent, and takes effect when the process is next looked at.
        while child.status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        count = path.stat().st_size
        time.sleep(0.1)
        assert path.stat().st_size == count
        assert host.turn(0.1)["speed"] > 0
    finally:
        host.close()
    assert not child.is_running()


def test_who_is_missing_is_left_out_and_goals_are_judged() -> None:
    from multi.race import SPEED, Contender, Goal, Measure, Race, measure

    contenders = (
        Contender("Trawl", partial(Steady, speed=30.0, cost=2.0)),
        Contender("slow", partial(Steady, speed=10.0, cost=5.0)),
        Contender("gone", not_installed),
    )
    judged = [
        (Goal("speed", 3.0, "slow"), "≥ 3 × slow", True),
        (Goal("speed", 4.0, "slow"), "≥ 4 × slow", False),
        (Goal("cost", 2.5, "slow"), "≥ 2.5 × slow", True),
        (Goal("cost", 1.9), "≤ 1.9 ms", False),
        (Goal("speed", 29.0), "≥ 29 frames/s", True),
    ]
    goals = (*(goal for goal, *_ in judged), Goal("speed", 1.0, "gone"))
    measures = {"speed": SPEED, "cost": Measure("ms", less=True)}
    result = measure(Race("name", "title", contenders, measures, goals), 2, 0.01)
    assert result.missing == {"gone": "no such package"}
    assert result.values["Trawl"] == {"speed": [30.0, 30.0], "cost": [2.0, 2.0]}
    assert result.ratios("speed", "slow") == [3.0, 3.0]
    assert result.ratios("cost", "slow") == [2.5, 2.5]
    assert [(one.wanted, one.met) for one in result.verdicts()] == [
        tuple(row[1:]) for row in judged
    ]


def test_starts_are_measured_in_new_processes() -> None:
    from multi.race import Contender, Measure, Race, measure

    contenders = (Contender("Trawl", partial(Steady, speed=0.5)),)
    race = Race("name", "title", contenders, {"first": Measure("s", less=True)}, fresh=True)
    assert measure(race, 2, 0.01).values == {"Trawl": {"first": [2.0, 2.0]}}


def test_a_failure_names_the_contender_and_shows_its_output() -> None:
    from multi.race import Contender, Race, measure

    race = Race("some case", "title", (Contender("somebody", failing),))
    with pytest.raises(RuntimeError, match="some case, somebody") as caught:
        measure(race, 1, 0.01)
    assert "what went wrong" in str(caught.value)
    assert "said before" in str(caught.value)


LOOPS = """
import sys
sys.path.insert(0, sys.argv[1])
from functools import partial
import work
from multi.cases import hand_single
from multi.collecting import SideBySide

loops = SideBySide(partial(hand_single, work.ConstantEnv, work.Constant(), 10), 2)
print(loops.layout["observation"], loops.turn(0.05)["speed"] > 0)
loops.close()
"""


def test_loops_run_side_by_side() -> None:
    import nursery  # which the processes of contenders don't find

    # They are forked, from a process without threads.
    done = nursery.run(LOOPS, str(BENCHMARKS))
    assert done.stdout == "[2, 10, 4] torch.float32 True\n", done.stderr


@pytest.mark.parametrize(
    ("group", "cases", "title"),
    [
        ("multi", "multi.cases", ""),
        ("clusters", "clusters.cases", "Clusters"),
        ("weights", "weights.cases", "New weights"),
    ],
)
def test_every_race_can_be_chosen_and_reported(group: str, cases: str, title: str) -> None:
    import run
    from multi import growth, report
    from multi.race import Result

    found = importlib.import_module(cases).RACES
    races, by_count = [make() for make in found.values()], []
    assert [race.name for race in races] == list(found)
    more = ["workers", "sizes", "sizes_async"] if group == "multi" else []
    assert sorted([*found, *more]) == sorted(run.GROUPS[group])
    if more:
        races += [growth.sizes(), growth.sizes_async()]
        by_count = [growth.workers(count) for count in growth.COUNTS]
    results = [Result(race) for race in (*races, *by_count)]
    for result in results:
        for number, contender in enumerate(result.race.contenders, start=1):
            result.add(contender.name, dict.fromkeys(result.race.measures, float(number)))
    assert all(len(result.verdicts()) == len(result.race.goals) for result in results)
    added: dict[str, Any] = {}
    if more:
        added = growth.per_worker(results[len(races) :])
        trawl = added["Trawl"]
        assert (trawl.fewest, trawl.most, trawl.start_ms) == (1, 32, 0.0)
    texts = [title] if title else []
    tables = report.tables(results[: len(races)], results[len(races) :], added, *texts)
    assert len(tables) == (3 if more else 2)
    written = json.loads(json.dumps(report.as_json(results, added, {})))
    assert set(written["cases"]) == {result.race.name for result in results}
    goals = sum(len(result.race.goals) for result in results)
    assert len(written["goals"]) == goals + len(growth.verdicts(added) if more else [])
