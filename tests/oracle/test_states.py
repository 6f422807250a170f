"""A state taken anywhere continues to the bit, in this process and in another one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import nursery
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from tests.oracle.comparing import BATCHES, Case, collector_of, compare
from tests.oracle.design import pairwise
from tests.oracle.test_delivered import FACTORS, allowed, case_of
from tests.oracle.test_seeds import Drawing, assert_same
from trawl.collectors import Collector, MultiSyncCollector
from trawl.testing.oracle import Options

STATES = {
    **FACTORS,
    "face": [face for face in FACTORS["face"] if face != "jax"],
    "delivery": ["rows", "cat", "in_turn"],
    "frames_per_batch": [12, 27],
    # Batches before the state, and batches of the collector that loads it.
    "at": [1, 0, 3],
    "used": [0, 2],
}

# JAX compiles each collector anew.
JAX = {name: values[0] for name, values in STATES.items()} | {"face": "jax", "levels": True}


def saved(state: Any) -> Any:
    file = BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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


def possible(case: dict[str, Any]) -> bool:
    """Returns True if batches of asynchronous workers depend on no order of arrival."""
    chosen = {name: values[0] for name, values in STATES.items()} | case
    mixed = chosen["delivery"] != "rows" or chosen["exact"]
    return allowed(case) and not (chosen["place"] == "async" and mixed)


CASES = [*pairwise(STATES, possible), JAX, {**JAX, "place": "sync", "limit": 2, "used": 2}]


def named(chosen: dict[str, Any]) -> str:
    return "-".join(f"{name}={chosen[name]}" for name in STATES if chosen[name] != STATES[name][0])


@pytest.mark.parametrize("chosen", CASES, ids=named)
@pytest.mark.filterwarnings("ignore")
def test_a_state_continues_to_the_bit(chosen) -> None:
    case, at = case_of(chosen), chosen["at"]
    if case.kind.needs:
        pytest.importorskip(case.kind.needs)
    with collector_of(case) as collector:
        batches = iter(collector)
        found = some(batches, at)
        state = saved(collector.state_dict())
        following = some(batches, BATCHES - at)
    with collector_of(case) as collector:
        some(iter(collector), chosen["used"])
        collector.load_state_dict(state)
        continued = some(iter(collector), BATCHES - at)
    compare(case, found + following)
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


OPTIONS = Options(frame_stack=3, restart=True, init_random_frames=13, max_frames_per_traj=2)
ELSEWHERE = [
    Case("one", Options(normalize_observations=True, restart=True), failures=True),
    Case("reusing", OPTIONS, place="sync", failures=True),
    Case("sync_same_step", OPTIONS, delivery="cat", levels=True),
    Case("tensors_disabled", OPTIONS, failures=True),
    Case("agents", OPTIONS, place="sync", masks=True),
    Case("parallel", Options(normalize_rewards=True), levels=True),
]


def continue_elsewhere(path: str) -> None:
    """Continues from the states in a file, and adds the batches that follow."""
    found = torch.load(path, weights_only=True)
    following = []
    for case, state in zip(ELSEWHERE, found, strict=True):
        with collector_of(case) as collector:
            collector.load_state_dict(state, trust=True)
            following.append(some(iter(collector), 2))
    torch.save(following, path)


@pytest.mark.filterwarnings("ignore")
def test_a_state_continues_in_another_process(tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo")
    states, following, path = [], [], tmp_path / "states"
    for case in ELSEWHERE:
        with collector_of(case) as collector:
            batches = iter(collector)
            some(batches, 2)
            states.append(collector.state_dict())
            following.append(some(batches, 2))
    torch.save(states, path)
    code = "import sys, tests.oracle.test_states as t; t.continue_elsewhere(sys.argv[1])"
    ended = nursery.run(code, path)
    assert ended.returncode == 0, ended.stderr
    for found, wanted in zip(torch.load(path, weights_only=False), following, strict=True):
        assert_same(found, wanted)
