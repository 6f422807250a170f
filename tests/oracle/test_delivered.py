"""What collectors deliver is what the oracle says, for every pair of options and environments."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from itertools import combinations
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.oracle.comparing import (
    AGENTS,
    DELIVERIES,
    KINDS,
    TORCHRL,
    WHOLE,
    Case,
    arguments,
    can_pad,
    check,
)
from tests.oracle.design import pairs, pairwise
from trawl.supported import Trait, refused
from trawl.testing.faces import POOLS
from trawl.testing.oracle import Options

# The first value of each factor can be combined with all values of the others.
FACTORS: dict[str, list[Any]] = {
    "face": list(KINDS),
    "place": ["one", "sync", "async", "sync_messages", "ready", "ready_sync"],
    "delivery": list(DELIVERIES),
    "policy": ["module", "function", "tensordict", "recurrent", "spoiling"],
    "frames_per_batch": [12, 3, 27],
    "exact": [False, True],
    "limit": [None, 2],
    "stack": [None, "reset", "zero"],
    "normalize": [None, "observations", "rewards", "both"],
    "random": [False, True],
    "reset_at_each_iter": [False, True],
    "set_truncated": [False, True],
    "is_init": [False, True],
    "policy_version": [False, True],
    "compact_obs": [False, True],
    "track_traj_ids": [True, False],
    "levels": [False, True, "late"],
    "masks": [False, True],
    "failures": [False, True],
    "memory": [
        *(None, "written", "use_buffers=False", "return_same_td"),
        *("ahead", "joined", "joined in time"),
    ],
    "watched": [False, True],
}


BUFFERS = ("buffer", "steps", "buffer_whole")


def case_of(chosen: dict[str, Any]) -> Case:
    normalize, stack = chosen["normalize"], chosen["stack"]
    options = Options(
        frames_per_batch=chosen["frames_per_batch"],
        total_frames=31 if chosen["exact"] else float("inf"),
        exact_frames=chosen["exact"],
        max_frames_per_traj=chosen["limit"],
        frame_stack=stack and 3,
        padding=stack or "reset",
        normalize_observations=normalize in ("observations", "both"),
        normalize_rewards=normalize in ("rewards", "both"),
        clip=0.9 if normalize == "both" else 10.0,
        keep_raw=normalize == "both",
        init_random_frames=13 if chosen["random"] else 0,
        restart=chosen["failures"],
        recurrent=chosen["policy"] == "recurrent",
        **{
            name: chosen[name]
            for name in (
                "reset_at_each_iter",
                "set_truncated",
                "is_init",
                "policy_version",
                "compact_obs",
                "track_traj_ids",
            )
        },
    )
    memory = {
        "use_buffers=False": {"use_buffers": False},
        "return_same_td": {"return_same_td": True},
        "ahead": {"prefetch": 1},
        "joined": {"cat_results": 0},
        "joined in time": {"cat_results": -1},
    }
    return Case(
        chosen["face"],
        options,
        place=chosen["place"],
        delivery=chosen["delivery"],
        policy=chosen["policy"],
        further=memory.get(chosen["memory"], {}),
        levels=bool(chosen["levels"]),
        late=chosen["levels"] == "late",
        masks=chosen["masks"],
        failures=chosen["failures"],
        written=chosen["memory"] == "written",
        watched=chosen["watched"],
    )


def options_of(case: Case) -> dict[str, Any]:
    """Returns the values of the options by which the table says what is refused."""
    buffer = {"replay_buffer": True} if case.delivery in BUFFERS else {}
    given = {**arguments(case.options), **DELIVERIES[case.delivery], **case.further, **buffer}
    return {**given, "workers": case.place not in ("one", "ready")}


def allowed(case: dict[str, Any]) -> bool:
    chosen = {name: values[0] for name, values in FACTORS.items()} | case
    face, place, delivery = chosen["face"], chosen["place"], chosen["delivery"]
    normalize, exact, few = chosen["normalize"], chosen["exact"], chosen["frames_per_batch"] == 3
    workers, whole = place not in ("one", "ready"), delivery in WHOLE
    ready = place.startswith("ready")
    own = ready or face in POOLS
    late = face in POOLS or KINDS[face].kind.resets == "next"
    rows = delivery in ("rows", "split") and not exact
    traits = KINDS[face].traits | ({Trait.READY} if ready else set())
    if refused(options_of(case_of(chosen)), traits):
        return False
    # What the tests can't do.
    unknown = [
        # Which batches of asynchronous workers have random frames, or others' statistics.
        place == "async" and (chosen["random"] or normalize),
        workers and not rows and (chosen["random"] or normalize or face == "jax"),
        # Where the last batches of workers end.
        workers
        and exact
        and (chosen["set_truncated"] or chosen["reset_at_each_iter"] or chosen["failures"]),
        # Each step is a batch of its own, for all that is done to a batch as a whole.
        delivery == "steps"
        and (normalize or chosen["random"] or chosen["set_truncated"] or chosen["failures"]),
        # Its steps that only reset are none.
        delivery == "steps" and late and chosen["reset_at_each_iter"],
        place == "async" and face == "jax",
        # No episode would ever end.
        whole and chosen["reset_at_each_iter"] and few,
        chosen["policy"] == "function" and face in ("mapping", *AGENTS),
        # What its infos are is found out in the episodes before the one that fails at once.
        face in AGENTS[2:] and chosen["failures"] and chosen["levels"],
        not can_pad(face, delivery),
        # As in TorchRL, the first frame has no entry that only a policy knows.
        chosen["policy"] == "recurrent" and face in TORCHRL,
        chosen["masks"] and face in ("dm_env", *TORCHRL),
        # Which environments are ready, and when.
        own and (chosen["random"] or chosen["failures"]),
        own and workers and chosen["reset_at_each_iter"],
        own and workers and chosen["set_truncated"] and (delivery != "rows" or place == "async"),
        own and workers and late and normalize,
        face in POOLS and place == "ready_sync",
        chosen["memory"] in FACTORS["memory"][4:] and not place.startswith("sync"),
        str(chosen["memory"]).startswith("joined") and delivery == "split",
        own and (whole or delivery == "split") and normalize,
        ((own and whole) or face in POOLS) and chosen["reset_at_each_iter"],
        ready and not has_rows(face) and face not in POOLS,
        # A batch may end with some of the results of a vector environment's step.
        ready and KINDS[face].kind.together > 1 and chosen["reset_at_each_iter"],
        chosen["levels"] and face in ("dm_env", *TORCHRL),
        # A pool can't be reset again after steps that find out what its infos are.
        chosen["levels"] == "late" and face in POOLS,
        chosen["failures"] and face == "jax",
        # What agents do at random who do not act.
        face == "turns" and chosen["random"] and chosen["masks"],
    ]
    return not any(unknown)


def has_rows(face: str) -> bool:
    """Returns True if an environment's results go into rows, as AsyncBatchedCollector needs it."""
    others = ("tensors", "late", "jax", "parallel", "groups", "pool", "loose")
    return not face.startswith((*others, "agents_parallel", *TORCHRL))


