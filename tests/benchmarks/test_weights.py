"""How the benchmarks of weights measure."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in set(sys.modules) - before:  # short names that others may want
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_calls_are_compared_with_the_copy_just_before() -> None:
    from weights.contestants import alternating

    called: list[str] = []

    def sleeping(name: str, seconds: float) -> None:
        called.append(name)
        time.sleep(seconds)

    calls = {"own": lambda: sleeping("own", 0.004), "given": lambda: sleeping("given", 0.02)}
    measured = alternating(
        lambda: sleeping("copy", 0.002), calls, 0.0, lambda: called.append("between")
    )
    assert called == ["copy", "own", "between", "copy", "given", "between"] * 2
    assert set(measured) == {"own", "own_copies", "given", "given_copies"}
    assert measured["own"] >= 4
    assert measured["given"] >= 20
    assert 0 < measured["own_copies"] < measured["given_copies"]


def test_a_workers_side_is_measured() -> None:
    from functools import partial

    from weights import models
    from weights.contestants import Reading

    reading = Reading(partial(models.scattered, 5, 10))
    measured = reading.turn(0.01)
    reading.close()
    assert set(measured) == {"take", "take_copies", "look"}
    assert all(value > 0 for value in measured.values())


def test_a_learner_is_measured() -> None:
    from functools import partial

    import work
    from multi.race import Contender
    from weights import models
    from weights.cases import learners

    (trawl,) = learners(partial(models.scattered, 5, 10), 2, False, make=work.ConstantEnv)
    assert isinstance(trawl, Contender)
    learner = trawl.build()
    try:
        assert set(learner.turn(0.01)) == {"own", "own_copies", "given", "given_copies"}
    finally:
        learner.close()


def test_the_large_policy_has_ten_million_parameters() -> None:
    from weights import models

    assert models.numel(models.large()) == pytest.approx(1e6 * models.LARGE, rel=0.01)


def test_every_race_can_be_chosen_and_reported() -> None:
    import run
    from multi import report
    from multi.race import Result
    from weights.cases import RACES

    assert list(RACES) == list(run.GROUPS["weights"])
    assert [make().name for make in RACES.values()] == list(RACES)
    results = [Result(make()) for make in RACES.values()]
    for result in results:
        for number, contender in enumerate(result.race.contenders, start=1):
            result.add(contender.name, dict.fromkeys(result.race.measures, float(number)))
    assert all(len(result.verdicts()) == len(result.race.goals) for result in results)
    assert len(report.tables(results, [], {}, "New weights")) == 2
    written = json.loads(json.dumps(report.as_json(results, {}, {})))
    assert set(written["cases"]) == set(RACES)
