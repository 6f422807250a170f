"""The protocols with which an owner and its processes wake each other."""

from __future__ import annotations

import multiprocessing

import pytest

pytestmark = pytest.mark.usefixtures("importable")

COUNT = 7


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
    assert not multiprocessing.active_children()


def test_protocols_take_turns() -> None:
    from wakeups import PROTOCOLS, Load, compare

    assert len(PROTOCOLS) == COUNT
    results = compare(Load(2, 1), rounds=2, seconds=0.001)
    assert len({each.protocol for each in results}) == COUNT
    for each in results:
        assert len(each.step) == len(each.processor) == 2
        assert min(each.step) >= 1.0  # the time that the processes compute
