"""Collectors of environments of every kind continue from a state, to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
from gymnasium.vector import AsyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle.cases import Case, collector_of
from tests.oracle.continuing import (
    CART,
    FORKED,
    ROWS,
    Drawing,
    Fragile,
    Masked,
    Pickled,
    Row,
    Walk,
    assert_continues,
    assert_continues_elsewhere,
    assert_counts,
    equal,
    following,
    normalized,
    parallel,
    row,
    saved,
    sync,
)
from trawl.collectors import Collector, MultiSyncCollector
from trawl.testing import NumberedEnv
from trawl.testing.oracle import Options

pytestmark = pytest.mark.filterwarnings("ignore")


def of_kind(name: str) -> Row:
    for needed in ROWS[name].needs.split():
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    return ROWS[name]


@pytest.mark.parametrize("name", list(ROWS))
def test_a_collector_continues_to_the_bit(name) -> None:
    # What the other one has seen before must not matter.
    assert_continues(of_kind(name), used=len(name) % 2)


@pytest.mark.parametrize("name", ["recurrent", "next step", "processes", "closed, whole", "pool"])
def test_a_state_before_the_first_batch(name) -> None:
    assert_continues(replace(of_kind(name), at=0))


@pytest.mark.parametrize("name", ["closed, whole", "pool"])
@given(calls=st.lists(st.sampled_from(["next", "next", "reset", "reset one", "other"]), max_size=8))
@settings(max_examples=5)
def test_a_state_after_any_calls(name, calls) -> None:
    """It also continues a state that was loaded itself."""
    case = of_kind(name)
    with case.make() as collector, case.make() as other, case.make() as third:
        if case.seed is not None:
            collector.set_seed(case.seed)
        for number, call in enumerate(calls):
            if call == "next":
                following(collector, 1, case.seed)
            elif call == "other" and case.seed is not None:
                collector.set_seed(number) if number % 2 else collector.rollout()
            else:
                collector.reset(*[[1]] * (call == "reset one"))
        for one, two in ((collector, other), (other, third)):
            two.load_state_dict(saved(one.state_dict()))
            assert two.resumed
            wanted = following(one, 2, case.seed)
            assert equal(following(two, 2, case.seed), wanted)


# --- every piece counts

LIMITED = row("CartPole-v1", policy=CART, frames_per_batch=30, max_frames_per_traj=17, at=3)
NORMALIZED = row(partial(normalized, sync("SameStep", Walk, Walk)), frames_per_batch=20)
# In the last step of the first batch, an episode of ten steps ends.
TEN = partial(NumberedEnv, lengths=[10])
TENS = row(partial(normalized, sync("NextStep", TEN, TEN)), frames_per_batch=20, at=1)
VECTOR = row(sync("NextStep", Walk, Walk), frames_per_batch=20)
BROKEN = {"on_env_error": "restart", "at": 4}
IN_PROCESSES = {"frames_per_batch": 80, "at": 3}
DRAWN = row(parallel(Drawing, 4, envs_per_worker=2), **IN_PROCESSES)
PIECES: dict[str, tuple[Row, int, tuple[Any, ...]]] = {
    **{
        "/".join(path): (LIMITED, 1, ("rollout", *path))
        for path in (
            *[("random", name) for name in ("torch", "numpy", "python")],
            ("writer", "rows", "'observation'"),
            *[("writer", "episodes", name) for name in ("next_id", "ids", "steps")],
        )
    },
    "environments": (LIMITED, 1, ("envs",)),
    "sub-environments": (VECTOR, 0, ("envs", 0, "env", "state", "base", "envs")),
    "wrappers": (NORMALIZED, 0, ("envs", 0, "env", "state", "wrappers")),
    "adapter": (TENS, 0, ("envs", 0, "vector")),
    "masks": (row(sync("NextStep", Masked, Masked)), 0, ("envs", 0, "vector")),
    "rebuilds": (row(sync("SameStep", Fragile, Fragile), **BROKEN), 0, ("envs", 0, "rebuilds")),
    "a member": (row(parallel(Walk, 4), **IN_PROCESSES), 0, ("envs", 0, "envs", 2)),
    "a process": (DRAWN, 0, ("envs", 0, "generators", 1)),
    **{
        f"a process, {name}": (DRAWN, 0, ("envs", 0, "generators", 0, name))
        for name in ("numpy", "torch", "python")
    },
    "restarts": (row(parallel(Fragile), **BROKEN), 0, ("envs", 0, "restarts")),
}


@pytest.mark.parametrize("piece", PIECES)
def test_each_piece_of_the_state_counts(piece) -> None:
    case, early, path = PIECES[piece]
    assert_counts(case, ("resume", *path), early)


# --- other processes


def scripted(case: Case, **_: Any) -> Any:
    return collector_of(case)


SEVERAL = Options(frame_stack=3, restart=True, init_random_frames=13, max_frames_per_traj=2)
SCRIPTED = [
    Case("one", Options(normalize_observations=True, restart=True), failures=True),
    Case("reusing", SEVERAL, place="sync", failures=True),
    Case("sync_same_step", SEVERAL, delivery="cat", levels=True),
    Case("tensors_disabled", SEVERAL, failures=True),
    Case("agents", SEVERAL, place="sync", masks=True),
    Case("parallel", Options(normalize_rewards=True), levels=True),
]
ROWS |= {case.face: row(case, cls=scripted, seed=None, needs=case.kind.needs) for case in SCRIPTED}


def test_another_process_continues(tmp_path) -> None:
    names = [(name, False) for name in ("closed, reset", "pool", "ready, recurrent")]
    # Without trust in a pickle, the episode is replayed.
    names += [("processes, pickle", trust) for trust in (False, True)]
    names += [(case.face, True) for case in SCRIPTED]
    names = [one for one in names if not ROWS[one[0]].needs or find_spec(ROWS[one[0]].needs)]
    assert_continues_elsewhere("tests.oracle.test_states_of_kinds", names, tmp_path / "states")


def test_pickles_of_processes_that_were_spawned_need_no_trust() -> None:
    """A worker gets the key from here, and gives it to a process of its own."""
    forked = row([parallel(Pickled, 1)], cls=FORKED)
    spawned = row(
        [parallel(Pickled, 1, start_method="spawn")],
        cls=partial(MultiSyncCollector, start_method="spawn"),
    )
    with forked.make() as collector:
        collector.set_seed(1)
        following(collector, 2)
        state = saved(collector.state_dict())
        wanted = following(collector, 2)
    with spawned.make() as other:
        other.load_state_dict(state)
        assert equal(following(other, 2), wanted)


def test_gymnasiums_own_processes_have_no_way() -> None:
    make = partial(AsyncVectorEnv, [Walk] * 2, context="fork")
    with Collector(make, frames_per_batch=10) as collector:
        assert collector.env_state_methods() == ["none", "none"]
