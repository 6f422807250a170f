"""On a GPU, collectors deliver the same: with data of simulators, policies or batches on it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.oracle.comparing import check
from tests.oracle.test_delivered import CASES, case_of, named
from trawl.testing import faces

DEVICE = "cuda:0"
OPTIONS: list[dict[str, Any]] = [
    {"device": DEVICE},
    {"storing_device": DEVICE},
    {"policy_device": DEVICE},
    {"storing_device": "cpu"},
]
HERE = CASES if torch.cuda.is_available() else CASES[:1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("further", OPTIONS, ids=str)
@pytest.mark.parametrize("chosen", HERE, ids=named)
@pytest.mark.filterwarnings("ignore")
def test_delivered_is_what_the_oracle_says(chosen, further, monkeypatch) -> None:
    monkeypatch.setattr(faces, "TensorSimulator", partial(faces.TensorSimulator, device=DEVICE))
    case = case_of(chosen)
    if case.face == "jax" and "device" in further:
        pytest.skip("JAX's arrays stay where JAX has made them")
    if case.kind.needs:
        pytest.importorskip(case.kind.needs)
    check(replace(case, further={**case.further, **further}))
