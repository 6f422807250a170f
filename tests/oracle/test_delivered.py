"""What collectors deliver is what the oracle says, for every pair of options and environments."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.oracle.comparing import DELIVERIES, Case, arguments, check
from tests.oracle.design import pairwise
from trawl.supported import refused
from trawl.testing.faces import FACES
from trawl.testing.oracle import Options

# The first value of each factor can be combined with all values of the others.
FACTORS: dict[str, list[Any]] = {
    "face": list(FACES),
    "place": ["one", "sync"],
    "delivery": list(DELIVERIES),
    "policy": ["module", "function", "tensordict"],
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
    "levels": [False, True],
    "masks": [False, True],
    "failures": [False, True],
    "memory": [None, "use_buffers=False", "return_same_td"],
}


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
        init_random_frames=13 if chosen["random"] else 0,
        restart=chosen["failures"],
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
    }
    return Case(
        chosen["face"],
        options,
        place=chosen["place"],
        delivery=chosen["delivery"],
        policy=chosen["policy"],
        further=memory.get(chosen["memory"], {}),
        levels=chosen["levels"],
        masks=chosen["masks"],
        failures=chosen["failures"],
    )


WHOLE = ("padded", "cat", "in_turn")


@cache
def allowed(one: str, a: Any, other: str, b: Any) -> bool:
    chosen = {name: values[0] for name, values in FACTORS.items()} | {one: a, other: b}
    case = case_of(chosen)
    given = {**arguments(case.options), **DELIVERIES[case.delivery], **case.further}
    if refused({**given, "workers": case.place != "one"}, case.kind.traits):
        return False
    # What the scripts, or the comparison, can't do.
    beyond = [
        case.place != "one" and case.delivery in WHOLE,
        case.place != "one" and case.options.exact_frames,
        case.policy == "function" and case.face in ("mapping", "agents"),
        case.masks and case.face in ("dm_env", "jax", "torchrl"),
        case.levels and case.face in ("dm_env", "torchrl"),
        case.failures and case.face == "jax",
        case.levels and case.face in ("sync_disabled", "vector_disabled"),
    ]
    return not any(beyond)


CASES = pairwise(FACTORS, allowed)


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
