"""A state taken anywhere continues to the bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from tests.oracle.cases import Case, collector_of
from tests.oracle.comparing import compare
from tests.oracle.continuing import saved
from tests.oracle.factors import STATE_CASES, case_of, named
from tests.oracle.test_seeds import Drawing, assert_same
from trawl.collectors import Collector, MultiSyncCollector

# Batches until the end, in both collectors.
BATCHES = 3


def some(batches: Iterator[Any], count: int) -> list[Any]:
    return [batch.clone() for batch in islice(batches, count)]


def assert_continued(case: Case, found: list[Any], wanted: list[Any]) -> None:
    """Checks batches to the bit; in which order those of asynchronous workers come is open."""
    if case.place != "async":
        assert_same(found, wanted)
        return
    key = case.seen if case.policy == "function" else case.kind.key("seen")
    for later in (False, True):
        mine, others = (
            [
                one
                for one in batches
                if (float(one[key].reshape(-1)[0]) >= len(case.envs[0])) == later
            ]
            for batches in (found, wanted)
        )
        count = min(len(mine), len(others))
        assert_same(mine[:count], others[:count])


@pytest.mark.parametrize("chosen", STATE_CASES, ids=named)
@pytest.mark.filterwarnings("ignore")
def test_a_state_continues_to_the_bit(chosen) -> None:
    case, at = case_of(chosen), chosen["at"]
    if case.kind.needs:
        pytest.importorskip(case.kind.needs)
    with collector_of(case, **case.in_step) as collector:
        batches = iter(collector)
        found = some(batches, at)
        state = saved(collector.state_dict())
        following = some(batches, BATCHES - at)
    with collector_of(case, **case.in_step) as collector:
        some(iter(collector), chosen["used"])
        collector.load_state_dict(state)
        continued = some(iter(collector), BATCHES - at)
    compare(case, found + following, count=BATCHES)
    assert_continued(case, continued, following)


def drawing_collectors() -> list[Any]:
    """Returns collectors of environments that draw, which act at random."""
    one, size = partial(Drawing, everywhere=True), {"frames_per_batch": 12}
    single = [
        Collector(source, **size, **more)
        for source in (one, [one] * 3, SyncVectorEnv([one] * 3))
        for more in ({}, {"trajs_per_batch": 2, "traj_format": "cat"})
    ]
    workers = [[one] * 2] * 2
    return [*single, MultiSyncCollector(workers, start_method="inline", **size)]


@pytest.mark.parametrize("seed", [None, 3])
def test_draws_go_on_after_a_state(seed) -> None:
    for collector, other in zip(drawing_collectors(), drawing_collectors(), strict=True):
        with collector, other:
            if seed is not None:
                collector.set_seed(seed)
            collector.next()
            state = saved(collector.state_dict())
            following = some(iter(collector), 2)
            torch.rand(5), random.random(), np.random.random()
            other.load_state_dict(state)
            assert_same(some(iter(other), 2), following)
