"""The protocols with which an owner and its processes wake each other."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COUNT = 7


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The script can be imported, and leaves no module and no process behind."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    sys.modules.pop("wakeups", None)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("number", range(COUNT))
def test_each_process_takes_each_step_once(number: int) -> None:
    from wakeups import PROTOCOLS, Load

    protocol = PROTOCOLS[number](Load(3, 1))
    try:
        for steps in range(1, 20):
            protocol.step()
            assert protocol.taken.tolist() == [steps] * 3
    finally:
        protocol.close()


def test_protocols_take_turns() -> None:
    from wakeups import PROTOCOLS, Load, compare

    assert len(PROTOCOLS) == COUNT
    results = compare(Load(2, 1), rounds=2, seconds=0.001)
    assert len({each.protocol for each in results}) == COUNT
    for each in results:
        assert len(each.step) == len(each.processor) == 2
        assert min(each.step) >= 1.0  # the time that the processes compute
