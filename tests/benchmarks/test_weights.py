"""How the benchmarks of weights measure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.usefixtures("importable")


def test_calls_are_compared_with_the_copy_just_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from weights import contestants

    called: list[str] = []
    now = [0.0]

    def taking(name: str, seconds: float) -> None:
        called.append(name)
        now[0] += seconds

    monkeypatch.setattr(contestants, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    calls = {"own": lambda: taking("own", 0.004), "given": lambda: taking("given", 0.02)}
    measured = contestants.alternating(
        lambda: taking("copy", 0.002), calls, 0.0, lambda: called.append("between")
    )
    assert called == ["copy", "own", "between", "copy", "given", "between"] * 2
    expected = {"own": 4, "own_copies": 2, "given": 20, "given_copies": 10}
    assert measured == pytest.approx(expected)


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
