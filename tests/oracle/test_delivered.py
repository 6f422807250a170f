"""What collectors deliver is what the oracle says, for every pair of options and environments."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.oracle.cases import Case
from tests.oracle.comparing import WHOLE, check
from tests.oracle.design import met, pairs
from tests.oracle.factors import (
    CASES,
    FACTORS,
    OTHERS,
    STATE_CASES,
    STATES,
    allowed,
    case_of,
    named,
    possible,
)
from trawl.testing.oracle import Options


def test_the_design_has_every_pair_that_can_meet() -> None:
    """Prints, with ``pytest -s``, how much is compared, and what can't be."""
    found = met([*CASES, *OTHERS])
    assert pairs(FACTORS, allowed) <= found
    assert pairs(STATES, possible) <= met(STATE_CASES)
    every = pairs(FACTORS, lambda case: True)
    count = len(CASES) + len(OTHERS)
    print(f"{count} cases have {len(every & found)} of {len(every)} pairs; impossible are")
    left: dict[Any, list[Any]] = {}
    for pair in every - found:
        (one, a), (other, b) = sorted(pair, key=lambda item: list(FACTORS).index(item[0]))
        left.setdefault((other, b, one), []).append(a)
    for (other, b, one), values in sorted(left.items(), key=str):
        print(f"  {other}={b} with {one}={', '.join(sorted(map(str, values)))}")


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
