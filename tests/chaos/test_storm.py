"""Workers that are killed at random, again and again; ``make chaos`` does it for longer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from chaos import storm


@pytest.mark.parametrize(
    "sync", [pytest.param(True, marks=pytest.mark.long), False], ids=["sync", "async"]
)
def test_random_kills(sync: bool) -> None:
    facts = storm(sync, seconds=3, every=0.2)
    assert facts["kills"] >= 2
    assert facts["descriptors after"] <= facts["descriptors before"] + 2
    assert facts["processes after"] == facts["processes before"]
    assert facts["resident after"] <= facts["resident before"] + 30
    assert facts["shared memory after"] <= 2 * facts["shared memory before"]
