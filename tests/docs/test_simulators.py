"""Recipes for simulators: the batch has the true last observations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trawl.collectors import Collector
from trawl.envs import TorchVectorEnv

LOOKALIKES = Path(__file__).parent / "lookalikes"


@pytest.mark.parametrize(
    ("auto_reset", "options"),
    [
        (True, {"autoreset_mode": "SameStep"}),
        (False, {"autoreset_mode": "Disabled", "partial_reset": "ids"}),
    ],
    ids=["own resets", "the collector's"],
)
def test_maniskill(auto_reset: bool, options: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(LOOKALIKES)])
    from mani_skill.envs import LENGTH, PickCube
    from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

    vector = ManiSkillVectorEnv(PickCube(num_envs=8), auto_reset)
    with Collector(TorchVectorEnv(vector, **options), frames_per_batch=8 * 20) as collector:
        collector.set_seed(0)
        batch = collector.next()
    steps, after = batch["observation"][..., 0], batch["next", "observation"]
    assert torch.equal(after[..., 0], steps + 1)
    assert torch.equal(batch["next", "truncated"].squeeze(-1), after[..., 0] == LENGTH)
    won = batch["next", "terminated"].squeeze(-1)
    assert won.any()
    assert torch.equal(won, after[..., 1] > 1)