CASES = pairwise(FACTORS, allowed)


def test_the_design_has_every_pair_that_can_meet() -> None:
    """Prints, with ``pytest -s``, how much is compared, and what can't be."""
    met = {frozenset(pair) for case in CASES for pair in combinations(case.items(), 2)}
    assert pairs(FACTORS, allowed) <= met
    every = pairs(FACTORS, lambda case: True)
    print(f"{len(CASES)} cases have {len(met)} of {len(every)} pairs; impossible are")
    left: dict[Any, list[Any]] = {}
    for pair in every - met:
        (one, a), (other, b) = sorted(pair, key=lambda item: list(FACTORS).index(item[0]))
        left.setdefault((other, b, one), []).append(a)
    for (other, b, one), values in sorted(left.items(), key=str):
        print(f"  {other}={b} with {one}={', '.join(sorted(map(str, values)))}")


def named(chosen: dict[str, Any]) -> str:
    return "-".join(
        f"{name}={value}" if name not in ("face", "place", "delivery") else str(value)
        for name, value in sorted(chosen.items(), key=lambda item: list(FACTORS).index(item[0]))
        if value != FACTORS[name][0] or name == "face"
    )


@pytest.mark.parametrize("chosen", CASES, ids=named)
@pytest.mark.filterwarnings("ignore")
def test_delivered_is_what_the_oracle_says(chosen) -> None:
    case = case_of(chosen)
    if case.kind.needs:
        pytest.importorskip(case.kind.needs)
    check(case)


@pytest.mark.parametrize(
    ("face", "compiled"),
    [("one", True), ("list", False), ("tensors_disabled", True), ("late_same_step", True)],
)
def test_batches_may_be_longer_than_a_chunk(face, compiled) -> None:
    """A compiled policy reads stacks in both, too."""
    frames = 520 * len(Case(face).envs[0])
    options = Options(frames, frame_stack=3, padding="zero" if compiled else "reset")
    further: dict[str, Any] = {"storing_device": "cpu"}
    if compiled:
        further["compile_policy"] = {"backend": "eager"}
    check(Case(face, options, further=further))


@st.composite
def chosen_values(draw: Any) -> dict[str, Any]:
    """Draws a value of each factor, such that all can be in one case, and lengths of episodes."""
    case: dict[str, Any] = {}
    for factor, values in FACTORS.items():
        fitting = [value for value in values if allowed({**case, factor: value})]
        case[factor] = draw(st.sampled_from(fitting))
    lengths = st.none()
    endless = case["delivery"] in WHOLE and case["reset_at_each_iter"]
    if not case["failures"] and not endless:
        # Failures are in certain steps of the usual episodes; longer ones might never end.
        lengths |= st.lists(st.integers(1, 7), min_size=1, max_size=6).map(tuple)
    return {**case, "lengths": draw(lengths)}


@given(chosen_values())
@pytest.mark.filterwarnings("ignore")
def test_any_values_may_meet(chosen) -> None:
    case = replace(case_of(chosen), lengths=chosen["lengths"])
    assume(not case.kind.needs or find_spec(case.kind.needs))
    check(case)
