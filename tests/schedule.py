"""Which tests come first, and which run in one process where pytest-xdist runs them in several.

What takes long comes first, by ``durations.txt``, and tests of a file that share nothing run in
several processes if the file takes long. ``pytest --keep-durations`` writes that file anew.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

DURATIONS = Path(__file__).with_name("durations.txt")
# Seconds that a part of a file takes about, and those of a file or test that is listed.
_PART = 10.0
_LISTED = 2.0
# Tests whose ids begin with one of these use Ray.
_RAY = (
    "tests/ray/",
    "tests/evaluation/test_evaluation_ray.py",
    "tests/docs/test_doc_examples.py::test_page[docs/clusters.md]",
    "tests/docs/test_doc_examples.py::test_page[docs/planning-clusters.md]",
)


def uses_ray(test: str) -> bool:
    """Whether a test, given by its id, needs the process in which a cluster may run."""
    return test.startswith(_RAY)


def plan(tests: list[str]) -> dict[str, list[str]]:
    """The units of tests, in the order in which they begin; those of a unit run in one process."""
    seconds, whole = _known()
    of_files, units = defaultdict(list), defaultdict(list)
    for test in tests:
        of_files[test.split("::")[0]].append(test)
    takes: dict[str, float] = defaultdict(float)
    for path, inside in of_files.items():
        listed = [seconds[test] for test in inside if test in seconds]
        # Those of others are what is left, evenly.
        left = max(0.0, seconds.get(path, 0.0) - sum(listed))
        each = left / max(1, len(inside) - len(listed))
        begun = 0.0
        for test in inside:
            part = f"{path}#{int(begun / _PART)}" if path not in whole else path
            unit = "Ray" if uses_ray(test) else part
            units[unit].append(test)
            takes[unit] += seconds.get(test, each)
            begun += seconds.get(test, each)

    def turn(unit: str) -> tuple[bool, float]:
        return unit != "Ray", -takes[unit]

    return {unit: units[unit] for unit in sorted(units, key=turn)}


def _known() -> tuple[dict[str, float], set[str]]:
    """The seconds of files and of tests, and the files whose tests share what is costly."""
    lines = [line.split(" ", 2) for line in DURATIONS.read_text().splitlines()]
    seconds = {name: float(taken) for taken, _, name in lines}
    return seconds, {name for _, kind, name in lines if kind == "whole"}


class Clock:
    """Writes ``durations.txt`` from the reports of a run."""

    def __init__(self) -> None:
        self._files: dict[str, float] = defaultdict(float)
        self._tests: dict[str, float] = defaultdict(float)
        self._whole: set[str] = set()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Notes on the test itself whether it shares a fixture: its process may be another."""
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if any(each[-1].scope in ("module", "package") for each in fixtures):
            item.user_properties.append(("shares", True))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds what a part of a test took."""
        path = report.nodeid.split("::")[0]
        self._files[path] += report.duration
        self._tests[report.nodeid] += report.duration
        if ("shares", True) in report.user_properties:
            self._whole.add(path)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes what was found, the longest first."""
        if hasattr(session.config, "workerinput"):
            return
        lines = [
            (taken, f"{taken:.1f} {'whole' if name in self._whole else 'parts'} {name}")
            for name, taken in [*self._files.items(), *self._tests.items()]
            if taken >= _LISTED
        ]
        text = "".join(f"{line}\n" for _, line in sorted(lines, reverse=True))
        DURATIONS.write_text(text)


class ByDuration(LoadFileScheduling):
    """The tests of a unit share what they start; those that use Ray share a cluster."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        super().__init__(config, log)
        self._units: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        if not self._units:
            for unit, tests in plan(self.collection).items():
                self._units |= dict.fromkeys(tests, unit)
        return self._units[nodeid]

    def remove_node(self, node: Any) -> str | None:
        """Takes a process out, and distributes what it has not begun.

        Returns the test at which the process died, which counts as run, or None. pytest-xdist also
        distributes what was run already: a process that is given nothing else never reports, and
        the run would wait for it for ever.
        """
        units = self.assigned_work[node]
        left = {name: [test for test in unit if not unit[test]] for name, unit in units.items()}
        at_work = next((tests.pop(0) for tests in left.values() if tests), None)
        self.assigned_work.pop(node)
        for name, tests in left.items():
            if tests:
                self.workqueue[name] = dict.fromkeys(tests, False)
        if at_work is not None:
            for other in self.assigned_work:
                self._reschedule(other)
        return at_work
