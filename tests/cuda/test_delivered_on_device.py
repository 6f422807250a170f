"""Collectors deliver the same on any device: with data of simulators, policies or batches on it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.cuda.device import DEVICE, ON_GPU
from tests.oracle.comparing import check
from tests.oracle.factors import CASES, OTHERS, case_of, named
from trawl.testing import faces

OPTIONS: list[dict[str, Any]] = [
    {"device": DEVICE},
    {"storing_device": DEVICE},
    {"policy_device": DEVICE},
    {"storing_device": "cpu"},
]
EVERY = [*CASES, *OTHERS]


@pytest.mark.parametrize("further", OPTIONS, ids=lambda given: next(iter(given)))
@pytest.mark.parametrize("chosen", EVERY if ON_GPU else EVERY[:3], ids=named)
@pytest.mark.filterwarnings("ignore")
def test_delivered_is_what_the_oracle_says(chosen, further, monkeypatch) -> None:
    monkeypatch.setattr(faces, "TensorSimulator", partial(faces.TensorSimulator, device=DEVICE))
    case = case_of(chosen)
    if case.face == "jax" and ON_GPU and "device" in further:
        pytest.skip("JAX's arrays stay where JAX has made them")
    if case.kind.needs:
        pytest.importorskip(case.kind.needs)
    check(replace(case, further={**case.further, **further}))
